"""A learner's connection to a job: attach, pull, push, take batches, detach.

A learner is a worker process that computes gradients.

    with Client("demo", tensors={"w": numpy.zeros(10)}) as client:
        for batch in client.batches(samples=1000, batch_size=4, epochs=3):
            gradient = ...                      # of client.weights["w"], at batch.indices
            client.push({"w": gradient}, loss=..., samples=len(batch.indices))

A client belongs to one thread of one process at a time. Calls that push, from claim() to publish(),
calls that take batches, and consistent pulls: while one thread is in such a call, another one that
makes a call of the same kind gets a UsageError, and nothing is published. One may push while the
other takes batches or pulls. Any thread may read: weights, pull() into its own array, pull_rows().

A client takes no lock that another process could hold, and each of its waits ends when the job
ends. The client for C (native/gadei.h) does the same; tests/conformance/test_client*.py compare
them. native/ps_learner.h writes the frames of both.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import mmap
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt

from gadei_ps import _native
from gadei_ps.errors import (
    Evicted,
    GadeiError,
    JobFailed,
    JobNotFound,
    JobStopped,
    ModelMismatch,
    PushTimeout,
    UsageError,
)
from gadei_ps.job import hyperparameters, in_process
from gadei_ps.job.control import (
    Connection,
    Copy,
    FirstBatch,
    LastingConnection,
    SetWork,
    Status,
    StopJob,
    ask,
    memory_file,
)
from gadei_ps.kernels.optimizers import slots
from gadei_ps.learners import exit_hook
from gadei_ps.learners.attach import (
    Arrays,
    Place,
    attach,
    connected,
    detach,
    listener,
    number,
    offer,
)
from gadei_ps.learners.batches import Batch, Unanswered, check_integer, epoch_order
from gadei_ps.learners.gradients import (
    NONE,
    UNTOUCHED,
    Assigned,
    Gradients,
    Rows,
    Values,
    Where,
    addresses,
    assigned,
    check_names,
    no_gradient,
    product_at,
    row_indices,
    rows_at,
    whole_at,
)
from gadei_ps.learners.initial_load import InitialLoad, digest_of
from gadei_ps.learners.optimizer_settings import OptimizerSettings, client_settings
from gadei_ps.learners.reports import Reports
from gadei_ps.learners.waiting import AsyncPublisher, OneThread, Owner, deadline
from gadei_ps.memory import layout, owned, weights
from gadei_ps.memory.layout import (
    CONTROL,
    NO_BATCH,
    RING,
    SAME_STEPS,
    SHARD,
    FrameKind,
    Mode,
    Phase,
    Role,
    WireType,
)
from gadei_ps.memory.weights import F32, FloatArray, Model

__all__ = [
    "NAME_VARIABLE",
    "NONE",
    "UNTOUCHED",
    "AsyncPublisher",
    "Batch",
    "Client",
    "Gradients",
    "JobState",
    "Rows",
    "Where",
    "epoch_order",
    "product_at",
    "rows_at",
    "whole_at",
]

NAME_VARIABLE = "GADEI_PS_NAME"
UNKNOWN = math.nan  # loss

CONSISTENT_PULL_S = 5.0  # time limit of a consistent pull
WAIT_SLICE_NS = 100_000_000  # sleep of a wait between two checks whether the job is alive
JOB_GONE_S = 10.0  # how long a job may be without server and watchdog before its learners fail
REASON_TIMEOUT_S = 1.0  # for the watchdog to answer why the job was stopped
DRAIN_TIMEOUT_S = 30.0
MOST_DRAIN_S = 3600.0
COPY_TIMEOUT_S = 120.0  # for the watchdog to have the job copied
BATCH_POLL_S = 0.02  # between two checks whether the server has a batch

REASON_CHARACTERS = 400
WRITTEN = 64  # last writes of buffers that are remembered; a gradient is computed during a few
MOST_BATCHES = 2**31  # epochs, and batches of an epoch, are fewer
MOST_STEPS = 2**62  # the server sets no more

STOPPED = "a learner has stopped it"
REFUSED = (
    "gadei-ps: a gradient of this learner holds a NaN or an infinity: the job refuses it, and the "
    "weights stay as they are; if this continues, lower the learning rate (shown once)"
)
FORKED = "this learner belongs to the parent process; attach after the fork"
DETACHED = "this learner has detached from its job; attach again"
REST_FIRST = (
    "a batch of the server's has begun: take the rest of it first, by another loop over batches() "
    "or train_on()"
)
NO_GRANT = "no grant to continue"
NO_SLOT = "no slot came free: does the server apply gradients?"
NOT_EXCLUSIVE = "the other learners did not pause"


class JobState(NamedTuple):
    """Weights and optimizer state of a job between two gradients."""

    weights: FloatArray
    """Shape (model.elements,); model.views() cuts it up by name."""
    slots: tuple[FloatArray, ...]
    """Optimizer state, each of that shape: momentum, Adagrad's sum, or exp_avg and exp_avg_sq."""
    steps: int
    """Steps of the optimizer."""


def copied(
    connection: Connection | LastingConnection, request: Copy, elements: int
) -> tuple[dict[str, Any], FloatArray]:
    """Have the watchdog copy a job; return its reply and the values, shape (elements,).

    Into new memory each time, as a watchdog may still write into the last one.
    """
    file = memory_file(elements * 4, [])
    try:
        reply = connection.request(request, fds=[file])
        return reply, np.frombuffer(mmap.mmap(file, elements * 4), np.float32, elements)
    finally:
        os.close(file)


def not_copied(learner: object) -> UsageError:
    """Return the error for pickling or copying a learner: its memory and threads stay behind."""
    kind = type(learner).__name__
    return UsageError(
        f"this {kind} stays in the process that made it, and is not copied: make another {kind} in "
        "the child process"
    )


