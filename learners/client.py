"""A learner's connection to a job: attach, pull, push, take batches, detach.

    with Client("demo", tensors={"w": numpy.zeros(10)}) as client:
        for batch in client.batches(samples=1000, batch_size=4, epochs=3):
            gradient = ...                      # of client.weights["w"], at batch.indices
            client.push({"w": gradient}, loss=..., samples=len(batch.indices))

A client belongs to one thread of one process at a time. Calls that push, from claim() to publish(),
calls that take batches, and consistent pulls: while one thread is in such a call, another one that
makes a call of the same kind gets a UsageError, and nothing is published. One may push while the
other takes batches or pulls. Any thread may read: weights, pull() into its own array, pull_rows().

A client takes no lock that another process could hold, and every wait of it ends when the job ends.
The client for C (native/gadei.h) does the same; tests/conformance/test_client*.py compare them.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from gadei_ps import _native
from gadei_ps.errors import JobNotFound, JobStopped, ModelMismatch, UsageError
from gadei_ps.job import here
from gadei_ps.job.control import Lasting
from gadei_ps.learners import endings
from gadei_ps.learners.attach import Arrays, Place, attach, detach, listener, number, offer
from gadei_ps.learners.frame import (
    NONE,
    UNKNOWN,
    UNTOUCHED,
    Gradients,
    Rows,
    Where,
    addresses,
    product_at,
    row_indices,
    rows_at,
    whole_at,
)
from gadei_ps.learners.optimizer_state import OptimizerState
from gadei_ps.learners.said import Says, says_of
from gadei_ps.learners.stand import Stands
from gadei_ps.learners.waits import Carrier, OnlyOne, limit
from gadei_ps.learners.work import Batch, Taken, Work, epoch_order, whole
from gadei_ps.memory import weights
from gadei_ps.memory.layout import WireType
from gadei_ps.memory.weights import FloatArray, Model

__all__ = [
    "NAME_VARIABLE",
    "NONE",
    "UNTOUCHED",
    "Batch",
    "Carrier",
    "Client",
    "Gradients",
    "Rows",
    "Where",
    "epoch_order",
    "product_at",
    "rows_at",
    "whole_at",
]

NAME_VARIABLE = "GADEI_PS_NAME"
CONSISTENT_S = 5.0  # time limit of a consistent pull
REFUSED = (
    "gadei-ps: a gradient of this learner holds a NaN or an infinity: the job refuses it, and the "
    "weights stay as they are; if this goes on, lower the learning rate (shown once)"
)
NO_TURN = "no grant to go on"
NO_SLOT = "no slot came free: does the server apply gradients?"


class Client(Work, Stands, OptimizerState):
    """One learner.

    job: a job's name or its socket's path; None takes it from the environment that `gadei-ps run`
    and `attach` set. tensors: initial values of the parameters by name (the first learner's make
    the model; later ones must have the same names and shapes); None if the job has its model.
    buffers: the same for tensors that no gradient moves; assign() writes them. They keep their
    types, and uint16 is bfloat16. frozen: the same for tensors that nothing writes. aliases:
    further names of tensors, each with the tensor's own; exports have them too. optimizer: which
    one the job is to have, as `{"kind": "adamw", "lr": 1e-3}`, with the keywords of said(): the
    first learner's counts where the job itself says nothing, and later ones must say the same.
    wire: how gradients travel, "float32", "bfloat16" or "float16". error_feedback: the client keeps
    what rounding to 16 bits did not send and adds it to the next gradient (Seide et al. 2014,
    '1-bit stochastic gradient descent'), at the cost of as much memory as the model has weights.
    What a frame carries of it is lost if the frame is given up, dropped or refused. has_buffers:
    whether this learner has buffers of its own that it writes to the job while `writes_buffers`.

    Raises JobNotFound, which names the reason, ModelMismatch, NoSharedMemory, ControlError;
    UsageError where the job has another optimizer. Warns where the job file or command line says
    another one, which counts.
    """

    def __init__(
        self,
        job: str | None = None,
        *,
        tensors: Arrays | None = None,
        buffers: Arrays | None = None,
        frozen: Arrays | None = None,
        aliases: Mapping[str, str] | None = None,
        optimizer: Mapping[str, Any] | Says | None = None,
        wire: str = "float32",
        error_feedback: bool = False,
        has_buffers: bool = False,
        name: str = "",
        **others: Any,
    ) -> None:
        target = here.wanted(job)
        try:
            self.wire = WireType[wire.upper()]
        except KeyError:
            raise UsageError(f"wire {wire!r}: use float32, bfloat16 or float16") from None
        if not isinstance(name, str):
            raise UsageError(f"name={name!r}: give a text, which status shows")
        endings.install()
        says = says_of(optimizer, tensors, others)
        try:
            self._connection = Lasting(target)
        except JobNotFound as error:
            from gadei_ps.job.absence import explained  # only for this, and not small

            if (why := explained(error)) is error and job is None and number() >= 0:
                ended = Path(str(target)).stem
                raise JobStopped(f"job {ended!r} ended before this learner joined it") from None
            raise why from None
        place = None
        try:
            heard = listener()
            if tensors is not None:
                offer(self._connection, tensors, buffers or {}, heard, says, aliases, frozen)
            name = name or os.environ.get(NAME_VARIABLE, "")
            place = attach(self._connection, name, heard, says, buffers=has_buffers)
            self._begin(place, error_feedback)
        except BaseException:
            if place is None:
                self._connection.close()
            else:
                detach(self._connection, place.row, place.generation, os.getpid(), place)
            raise

    def _begin(self, place: Place, error_feedback: bool) -> None:
        self.job: str = place.job
        self.row: int = place.row
        self.generation: int = place.generation
        self.place = place
        """The segments, mapped as long as the client lives."""
        self._see(place.control)
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
            OnlyOne(self._learner, kind)
            for kind in (_native.PS_PUSHING, _native.PS_TAKING, _native.PS_COPYING)
        )
        self._taken = Taken()
        self.refuses_nonfinite = bool(int(self._control["refuse_nonfinite"]))
        """Whether the job refuses gradients that hold a NaN or an infinity."""
        self._warns = self.refuses_nonfinite
        self._gone_since = None
        self._carrier: Callable[[], Carrier | None] = lambda: None
        who = self.row, self.generation, os.getpid(), place, self._learner
        self._detach = functools.partial(detach, self._connection, *who)
        self._finalizer = weakref.finalize(self, self._detach)
        # Before weakref's own hook, which runs after threads and modules may be gone.
        atexit.register(self._finalizer)
        here.enter(self)

    @property
    def writes_buffers(self) -> bool:
        """Whether the job's buffers are those of this learner: of all that have buffers of their
        own and are attached, it has the lowest row."""
        return self.rows_with_buffers()[:1] == [self.row]

    @property
    def residue(self) -> FloatArray:
        """With error feedback, what rounding has not sent yet of each value; pushes write it."""
        return self._residue

    # -- pull -----------------------------------------------------------------------------------

    def pull(
        self,
        out: FloatArray | None = None,
        *,
        consistent: bool = False,
        timeout_s: float | None = CONSISTENT_S,
    ) -> FloatArray:
        """Copies the weights: float32 of shape (model.elements,), into `out` if given.

        Without locks, so that gradients may be applied while it copies (Hogwild). `consistent`:
        each shard's part is one that it had between two gradients, or PushTimeout is raised after
        timeout_s. model.views() cuts the copy up.
        """
        copy = np.empty(self.model.elements, np.float32) if out is None else out
        version = self.current_version
        if consistent:
            self._pull_consistent(copy, timeout_s)
        else:
            np.copyto(copy, self.flat)
        self._computes_from_copy(version)
        return copy

    def pull_rows(self, tensor: str, indices: npt.ArrayLike) -> FloatArray:
        """Copies some rows of a tensor, shape (n, and its own without the first dimension).

        Raises ModelMismatch.
        """
        if tensor not in self.weights:
            raise ModelMismatch(f"the job's model has no tensor {tensor!r}")
        wanted = row_indices(tensor, indices)
        view = self.weights[tensor]
        rows = view.shape[0] if view.shape else 1
        bad = (wanted < 0) | (wanted >= rows)
        if bad.any():
            raise ModelMismatch(f"{tensor!r} has no row {wanted[bad][0]} of {rows}")
        self._computes_from_copy(self.current_version)
        return view.reshape(rows, *view.shape[1:])[wanted]

    def _computes_from_copy(self, version: int) -> None:
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

    # -- push -----------------------------------------------------------------------------------

    def sees_current(self) -> None:
        """What is computed from now on comes from the live weights as they are now."""
        self._learner.version = self.current_version

    def wait_turn(self, timeout_s: float | None = None) -> None:
        """Waits until the synchronization model lets this learner begin its next iteration."""
        self.check_process()
        self._trains()
        self._wait(_native.wait_grant, (*self._rings, self.published), timeout_s, NO_TURN)
        self.sees_current()
        self._learner.started = time.monotonic()

    def wait_mini_batch(self, number: int, timeout_s: float | None = None) -> None:
        """Waits until mini-batch `number` of a wave may begin, from 0 in the wave in hand, which
        the next gradient ends, and on into the wave after it.

        Only the last mini-batch of a wave waits for other learners; those before it may begin with
        the weights at hand. Once a last one may begin, the weights hold all that the model
        promises: pull then. The wave's run time does not count the wait, and the gradient counts as
        computed from the weights that it would have without this call.
        """
        self.check_process()
        self._trains()
        whole("number", number, most=2**32 - 1)
        begin = time.monotonic()
        arguments = *self._rings, self._learner.turn(number)
        try:
            self._wait(_native.wait_grant, arguments, timeout_s, NO_TURN)
        finally:
            self._learner.started += time.monotonic() - begin

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
        """Publishes one gradient and returns its sequence number.

        gradients: by name (None and missing ones count as zero), or flat, float32 of shape
        (model.elements,), where the values of buffers are not read. Where one of them is Rows,
        tensors and rows that are not given are left
        as they are, with the optimizer's state of them: momentum, Adagrad and Adam move a row only
        when a gradient names it (torch.optim.SparseAdam's rule). batch: id of the batch it answers;
        by default the one taken first of those not yet answered. version: that it was computed
        from; by default the last pulled. A gradient that is not `wanted` any more is given up.
        rate_scale multiplies the job's learning rate: a number for all groups of parameters, or a
        tuple of one for each; or that tuple and a momentum. Raises PushTimeout, JobStopped,
        JobFailed; UsageError where another thread pushes, or after detach(). Then nothing has been
        published; after a KeyboardInterrupt perhaps: `published` tells.
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
        """The same from addresses: four numbers for each tensor of the model, in its order.

        Of contiguous float32: whole_at() for all of it, rows_at() for rows, product_at() for what
        is to be worked out on its way, NONE for nothing and for buffers. Or one number for all, the
        address of a flat gradient. The caller answers for the shapes. Raises ModelMismatch for a
        row that the tensor does not have.
        """
        self.check_process()
        self._trains()
        self._end_own_data()
        self._land()
        learner = self._learner
        if not learner.wanted():
            return self.publish_nothing(batch, timeout_s, computed=True)
        answers = self._taken.begin(batch)
        facts = learner.version if version is None else version, answers, samples, rate_scale, loss
        before = self.published
        try:
            sequence = learner.push(facts, where)
            if sequence < 0:
                until = limit(timeout_s)
                while sequence < 0:
                    self._claim(timeout_s, until)
                    sequence = learner.push(facts, where)
        except BaseException as error:
            self._settle(error, before, batch, answers)
            if isinstance(error, IndexError | ValueError):
                raise self._wrong(error) from None
            raise
        self._counted(answers)
        return sequence

    def claim(self, timeout_s: float | None = None) -> int:
        """Waits for the grant and for a free slot; returns the slot's address.

        For gradients that come piece by piece: append() each of them, or write_named(), at
        PAYLOAD_AT, then publish(). The slot is this thread's until then; claiming again begins the
        same slot anew.
        """
        self.check_process()
        self._trains()
        self._end_own_data()
        self._land()
        return self._claim(timeout_s, limit(timeout_s))

    def _claim(self, timeout_s: float | None, until: float | None) -> int:
        """One limit for both waits."""
        arguments = *self._rings, self.published
        with self._pushing:
            self._wait(_native.wait_grant, arguments, timeout_s, NO_TURN, until)
            return self._wait(self._learner.claim, (), timeout_s, NO_SLOT, until)

    def give_up(self, *, batch: int | None = None, timeout_s: float | None = None) -> int:
        """Ends the iteration in hand without a gradient; its batch is handed out again.

        Returns the sequence number, as push() does, and raises the same.
        """
        return self.publish_nothing(batch, timeout_s, computed=False)

    def publish_nothing(
        self, batch: int | None = None, timeout_s: float | None = None, *, computed: bool
    ) -> int:
        """Ends the iteration in hand without a gradient, as give_up() and unwanted pushes do.

        computed: whether its run time is that of a whole iteration.
        """
        self.claim(timeout_s)
        self._learner.empty(computed)
        return self.publish(batch=batch)

    def _counted(self, batch: int) -> None:
        self._gone_since = None  # there was room for it, so the job has lived
        self._taken.remove(batch)
        if self._warns and not math.isfinite(self._learner.squares):
            self._warns = False  # the line is shown once
            print(REFUSED, file=sys.stderr, flush=True)

    def wait_applied(self, sequence: int | None = None, timeout_s: float | None = None) -> None:
        """Waits until the gradient, by default the last one, is in the weights or dropped; the next
        one then counts as computed from the weights of now."""
        self.check_process()
        wanted = self.published - 1 if sequence is None else sequence
        if wanted >= self.published:
            raise UsageError(
                f"sequence={sequence}: this learner has published {self.published} gradients, "
                "which are numbered from 0"
            )
        if wanted >= 0:
            what = "the gradient was not applied"
            self._wait(_native.wait_applied, (*self._rings, wanted), timeout_s, what)
        if not self._learner.copies:
            self.sees_current()

    # -- the end --------------------------------------------------------------------------------

    def detach(self) -> None:
        """Leaves the job. What has been published is applied; batches not answered go to others.

        Waits until a push of another thread that is being written is published. One that still
        waits for its turn or for a slot, and every later one, gets a UsageError.
        """
        carrier = self._carrier()
        try:
            if carrier is not None:
                carrier.close()
        finally:
            if self._finalizer.alive:
                self._detach()  # once more after an interrupt in the middle of it
                self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()