class Client:
    """One learner.

    job: a job's name or its socket's path; None takes it from the environment that `gadei-ps run`
    and `attach` set. tensors: initial values of the parameters by name (the first learner's make
    the model; later ones must have the same names and shapes); None if the job has its model.
    buffers: the same for tensors that no gradient changes; assign() writes them. They keep their
    types, and uint16 is bfloat16. frozen: the same for tensors that nothing writes. aliases:
    further names of tensors, each with the tensor's own; exports have them too. optimizer: the
    optimizer for the job, as `{"kind": "adamw", "lr": 1e-3}`, with the keywords of read_settings:
    the settings of the first learner are used unless the job sets its own, and later learners must
    give the same. wire: type of gradients in the ring, "float32", "bfloat16" or "float16".
    error_feedback: the client keeps what rounding to 16 bits did not send and adds it to the next
    gradient (Seide et al. 2014, '1-bit stochastic gradient descent'), at the cost of as much memory
    as the model has weights. The part that a frame carries is lost if the frame is abandoned,
    dropped or rejected. has_buffers: whether this learner has buffers of its own that it writes to
    the job while `writes_buffers`. name: shown by status.

    Raises JobNotFound, which names the reason, ModelMismatch, NoSharedMemory, ControlError;
    UsageError if the job has another optimizer. Warns if the job file or command line sets another
    one, which overrides this one.
    """

    assigned = 0
    """Frames published so far that were assignments."""
    _assigning: tuple[int, ...] = ()  # sequences of buffers' writes that may not be applied yet
    _written: tuple[int, ...] = ()  # base_version before each of the last writes of buffers
    is_successor = False
    """Whether this learner continues an earlier one of its process."""
    is_replica = False
    """Whether it exchanges the job's weights with a group, and the status does not list it as a
    learner."""

    def __init__(
        self,
        job: str | None = None,
        *,
        tensors: Arrays | None = None,
        buffers: Arrays | None = None,
        frozen: Arrays | None = None,
        aliases: Mapping[str, str] | None = None,
        optimizer: Mapping[str, Any] | OptimizerSettings | None = None,
        wire: str = "float32",
        error_feedback: bool = False,
        has_buffers: bool = False,
        name: str = "",
        **others: Any,
    ) -> None:
        target = in_process.target_job(job)
        try:
            self.wire = WireType[wire.upper()]
        except KeyError:
            raise UsageError(f"wire {wire!r}: use float32, bfloat16 or float16") from None
        if not isinstance(name, str):
            raise UsageError(f"name={name!r}: give a text, which status shows")
        exit_hook.install()
        settings = client_settings(optimizer, tensors, others)
        is_launched = job is None and number() >= 0
        try:
            self._connection = connected(str(target)) if is_launched else LastingConnection(target)
        except JobNotFound as error:
            from gadei_ps.job.diagnosis import explained  # only for this, and not small

            if (why := explained(error)) is error and is_launched:
                ended = Path(str(target)).stem
                raise JobStopped(f"job {ended!r} ended before this learner joined it") from None
            raise why from None
        place = None
        try:
            progress = listener()
            if tensors is not None:
                offer(self._connection, tensors, buffers or {}, progress, settings, aliases, frozen)
            name = name or os.environ.get(NAME_VARIABLE, "")
            place = attach(
                self._connection,
                name,
                progress,
                settings,
                buffers=has_buffers,
                replica=self.is_replica,
            )
            self._start(place, error_feedback)
        except BaseException:
            if place is None:
                self._connection.close()
            else:
                detach(self._connection, place.row, place.generation, os.getpid(), place)
            raise

    def _start(self, place: Place, error_feedback: bool) -> None:
        self.job: str = place.job
        self.row: int = place.row
        self.generation: int = place.generation
        self.place = place
        """The segments, mapped as long as the client lives."""
        self._map_control()
        self._rings = place.ring.address, self._control_at
        self.model: Model = weights.read_table(place.weights)
        self.flat: FloatArray = weights.data(place.weights)
        """The live weights, shape (model.elements,), read-only: the server changes them."""
        self.weights: dict[str, npt.NDArray[Any]] = self.model.views(
            weights.everything(place.weights)
        )
        """The same by name, with the frozen tensors. Reading them is a pull that copies nothing.
        Buffers are of their own types, and bfloat16 is uint16."""
        self.error_feedback = error_feedback
        self._residue: FloatArray = np.zeros(
            self.model.elements if error_feedback else 0, np.float32
        )
        self._learner = _native.Learner(
            *self._rings,
            place.weights.address,
            int(self.wire),
            _native.address(self._residue) if error_feedback else 0,
        )
        self._pushing, self._taking, self._copying = (
            OneThread(self._learner, kind)
            for kind in (_native.PS_PUSHING, _native.PS_TAKING, _native.PS_COPYING)
        )
        self.refuses_nonfinite = bool(int(self._control["refuse_nonfinite"]))
        """True if the job refuses gradients that hold a NaN or an infinity."""
        self._warns_nonfinite = self.refuses_nonfinite
        self._processes_gone_since: float | None = None
        """Time since which the job seems dead, over all waits: each may be short."""
        self._publisher: Callable[[], AsyncPublisher | None] = lambda: None
        self._owner: Callable[[], Owner | None] = lambda: None
        self._by_pieces: set[int] | None = None
        """Tensors that append() has written into the claimed slot; None if it holds none."""
        self._pauses = 0
        """Open blocks of pause()."""
        self._is_exclusive = False
        self._unanswered = Unanswered()
        self._work: SetWork | None = None
        self._last_push = False
        """True if the job stops, and this learner has pushed since."""
        self._reports = Reports(self._connection.path)
        self._initial_load = InitialLoad(self._connection, self.generation)
        self._steps_loaded = 0
        who = self.row, self.generation, os.getpid(), place, self._learner
        self._detach = functools.partial(detach, self._connection, *who)
        self._finalizer = weakref.finalize(self, self._detach)
        # Before weakref's own hook, which runs after threads and modules may be gone.
        atexit.register(self._finalizer)
        in_process.register(self)

    def __reduce__(self) -> NoReturn:
        raise not_copied(self)

    # -- words of the control segment -----------------------------------------------------------

    def _map_control(self) -> None:
        self._control: np.void = self.place.control.view(CONTROL)
        self._control_at = at = self.place.control.address
        self._version_at = at + layout.offset(CONTROL, "version")
        self._numbers_at = at + layout.offset(CONTROL, "numbers_done")
        # Read in each step, by calls that take a quarter of the time that NumPy takes for a field.
        self._report_at, self._stop_at, self._wave_at = (
            at + layout.offset(CONTROL, name) for name in ("report", "stop", "wave")
        )
        shard = at + layout.offset(CONTROL, "shard") + layout.offset(SHARD, "sequence")
        shards = int(self._control["shards"])
        self._writes_at = [shard + SHARD.itemsize * number for number in range(shards)]

    @property
    def current_version(self) -> int:
        """Gradients that the job has applied so far."""
        return _native.load(self._version_at)

    @property
    def base_version(self) -> int:
        """Version of the live weights for the next gradient's staleness.

        This learner's writes of buffers that were not applied yet count: the server applies them
        before the gradient, and they are not changes that the gradient has missed. While one is
        being applied it may count twice.
        """
        if not self._assigning:  # this is on the way of every gradient
            return _native.load(self._version_at)
        # Before the version is read: what is applied meanwhile counts twice, which does no harm.
        return len(self._unapplied_writes()) + self.current_version

    def _seen(self, version: int) -> int:
        """Return the version to publish with a gradient that was computed from a copy of `version`.

        This learner's writes of buffers since then are not changes that the gradient has missed.
        """
        seen = version
        for before in reversed(self._written):
            if before < version:
                break
            seen += 1
        return seen

    def _unapplied_writes(self) -> tuple[int, ...]:
        """Return the sequence numbers of this learner's writes of buffers that were not applied
        yet. Any thread may ask: it changes nothing."""
        writes = self._assigning
        return tuple(one for one in writes if _native.wait_applied(*self._rings, one, 0) < 0)

    @property
    def writes(self) -> int:
        """Counter that grows with every write to the weights, and once more when a gradient counts
        as applied.

        One shard counts current_version, and after its own write. So a copy between the two, or a
        write of another shard, changes this counter and not the version.
        """
        return sum(map(_native.load, self._writes_at)) + self.current_version

    @property
    def hyper(self) -> npt.NDArray[np.float64]:
        """The job's optimizer, packed (gadei_ps.kernels.optimizers.OptimizerSpec.unpack): float64
        of shape (groups, HYPER). The last group has the parameters that no other one names."""
        return hyperparameters.read(self._control, self._control_at)[1]

    @property
    def hyper_changes(self) -> int:
        """Changes of the hyperparameters by `gadei-ps set` or a changed job file so far."""
        return _native.load(self._numbers_at)

    @property
    def waits_for_others(self) -> bool:
        """Whether the job's synchronization model makes learners wait for one another."""
        return bool(_native.load32(self._report_at))

    @property
    def drops(self) -> bool:
        """Whether the job's synchronization model may continue without a learner that computes."""
        return int(self._control["mode"]) & 3 == Mode.COLLECT

    @property
    def stopping(self) -> bool:
        """Whether the job wants its learners to end."""
        return bool(_native.load32(self._stop_at))

    @property
    def wave(self) -> int:
        """Mini-batches whose gradients are to be added up and pushed as one; above 1 under WSP."""
        return max(1, _native.load(self._wave_at))

    def rows_with_buffers(self) -> list[int]:
        """Return the rows of the learners that may write the job's buffers; the first one does."""
        may_write = (self._control["roster"]["wanted"] != 0) & (self._control["has_buffers"] != 0)
        return [int(row) for row in np.flatnonzero(may_write)]

    @property
    def writes_buffers(self) -> bool:
        """Whether the job's buffers are those of this learner: of all attached learners that have
        buffers of their own, it has the lowest row."""
        return self.rows_with_buffers()[:1] == [self.row]

    # -- pull -----------------------------------------------------------------------------------

    def pull(
        self,
        out: FloatArray | None = None,
        *,
        consistent: bool = False,
        timeout_s: float | None = CONSISTENT_PULL_S,
    ) -> FloatArray:
        """Copy the weights: float32 of shape (model.elements,), into `out` if given.

        Without locks, so that gradients may be applied while it copies (Hogwild). `consistent`:
        each shard's part is one that it had between two gradients, or PushTimeout is raised after
        timeout_s. model.views() cuts the copy up.
        """
        copy = np.empty(self.model.elements, np.float32) if out is None else out
        version = self.base_version
        if consistent:
            self._pull_consistent(copy, timeout_s)
        else:
            np.copyto(copy, self.flat)
        self._record_copy(version)
        return copy

    def pull_rows(self, tensor: str, indices: npt.ArrayLike) -> FloatArray:
        """Copy some rows of a tensor, shape (n, and its own without the first dimension).

        Raises ModelMismatch.
        """
        check_names([tensor], self.weights)
        wanted = row_indices(tensor, indices)
        view = self.weights[tensor]
        rows = view.shape[0] if view.shape else 1
        bad = (wanted < 0) | (wanted >= rows)
        if bad.any():
            raise ModelMismatch(f"{tensor!r} has no row {wanted[bad][0]} of {rows}")
        self._record_copy(self.base_version)
        return view.reshape(rows, *view.shape[1:])[wanted]

    def _record_copy(self, version: int) -> None:
        """Record that the next gradient is computed from a copy of this version."""
        self._learner.version = version
        self._learner.copies = 1

    def _pull_consistent(self, copy: FloatArray, timeout_s: float | None) -> None:
        self.check_process()
        if copy.shape != self.flat.shape or copy.dtype != np.float32 or not copy.flags.c_contiguous:
            raise UsageError(f"out: need contiguous float32 of shape {self.flat.shape}")
        with self._copying:
            self._learner.copy_begin(_native.address(copy))
            try:
                self._wait(self._learner.copy_on, (), timeout_s, "no consistent copy")
            finally:
                self._learner.copy_end()

    @property
    def version(self) -> int:
        """Version of the weights that the next gradient is computed from, if push() gets none."""
        return self._learner.version

    def mark_current(self) -> None:
        """Record that the next gradient is computed from the live weights as they are now."""
        self._learner.version = self.base_version

    # -- turns ----------------------------------------------------------------------------------

    def wait_turn(self, timeout_s: float | None = None) -> None:
        """Wait until the synchronization model lets this learner begin its next iteration."""
        self.check_process()
        self._check_not_exclusive()
        self._wait(_native.wait_grant, (*self._rings, self.published), timeout_s, NO_GRANT)
        self.mark_current()
        self._learner.started = time.monotonic()

    def wait_mini_batch(self, number: int, timeout_s: float | None = None) -> None:
        """Wait until mini-batch `number` of a wave may begin.

        number: from 0 in the current wave, which the next gradient ends, and on into the wave after
        it. Only the last mini-batch of a wave waits for other learners; those before it may begin
        with the weights at hand. Once a last one may begin, the weights hold all that the model
        promises: pull then. The wave's run time does not count the wait, and the gradient counts as
        computed from the weights that it would have without this call.
        """
        self.check_process()
        self._check_not_exclusive()
        check_integer("number", number, most=2**32 - 1)
        begin = time.monotonic()
        arguments = *self._rings, self._learner.turn(number)
        try:
            self._wait(_native.wait_grant, arguments, timeout_s, NO_GRANT)
        finally:
            self._learner.started += time.monotonic() - begin

    @property
    def wanted(self) -> bool:
        """Whether the gradient of the current iteration may still be applied.

        False once the synchronization model has continued without it (Cutoff): the gradient will be
        dropped, and abandon() is the quicker way to the next iteration.
        """
        return self._learner.wanted()

    # -- push -----------------------------------------------------------------------------------

    def push(
        self,
        gradients: Gradients | FloatArray,
        *,
        loss: float = UNKNOWN,
        samples: int = 0,
        rate_scale: _native.Scales = 1.0,
        batch: int | None = None,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Publish one gradient and return its sequence number.

        gradients: by name (None and missing ones count as zero), or flat, float32 of shape
        (model.elements,), where the values of buffers are not read. If one of them is Rows, tensors
        and rows that are not given are left as they are, with the optimizer's state of them:
        momentum, Adagrad and Adam change a row only when a gradient names it
        (torch.optim.SparseAdam's rule). batch: id of the batch that the gradient answers; by
        default the oldest unanswered one. version: of the weights that it was computed from; by
        default those pulled last. A gradient that is not `wanted` any more is abandoned.
        rate_scale multiplies the job's learning rate: a number for all groups of parameters, or a
        tuple of one for each; or that tuple and a momentum. Raises PushTimeout, JobStopped,
        JobFailed; UsageError if another thread pushes, or after detach(). Then nothing has been
        published; after a KeyboardInterrupt `published` shows whether the gradient was.
        """
        kept: list[object] = []
        return self.push_from(
            addresses(self.model, gradients, kept),
            loss=loss,
            samples=samples,
            rate_scale=rate_scale,
            batch=batch,
            version=version,
            timeout_s=timeout_s,
        )

    def push_from(
        self,
        where: Sequence[int],
        *,
        loss: float = UNKNOWN,
        samples: int = 0,
        rate_scale: _native.Scales = 1.0,
        batch: int | None = None,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Push from addresses: four numbers for each tensor of the model, in its order.

        Of contiguous float32: whole_at() for all of it, rows_at() for rows, product_at() for a
        product that is computed on its way, NONE for nothing and for buffers. Or one number for
        all, the address of a flat gradient. The caller answers for the shapes. Raises what push()
        raises, and ModelMismatch for a row that the tensor does not have.
        """
        self._begin_push()
        learner = self._learner
        if not learner.wanted():
            return self.publish_nothing(batch, timeout_s, computed=True)
        answers = self._unanswered.begin(batch)
        seen = self._seen(learner.version if version is None else version)
        facts = seen, answers, samples, rate_scale, loss
        before = learner.published
        try:
            sequence = learner.push(facts, where)
            if sequence < 0:
                until = deadline(timeout_s)
                while sequence < 0:
                    self._claim(timeout_s, until)
                    sequence = learner.push(facts, where)
        except BaseException as error:
            self._restore_batch(error, before, batch, answers)
            if isinstance(error, IndexError | ValueError):
                raise self._converted(error) from None
            raise
        self._record_push(answers)
        return sequence

    def abandon(self, *, batch: int | None = None, timeout_s: float | None = None) -> int:
        """End the current iteration without a gradient; its batch is handed out again.

        Returns the sequence number, as push() does, and raises the same.
        """
        return self.publish_nothing(batch, timeout_s, computed=False)

    def give_up(self, *, batch: int | None = None, timeout_s: float | None = None) -> int:
        """Call abandon(), by its deprecated name."""
        warnings.warn("give_up() is deprecated: use abandon()", DeprecationWarning, stacklevel=2)
        return self.abandon(batch=batch, timeout_s=timeout_s)

    def publish_nothing(
        self, batch: int | None = None, timeout_s: float | None = None, *, computed: bool
    ) -> int:
        """End the current iteration without a gradient, as abandon() and unwanted pushes do.

        computed: whether its run time is that of a whole iteration.
        """
        self.claim(timeout_s)
        self._learner.empty(computed)
        return self.publish(batch=batch)

    def wait_applied(self, sequence: int | None = None, timeout_s: float | None = None) -> None:
        """Wait until the gradient, by default the last one, is in the weights or dropped.

        The next gradient then counts as computed from the weights of now.
        """
        self.check_process()
        published = self._learner.published
        wanted = published - 1 if sequence is None else sequence
        if wanted >= published:
            raise UsageError(
                f"sequence={sequence}: this learner has published {published} gradients, "
                "which are numbered from 0"
            )
        if wanted >= 0:
            what = "the gradient was not applied"
            self._wait(_native.wait_applied, (*self._rings, wanted), timeout_s, what)
        if not self._learner.copies:
            self.mark_current()

    @property
    def published(self) -> int:
        """Gradients published so far, with those abandoned."""
        return self._learner.published

    @property
    def residue(self) -> FloatArray:
        """Remainder of each value that rounding has not sent yet, with error feedback."""
        return self._residue

    @property
    def last_frame(self) -> npt.NDArray[np.void]:
        """Header (layout.FRAME, shape (1,)) of the gradient published last."""
        ring = self.place.ring.view(RING)
        slot = (self.published - 1) % int(ring["slots"])
        at = int(ring["slots_at"]) + slot * int(ring["slot_bytes"])
        return self.place.ring.array(layout.FRAME, 1, at)

    def _begin_push(self) -> None:
        """Check that this learner may push, and publish what is in flight."""
        self.check_process()
        self._check_not_exclusive()
        self._check_stopping()
        self._flush_publisher()

    def _check_stopping(self) -> None:
        """Raise JobStopped at the second push of a learner without batches() after a stop.

        The first one is that of the iteration in which the learner can see that the job stops.
        """
        if self._work is None and self.stopping:
            if self._last_push:
                raise self._end_of_job()
            self._last_push = True

    def _record_push(self, batch: int) -> None:
        """Record that a gradient is published, which answers `batch`."""
        self._processes_gone_since = None  # there was room for it, so the job was alive
        self._unanswered.remove(batch)
        if self._warns_nonfinite and not math.isfinite(self._learner.squares):
            self._warns_nonfinite = False  # the line is shown once
            print(REFUSED, file=sys.stderr, flush=True)

    def _restore_batch(
        self, error: BaseException, before: int, batch: int | None, answers: int
    ) -> None:
        """Restore the batch after an error in a push, unless the gradient was published.

        before: `published` before the push. An interrupt may come after it was published.
        """
        if isinstance(error, Exception) or self.published == before:
            self._unanswered.put_back(batch, answers)
        else:
            self._unanswered.remove(answers)

    def _converted(self, error: Exception) -> GadeiError:
        """Return an error of the native half as the user reads it."""
        if isinstance(error, IndexError):
            number, row = error.args
            tensor = self.model.tensors[number]
            return ModelMismatch(f"{tensor.name!r} has no row {row} of {tensor.rows}")
        return UsageError(str(error))

    # -- push in pieces -------------------------------------------------------------------------

    def claim(self, timeout_s: float | None = None) -> int:
        """Wait for the grant and for a free slot; return the slot's address.

        For gradients that come piece by piece: append() each of them, or write_named(), at
        PAYLOAD_AT, then publish(). The slot is this thread's until then; claiming again starts the
        same slot again.
        """
        self._begin_push()
        return self._claim(timeout_s, deadline(timeout_s))

    def _claim(self, timeout_s: float | None, until: float | None) -> int:
        """Claim with one deadline for both waits."""
        arguments = *self._rings, self.published
        with self._pushing:
            self._wait(_native.wait_grant, arguments, timeout_s, NO_GRANT, until)
            return self._wait(self._learner.claim, (), timeout_s, NO_SLOT, until)

    def write_named(self, payload: int, gradients: Gradients | FloatArray) -> None:
        """Write all tensors' gradients, as push() takes them, into a claimed slot."""
        kept: list[object] = []
        where = addresses(self.model, gradients, kept)
        self._by_pieces = None
        try:
            self._learner.write_frame(payload, where)
        except (IndexError, ValueError) as error:
            raise self._converted(error) from None

    def append(self, payload: int, number: int, where: Sequence[int]) -> None:
        """Write one tensor into a claimed slot: any of them, in any order, once.

        number: in the model. where: four numbers as push_from() takes them. Tensors that are
        not appended are left as they are. Raises ModelMismatch for a row outside the tensor.
        """
        if tuple(where) == NONE:
            return
        if not self._learner.kind:
            self._by_pieces = set()
        if self._by_pieces is None:
            raise UsageError("append() needs an empty slot: claim() one first")
        if self.model.tensors[number].role is Role.BUFFER:
            raise no_gradient(self.model.tensors[number])
        if number in self._by_pieces:
            raise UsageError(f"{self.model.tensors[number].name!r} is written already")
        try:
            self._learner.append(payload, number, where)
        except (IndexError, ValueError) as error:
            raise self._converted(error) from None
        self._by_pieces.add(number)

    def publish(
        self,
        *,
        loss: float = UNKNOWN,
        samples: int = 0,
        rate_scale: _native.Scales = 1.0,
        batch: int | None = None,
        version: int | None = None,
    ) -> int:
        """Make the claimed and written slot visible; return the gradient's sequence number."""
        self.check_process()
        if not self._learner.kind:
            raise UsageError("nothing is written into the claimed slot")
        answers = self._unanswered.begin(batch)
        seen = self._seen(self._learner.version if version is None else version)
        before = self.published
        try:
            sequence = self._learner.publish((seen, answers, samples, rate_scale, loss))
        except BaseException as error:
            self._restore_batch(error, before, batch, answers)
            if isinstance(error, ValueError):
                raise self._converted(error) from None
            raise
        if sequence < 0:
            self._unanswered.put_back(batch, answers)
            raise self._not_published(sequence)
        self._record_push(answers)
        return sequence

    def _not_published(self, result: int) -> GadeiError:
        return self._eviction() if result == _native.PS_EVICTED else self._end_of_job()

    # -- push by a device -----------------------------------------------------------------------

    def set_publisher(self, publisher: AsyncPublisher) -> None:
        """Register an asynchronous publisher. claim() flushes it first; waits fail if it fails;
        detach() closes it."""
        self._publisher = weakref.ref(publisher)

    def clear_publisher(self, publisher: AsyncPublisher) -> None:
        """Remove the publisher, which has ended."""
        if self._publisher() is publisher:
            self._publisher = lambda: None

    def check_publisher(self) -> None:
        """Raise what the publisher has failed with, such as a DeviceError."""
        if publisher := self._publisher():
            publisher.check()

    def _flush_publisher(self) -> None:
        """Flush: a slot is claimed by its number, and what is in flight has the next one."""
        if publisher := self._publisher():
            publisher.flush()

    def check_facts(
        self,
        *,
        version: int,
        loss: float | None = None,
        samples: int = 0,
        rate_scale: _native.Scales = 1.0,
        batch: int | None = None,
    ) -> _native.Facts:
        """Return the facts of a gradient for publish_landed(), before any of it is in flight.

        Raises UsageError for facts that no frame may have.
        """
        batch = self._unanswered.next(batch)
        facts = self._seen(version), batch, samples, rate_scale, 0.0 if loss is None else loss
        try:
            self._learner.check(facts)
        except ValueError as error:
            raise self._converted(error) from None
        return facts

    def publish_landed(self, cuda: _native.Cuda, facts: _native.Facts) -> int:
        """Let a device transfer what it has staged into the next slot, and its driver publish that.

        Waits for the grant and for a free slot. facts: of check_facts(). Returns 0, or
        the driver's error: then nothing is published.
        """
        self._begin_push()
        before = self.published
        try:
            while (result := self._learner.land(cuda, facts)) < 0:
                self._claim(None, None)
        except ValueError as error:
            raise self._converted(error) from None
        finally:
            if self.published != before:  # even if an interrupt came then
                self._record_push(facts[1])
        return result

    # -- waits ----------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise UsageError in a child process of the one that attached."""
        if self._learner.forked:
            raise UsageError(FORKED)

    def check_job(self) -> None:
        """Check the job in a loop that waits for something else.

        Raises JobStopped if the job has ended or is to end, and JobFailed if its processes have
        been gone for JOB_GONE_S.
        """
        if self.stopping or int(self._control["phase"]) == Phase.FAILED:
            raise self._end_of_job()
        self._check_processes(time.monotonic())

    def _wait(
        self,
        wait: Callable[..., int],
        arguments: tuple[int, ...],
        timeout_s: float | None,
        what: str,
        until: float | None = None,
    ) -> int:
        """Repeat a native wait in slices, and check between them whether the job is alive.

        timeout_s: as the caller gave it. until: its deadline; by default counted from now.
        """
        if until is None and timeout_s is not None:
            until = deadline(timeout_s)
        while True:
            rest = WAIT_SLICE_NS
            if until is not None:
                rest = max(0, int(min(rest, (until - time.monotonic()) * 1e9)))
            try:
                result = wait(*arguments, rest)
            except ValueError as error:  # another thread's turn, or detached
                raise UsageError(str(error)) from None
            if result >= 0 or result == _native.PS_FINISHED:
                self._processes_gone_since = None
                return result
            if self._learner.left:  # its own doing, whatever has become of its place since
                raise UsageError(DETACHED)
            if result == _native.PS_STOPPED:
                raise self._end_of_job()
            if result == _native.PS_EVICTED:
                raise self._eviction()
            self.check_publisher()
            now = time.monotonic()
            self._check_processes(now)
            if until is not None and now >= until:
                raise PushTimeout(f"{what} within {timeout_s} s")

    def _check_processes(self, now: float) -> None:
        """Raise JobFailed if the job's processes have been gone for JOB_GONE_S."""
        if _native.job_lives(self._control_at):
            self._processes_gone_since = None
        elif self._processes_gone_since is None:
            self._processes_gone_since = now
        elif now - self._processes_gone_since > JOB_GONE_S:
            raise JobFailed(f"the server and the watchdog of job {self.job!r} are gone")

    def _eviction(self) -> Evicted:
        return Evicted(f"job {self.job!r} has evicted this learner")

    def _end_of_job(self) -> GadeiError:
        if int(self._control["phase"]) == Phase.FAILED:
            return JobFailed(f"job {self.job!r} has failed: its parameter server died")
        reason = None
        with contextlib.suppress(GadeiError):
            reason = ask(str(self._connection.path), Status(), REASON_TIMEOUT_S).get("stop_reason")
        why = f"has ended: {reason}" if reason else "has been stopped"
        return JobStopped(f"job {self.job!r} {why}")

    # -- pauses ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Pause this learner in a block that takes long and computes no gradient (validation).

        The job does not kill this learner meanwhile. Under BSP the others wait for it, so that the
        run stays repeatable; under the other models they continue without it. Publishes first what
        a device has in flight. May be nested. Raises UsageError.
        """
        self.check_process()
        self._flush_publisher()
        self._pauses += 1
        try:
            if self._pauses == 1:
                _native.pause_learner(*self._rings, 1)
            yield
        finally:
            self._pauses -= 1
            if not self._pauses and not self._learner.left:
                _native.pause_learner(*self._rings, 0)

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float | None = None) -> Iterator[None]:
        """Pause all other learners in a block, in which this one may read and assign weights.

        Each of them finishes its current iteration, which is applied before the block begins, and
        begins no other until it has ended. In the block nobody else changes the weights: what
        pull() copies is of one instant, and what assign() writes is there unchanged at the end.
        A learner that never waits for its turn is paused at its next push instead; that gradient
        is applied after the block. If several learners ask, their blocks follow one another.

        This learner pushes nothing meanwhile. If it dies or detaches, the others continue; if it
        hangs longer than the job's learner_timeout_s, it is killed: see heartbeat(). A server that
        dies meanwhile changes nothing. Raises PushTimeout if the others do not pause in time,
        JobStopped, JobFailed, UsageError. A stop of the job waits for the end of the block; when
        its time is over, the block ends with JobStopped, and assignments from then on are rejected.
        """
        self.check_process()
        if self._is_exclusive:
            raise UsageError("exclusive: this learner has paused the others already")
        if self._learner.kind in (FrameKind.DENSE, FrameKind.ROWS):
            raise UsageError("exclusive: a gradient is begun and not pushed yet: push it first")
        self._flush_publisher()
        self._is_exclusive = True
        try:
            _native.ask_exclusive(*self._rings, 1)
            self._wait(_native.wait_exclusive, self._rings, timeout_s, NOT_EXCLUSIVE)
            yield
            if not (self._learner.left or _native.is_exclusive(*self._rings)):
                raise self._end_of_job() if self.stopping else self._eviction()
        finally:
            self._is_exclusive = False
            if not self._learner.left:
                _native.ask_exclusive(*self._rings, 0)

    def heartbeat(self) -> None:
        """Report that this learner is alive, in a block of exclusive() that takes long.

        For any thread. Raises JobStopped or JobFailed if the job has ended or is to end.
        """
        self.check_process()
        _native.beat(self._rings[0])
        self.check_job()

    def _check_not_exclusive(self) -> None:
        """Raise UsageError in a block of exclusive(), in which this learner must not push."""
        if self._is_exclusive:
            raise UsageError("exclusive: the other learners are paused: push after the block")

    # -- batches --------------------------------------------------------------------------------

    def batches(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """Take mini-batches from the server, until all epochs are done or the job stops.

        samples: rows of the data set, which every learner has whole. Each epoch is shuffled again
        by (seed, epoch), so that all learners agree. Answer every batch by one push. Also waits for
        the turn that the synchronization model gives. Under WSP a batch is a wave: `wave`
        mini-batches of batch_size, whose gradients are added up and pushed as one. After a loop
        that was left early, the next one begins with the unanswered batches.
        """
        left = self._unanswered.ids
        for batch in self._taken_batches(samples, batch_size * self.wave, epochs, seed, left=left):
            try:
                self.wait_turn()
            except JobStopped:
                return
            yield batch

    def waves(
        self,
        samples: int,
        batch_size: int,
        epochs: int,
        seed: int = 0,
        *,
        before_wait: Callable[[], object] | None = None,
    ) -> Iterator[list[Batch]]:
        """Take the same batches a wave at a time: at most `wave` mini-batches of batch_size.

        Waits for no turn: wait_mini_batch() does, for each of them. before_wait: is called when no
        batch is available; it must answer all that are taken, for which others may wait.
        """
        size = batch_size * self.wave
        for batch in self._taken_batches(samples, size, epochs, seed, before_wait):
            cuts = range(batch_size, len(batch.indices), batch_size)
            yield [batch._replace(indices=part) for part in np.split(batch.indices, cuts)]

    def set_work(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> None:
        """Set what the server hands out; every learner may set it, and all must give the same.

        Raises UsageError, ControlError.
        """
        self.check_process()
        for name, value in (("samples", samples), ("batch_size", batch_size), ("epochs", epochs)):
            check_integer(name, value, least=1)
        check_integer("seed", seed)
        batches = -(-samples // batch_size)
        if max(batches, epochs) >= MOST_BATCHES:
            raise UsageError(
                f"{batches} batches an epoch and {epochs} epochs: give fewer than {MOST_BATCHES} "
                "of each"
            )
        self._work = SetWork(batches=batches, epochs=epochs, seed=seed)
        self._connection.request(self._work)

    def take_batch(self, timeout_s: float | None = None) -> int | None:
        """Return the id of the next batch for this learner; None if there will be no more."""
        self.check_process()
        if len(self._unanswered) >= int(self._control["ahead"]):
            raise UsageError(
                f"batches that wait for their gradients: {len(self._unanswered)}; "
                "push once for each batch"
            )
        try:
            what = "no batch was handed out"
            with self._taking:
                taken = self._wait(_native.take_work, self._rings, timeout_s, what)
        except JobStopped:
            return None
        if taken == _native.PS_FINISHED:
            if int(self._control["phase"]) == Phase.FAILED:
                raise self._end_of_job()
            return None
        self._unanswered.add(taken)
        return taken

    def try_batch(self) -> int | None:
        """Return the id of a batch that comes before others are answered; None if there is none.

        Waits only while the server has one to hand out.
        """
        while True:
            try:
                return self.take_batch(BATCH_POLL_S)
            except PushTimeout:
                if not self._has_more():
                    return None

    def raise_ahead(self) -> bool:
        """Have the job hand out one batch more than this learner has, if it does not do so.

        False if the learner has as many as it may have.
        """
        wanted = self.unanswered + 1
        if wanted > layout.AHEAD:
            return False
        if wanted > int(self._control["ahead"]) and self._work is not None:
            self._connection.request(self._work.model_copy(update={"ahead": wanted}))
        return True

    @property
    def unanswered(self) -> int:
        """Batches taken that no push has answered yet."""
        return len(self._unanswered)

    @property
    def unanswered_ids(self) -> tuple[int, ...]:
        """Their ids, in the order in which pushes answer them."""
        return self._unanswered.ids

    def shares_first_batch(self, digest: int) -> bool:
        """Return whether another learner has begun with a mini-batch of this digest.

        False if no watchdog answers now.
        """
        with contextlib.suppress(GadeiError):
            reply = self._connection.request(FirstBatch(digest=digest), patience_s=0.0)
            return bool(reply["alike"])
        return False

    def stop_job(self, reason: str = "", timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Stop the job for all its learners (early stopping).

        Returns at once; this learner should end its loop, too. Loops over batches() end after the
        current batch. Learners with data of their own see `stopping`; their second push after that
        raises JobStopped. All that is pushed is applied, and the last checkpoint is written.
        reason: one line for the log and for the learners. timeout_s: how long learners may stay
        attached, at most 3600. Raises UsageError, ControlError.
        """
        self.check_process()
        if not isinstance(reason, str):
            raise UsageError(f"stop_job({reason!r}): give the reason as a text")
        if not 0 < timeout_s <= MOST_DRAIN_S:
            raise UsageError(f"stop_job(timeout_s={timeout_s}): give a number up to {MOST_DRAIN_S}")
        line = " ".join(reason.split()).encode(errors="backslashreplace").decode()
        self._connection.request(
            StopJob(
                drain=True,
                wait=False,
                timeout_s=timeout_s,
                reason=line[:REASON_CHARACTERS] or STOPPED,
                finished=True,
            )
        )

    def _taken_batches(
        self,
        samples: int,
        batch_size: int,
        epochs: int,
        seed: int,
        before_wait: Callable[[], object] | None = None,
        left: Sequence[int] = (),
    ) -> Iterator[Batch]:
        """Yield batches of the work. left: ids of batches taken before, which come first."""
        self.set_work(samples, batch_size, epochs, seed)
        order = np.empty(0, np.int64)
        epoch = -1
        for taken in chain(left, iter(lambda: self._take(before_wait), None)):
            index = taken & 0xFFFFFFFF
            if taken >> 32 != epoch:
                epoch = taken >> 32
                order = epoch_order(samples, seed, epoch)
            yield Batch(epoch, index, order[index * batch_size : (index + 1) * batch_size])

    def _take(self, before_wait: Callable[[], object] | None) -> int | None:
        if before_wait is None:
            return self.take_batch()
        if len(self._unanswered) < int(self._control["ahead"]):
            try:
                return self.take_batch(0.0)
            except PushTimeout:
                pass
        before_wait()
        return self.take_batch()

    def _has_more(self) -> bool:
        """Apply the batch ledger's rule of the same name to words that may change meanwhile."""
        control = self._control
        if int(control["work"]) != layout.Work.WORKING:
            return False
        if owned.is_on(control):
            return bool(int(control["requeued"])) or owned.left(control)
        following, epochs_done = int(control["next"]), int(control["epochs_done"])
        if int(control["requeued"]) or following & 0xFFFFFFFF != int(control["batches"]):
            return True
        return (following >> 32) + 1 < int(control["epochs"]) and epochs_done >= following >> 32

    # -- assignments ----------------------------------------------------------------------------

    def assign(
        self,
        values: Values,
        *,
        reset: bool = False,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> None:
        """Replace weights of the job by these values; return when they are in all shards.

        values: by name, each of its tensor's shape; tensors that are not named stay as they are.
        What this learner has pushed before is applied before. The server applies it exactly once,
        as a gradient. reset: the optimizer's momentum and moments of these tensors become zero;
        otherwise they stay. It answers no batch and waits for no turn. wait: if false, it returns
        when the values are published, as push() does. Raises ModelMismatch for another name or
        shape, UsageError for a NaN or an infinity in a parameter that the job refuses; then nothing
        has changed. Raises what push() raises; then it may still be applied.
        """
        where, arrays = self._check_values(values)
        if arrays:
            self._assign(
                where, timeout_s, reset=reset, wait=wait, buffers=self._are_buffers(values)
            )

    def add(self, values: Values, *, timeout_s: float | None = None, wait: bool = True) -> None:
        """Add these values to weights of the job; as assign() in all else.

        The optimizer is not involved: no learning rate, no momentum, no step. So what others push
        meanwhile stays, and comes before or after it, in each shard.
        """
        where, arrays = self._check_values(values)
        for tensor in self.model.tensors:
            if tensor.name in values and tensor.dtype != F32:
                raise ModelMismatch(f"{tensor.name!r} is {tensor.dtype}: assign() takes it")
        if arrays:
            self._assign(where, timeout_s, adds=True, wait=wait, buffers=self._are_buffers(values))

    def _are_buffers(self, values: Values) -> bool:
        written = (tensor for tensor in self.model.tensors if tensor.name in values)
        return all(tensor.role is not Role.PARAMETER for tensor in written)

    def _check_values(self, values: Values) -> Assigned:
        return assigned(self.model, values, finite=self.refuses_nonfinite)

    def _assign(
        self,
        where: list[int],
        timeout_s: float | None,
        *,
        stream: int = 0,
        reset: bool = False,
        adds: bool = False,
        steps: int = SAME_STEPS,
        until: float | None = None,
        wait: bool = True,
        buffers: bool = False,
    ) -> None:
        """Publish an assignment. until: deadline of timeout_s; by default counted from now.

        buffers: whether it writes buffers alone.
        """
        self.check_process()
        self._flush_publisher()
        if self._learner.kind in (FrameKind.DENSE, FrameKind.ROWS):
            raise UsageError("assign: a gradient is begun and not pushed yet: push it first")
        learner, facts = self._learner, (self._learner.version, NO_BATCH, 0, 1.0, UNKNOWN)
        started: Any = learner.started
        until = deadline(timeout_s) if until is None else until
        with self._pushing:
            slot = self._wait(learner.claim, (), timeout_s, NO_SLOT, until)
            version = self.base_version  # before it counts as written
            try:
                flags = (layout.RESET if reset else 0) | (layout.ADD if adds else 0)
                learner.assign(slot + layout.PAYLOAD_AT, where, stream, flags, steps)
                sequence = learner.publish(facts)
            except ValueError as error:
                raise self._converted(error) from None
        if sequence < 0:
            raise self._not_published(sequence)
        self.assigned += 1
        learner.started = started  # the current iteration continues
        if not wait:
            if buffers:
                self._assigning = (*self._unapplied_writes(), sequence)
                self._written = (*self._written[1 - WRITTEN :], version)
            return
        rest = None if until is None else max(0.0, until - time.monotonic())
        try:
            self.wait_applied(sequence, rest)
        except PushTimeout:
            raise PushTimeout(f"the assignment was not applied within {timeout_s} s") from None

    # -- optimizer state ------------------------------------------------------------------------

    def job_state(self) -> JobState:
        """Copy weights and optimizer state, as they are between two gradients of all learners.

        Waits until what this learner has pushed is in them. The server pauses while they are copied
        in memory. Raises what push() raises, and ControlError.
        """
        self._flush_publisher()
        self.wait_applied()
        parts = 1 + slots(int(self.hyper[0, 0]))
        # A connection of its own: large models take longer than other requests may.
        own = LastingConnection(str(self._connection.path), COPY_TIMEOUT_S)
        with contextlib.closing(own) as connection:
            reply, values = copied(connection, Copy(), parts * self.model.elements)
        arrays = np.split(values, parts)
        return JobState(arrays[0], tuple(arrays[1:]), int(reply["steps"]))

    @property
    def is_new(self) -> bool:
        """Whether it has pushed no gradient yet, so that it shares what it loads with others."""
        return self.published == self.assigned and not self.is_successor

    def load_optimizer_state(
        self, values: Sequence[Values], steps: int | None = None, timeout_s: float | None = None
    ) -> bool:
        """Replace the state of the job's optimizer; return false if the job keeps another one.

        values: for each slot its values by name; those that are not named become zero. steps: of
        the optimizer; None: as before. Before its first gradient, a learner shares this with the
        others, whose scripts load the same: one of them writes it, if the job has made no step yet,
        and the others wait for that. Later, the learner writes it itself. Raises what assign()
        raises.
        """
        count = slots(int(self.hyper[0, 0]))
        if len(values) != count:
            raise UsageError(f"the state has {len(values)} slots, the job's optimizer {count}")
        zeros = {
            one.name: np.zeros(one.shape, np.float32)
            for one in self.model.tensors
            if one.role is Role.PARAMETER
        }
        state = [self._check_values(zeros | dict(one)) for one in values]  # before any is written
        if steps is not None:
            check_integer("steps", steps, most=MOST_STEPS)

        def write(until: float | None) -> None:
            self._write_state(state, steps, timeout_s, until)

        if not self.is_new:
            self._initial_load.write_state(write, timeout_s)
            return True
        done = self._initial_load.share(
            "state", digest_of(state, steps), write, timeout_s, gives=steps or 0
        )
        if done:
            self._steps_loaded = steps or 0
        return done

    def load_weights(self, values: Values, timeout_s: float | None = None) -> bool:
        """Assign weights; before its first gradient shared, as load_optimizer_state() is.

        False if the job has made steps with other weights, and keeps them.
        """
        checked = self._check_values(values)
        if not self.is_new:
            self._assign(checked.where, timeout_s)
            return True
        return self._initial_load.share(
            "weights",
            digest_of([checked], sorted(values)),
            lambda until: self._assign(checked.where, timeout_s, until=until),
            timeout_s,
            steps=self._steps_loaded,
        )

    def _write_state(
        self,
        state: Sequence[Assigned],
        steps: int | None,
        timeout_s: float | None,
        until: float | None,
    ) -> None:
        """Write the last slot first, and the steps at the end.

        If this learner dies on the way, Adam has the new squares beside old moments, which makes
        steps short; the other order would make them long.
        """
        count = SAME_STEPS if steps is None else steps
        for stream in range(len(state), 0, -1):
            now = count if stream == 1 else SAME_STEPS
            self._assign(state[stream - 1].where, timeout_s, stream=stream, steps=now, until=until)
        if not state and steps is not None:
            self._assign([*NONE] * len(self.model.tensors), timeout_s, steps=count, until=until)

    # -- the end --------------------------------------------------------------------------------

    @property
    def left(self) -> bool:
        """Whether it has detached."""
        return self._learner.left

    def detach(self) -> None:
        """Leave the job. What has been published is applied; unanswered batches go to others.

        Waits until a push of another thread that is being written is published. One that still
        waits for its turn or for a slot, and every later one, gets a UsageError.
        """
        publisher = self._publisher()
        try:
            if publisher is not None:
                publisher.close()
        finally:
            if self._finalizer.alive:
                self._reports.send()
                self._detach()  # once more after an interrupt in the middle of it
                self._finalizer.detach()

    def report(self, **values: Any) -> None:
        """Report values by name, such as an accuracy; the history has their means.

        They are sent about once a second, and nothing waits for that. A value that is not finite is
        left out. Raises UsageError for a name or a value that cannot be reported.
        """
        self._reports.add(values)

    def set_owner(self, owner: Owner) -> None:
        """Register the object around this client, whose close() detaches it."""
        self._owner = weakref.ref(owner)

    def leave(self) -> None:
        """Detach, by the close() of the client's owner if it has one."""
        owner = self._owner()
        if owner is not None:
            owner.close()
        else:
            self.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()
