"""A learner's connection to a job: attach, pull, push, take batches, detach.

    with Client("demo", tensors={"w": numpy.zeros(10)}) as client:
        for batch in client.batches(samples=1000, batch_size=4, epochs=3):
            gradient = ...                      # of client.weights["w"], at batch.indices
            client.push({"w": gradient}, loss=..., samples=len(batch.indices))

A client belongs to one thread of one process. Nothing it does takes a lock that another process
could hold, and every wait of it ends when the job ends.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from gadei_ps import _native
from gadei_ps.errors import (
    Evicted,
    GadeiError,
    JobFailed,
    JobStopped,
    ModelMismatch,
    PushTimeout,
    UsageError,
)
from gadei_ps.job.control import Lasting, SetWork
from gadei_ps.kernels.optimizers import HYPER, Kind, OptimizerSpec
from gadei_ps.learners.attach import Arrays, attach, detach, offer
from gadei_ps.machine import process
from gadei_ps.memory import layout, weights
from gadei_ps.memory.layout import (
    CONTROL,
    ENTRY,
    RING,
    SHARD,
    FrameKind,
    Mode,
    Phase,
    WireType,
)
from gadei_ps.memory.weights import FloatArray, Model, Tensor

JOB_VARIABLE = "GADEI_PS_JOB"
NAME_VARIABLE = "GADEI_PS_NAME"
SLICE_NS = 100_000_000  # how long a wait may sleep before it looks whether the job lives
GONE_S = 10.0  # how long a job may be without server and watchdog before its learners give up
CONSISTENT_S = 5.0
NONE = (0, 0, 0, 0)  # for Client.push_from: a tensor without a gradient
UNWRITTEN = (0, 0, 0, 0.0)  # a frame that the server refuses
HOLD_S = 0.03  # above what a shard waits for a consistent pull


_forks = 0  # that this process comes after


def _count_forks() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_forks)


class Batch(NamedTuple):
    """A mini-batch that the server has handed to this learner."""

    epoch: int
    index: int  # type: ignore[assignment] # not the method of tuples
    indices: npt.NDArray[np.int64]
    """Samples of it, shape (at most batch_size,)."""

    @property
    def id(self) -> int:
        return layout.batch_id(self.epoch, self.index)


class Rows(NamedTuple):
    """The gradient of some rows of a tensor, as mini-batches touch an embedding's.

    indices: int64 of shape (n,), in any order; the values of repeated ones are added up. values:
    float32 of shape (n, and the tensor's without its first dimension). Where rows are single
    values, listing more than a third of them would take more room than all: then all are pushed,
    and those not named move as by a gradient of zero.
    """

    indices: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


Where = tuple[int, int, int, int]
"""A tensor's gradient as C is told of it."""


class Carrier(Protocol):
    """What brings gradients into slots while the client does other things: a device's link."""

    def flush(self) -> None:
        """Waits until what is on its way is published."""

    def check(self) -> None:
        """Raises if nothing on its way will ever arrive."""

    def close(self) -> None:
        """Flushes, and lets go of the client's memory."""


Gradients = Mapping[str, npt.NDArray[Any] | Rows | None]


class Client:
    """One learner.

    job: a job's name or its socket's path; None takes it from the environment that `gadei-ps run`
    and `attach` set. tensors: initial values of the parameters by name (the first learner's make
    the model; later ones must have the same names and shapes); None if the job has its model.
    buffers: tensors that no optimizer moves, likewise; a push adds to them. wire: how gradients
    travel, "float32", "bfloat16" or "float16". error_feedback: what rounding to 16 bits leaves
    over is kept here and added to the next gradient (Seide et al. 2014, '1-bit stochastic gradient
    descent'), at the cost of as much memory as the model has weights. What a frame that is given
    up, dropped or refused has carried of it is lost with the frame.

    Raises JobNotFound, ModelMismatch, NoSharedMemory, ControlError.
    """

    def __init__(
        self,
        job: str | None = None,
        *,
        tensors: Arrays | None = None,
        buffers: Arrays | None = None,
        wire: str = "float32",
        error_feedback: bool = False,
        name: str = "",
    ) -> None:
        target = job or os.environ.get(JOB_VARIABLE)
        if not target:
            raise UsageError(
                f"which job? give its name, or start the program with gadei-ps run or attach "
                f"(they set {JOB_VARIABLE})"
            )
        try:
            self.wire = WireType[wire.upper()]
        except KeyError:
            raise UsageError(f"wire {wire!r}: use float32, bfloat16 or float16") from None
        self._forks = _forks
        self._connection = Lasting(target)
        try:
            if tensors is not None:
                offer(self._connection, tensors, buffers or {})
            place = attach(self._connection, name or os.environ.get(NAME_VARIABLE, ""))
        except BaseException:
            self._connection.close()
            raise
        self.job: str = place.job
        self.row: int = place.row
        self.generation: int = place.generation
        self.place = place
        """The segments, mapped as long as the client lives."""
        self._control = place.control.view(CONTROL)
        self._ring = place.ring.view(RING)
        self._control_at = place.control.address
        self._rings = place.ring.address, self._control_at
        self.model: Model = weights.read_table(place.weights)
        self.flat: FloatArray = weights.data(place.weights)
        """The live weights, shape (model.elements,), read-only: the server changes them."""
        self.weights: dict[str, FloatArray] = self.model.views(self.flat)
        """The same by name. Reading them is a pull that copies nothing."""
        self._tensors = {tensor.name: tensor for tensor in self.model.tensors}
        self.error_feedback = error_feedback
        self._left = np.zeros(self.model.elements if error_feedback else 0, np.float32)
        self._target = place.weights.address, int(self.wire)
        self._way = int(self._may_spare()), _native.address(self._left) if error_feedback else 0
        # Of the claimed slot, once it is written: kind, blocks, payload bytes, sum of squares.
        self._frame = UNWRITTEN
        self._payload = 0  # where append() writes, once it has begun
        self._appended: set[int] = set()
        entry = self._control_at + layout.offset(CONTROL, "roster") + place.row * ENTRY.itemsize
        self._obsolete_at = entry + layout.offset(ENTRY, "obsolete")
        self._version_at = self._control_at + layout.offset(CONTROL, "version")
        shard = (
            self._control_at + layout.offset(CONTROL, "shard") + layout.offset(SHARD, "sequence")
        )
        shards = int(self._control["shards"])
        self._writes_at = [shard + SHARD.itemsize * number for number in range(shards)]
        self.version = self.current_version
        self.published = 0
        self._taken: deque[int] = deque()
        self._started = time.monotonic()
        self._holds = 0
        self._gone_since: float | None = None  # over all waits: each may be short
        self._carrier: Callable[[], Carrier | None] = lambda: None
        self._copies = False  # whether gradients are computed from what pull() copied
        self._finalizer = weakref.finalize(
            self, detach, self._connection, self.row, self.generation, os.getpid(), place
        )
        # Before weakref's own hook, which runs after threads and modules may be gone.
        atexit.register(self._finalizer)

    def _may_spare(self) -> bool:
        """Whether a gradient of zero moves nothing, so that rows of it need not travel."""
        spec = OptimizerSpec.unpack(self.hyper[:HYPER])
        return spec.kind in (Kind.SGD, Kind.ADAGRAD) and spec.weight_decay == 0

    # -- pull -----------------------------------------------------------------------------------

    def pull(self, out: FloatArray | None = None, *, consistent: bool = False) -> FloatArray:
        """Copies the weights: float32 of shape (model.elements,), into `out` if given.

        Without locks, so that gradients may be applied while it copies (Hogwild). `consistent`:
        each shard's part is one that it had between two gradients. model.views() cuts it up.
        """
        copy = np.empty(self.model.elements, np.float32) if out is None else out
        version = self.current_version
        if consistent:
            self._pull_consistent(copy)
        else:
            np.copyto(copy, self.flat)
        self.version = version
        self._copies = True
        return copy

    def pull_rows(self, tensor: str, indices: npt.ArrayLike) -> FloatArray:
        """Copies some rows of a tensor, shape (n, and its own without the first dimension).

        Raises ModelMismatch.
        """
        if tensor not in self._tensors:
            raise ModelMismatch(f"the job's model has no tensor {tensor!r}")
        wanted = _indices(tensor, indices)
        rows = self._tensors[tensor].rows
        bad = (wanted < 0) | (wanted >= rows)
        if bad.any():
            raise ModelMismatch(f"{tensor!r} has no row {wanted[bad][0]} of {rows}")
        self._copies = True
        self.version = self.current_version
        view = self.weights[tensor]
        return view.reshape(rows, *view.shape[1:])[wanted]

    def _pull_consistent(self, copy: FloatArray) -> None:
        if copy.shape != self.flat.shape or copy.dtype != np.float32 or not copy.flags.c_contiguous:
            raise UsageError(f"out: need contiguous float32 of shape {self.flat.shape}")
        shards = int(self._control["shards"])
        until = time.monotonic() + CONSISTENT_S
        asked = 0.0
        try:
            for index in range(shards):
                low, high = layout.shard_range(self.model.elements, shards, index)
                while not _native.snapshot(
                    self._control_at,
                    index,
                    copy.ctypes.data + 4 * low,
                    self.flat.ctypes.data + 4 * low,
                    4 * (high - low),
                ):
                    now = time.monotonic()
                    if now > until:
                        raise PushTimeout(f"no consistent copy within {CONSISTENT_S} s")
                    if now > asked + HOLD_S:
                        # The shards wait a bounded time for it; then they want a new request.
                        self._holds = self._holds % 0xFFFFFFFF + 1
                        self._ring["hold"] = self._holds
                        asked = now
                    time.sleep(20e-6)
        finally:
            self._ring["hold"] = 0

    # -- push -----------------------------------------------------------------------------------

    def wait_turn(self, timeout_s: float | None = None) -> None:
        """Waits until the synchronization model lets this learner begin its next iteration."""
        self._wait_grant(timeout_s)
        self.version = self.current_version
        self._started = time.monotonic()

    def push(
        self,
        gradients: Gradients | FloatArray,
        *,
        loss: float = float("nan"),
        samples: int = 0,
        rate_scale: float = 1.0,
        batch: int | None = None,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Publishes one gradient and returns its sequence number.

        gradients: by name (None and missing ones count as zero), or flat, float32 of shape
        (model.elements,). Where one of them is Rows, tensors and rows that are not given are left
        as they are, with the optimizer's state of them: momentum, Adagrad and Adam move a row only
        when a gradient names it (torch.optim.SparseAdam's rule). batch: id of the batch it answers;
        by default the one taken first of those not yet answered. version: that it was computed
        from; by default the last pulled. A gradient that is not `wanted` any more is given up.
        rate_scale multiplies the job's learning rate. Raises PushTimeout, JobStopped, JobFailed;
        then nothing has been published.
        """
        kept: list[object] = []
        where = self._addresses(gradients, kept)
        return self.push_from(
            where,
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
        loss: float = float("nan"),
        samples: int = 0,
        rate_scale: float = 1.0,
        batch: int | None = None,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """The same from addresses: four numbers for each tensor of the model, in its order.

        Of contiguous float32: whole_at() for all of it, rows_at() for rows, product_at() for what
        is to be worked out on its way, NONE for nothing. Or one number for all, the address of a
        flat gradient. Who calls it answers for the shapes. Raises ModelMismatch for a row that
        there is not.
        """
        self._check_process()
        self._land()
        batch = self._answered(batch)
        if version is None:
            version = self.version
        if not self.wanted:
            return self.publish_nothing(batch, timeout_s, computed=True)
        target = *self._rings, *self._target, *self._way
        counts = self.published, version, batch, samples
        facts = rate_scale, loss, self._started
        try:
            sequence = _native.push(*target, *counts, *facts, *where)
            while sequence < 0:
                self.claim(timeout_s)
                sequence = _native.push(*target, *counts, *facts, *where)
        except IndexError as error:
            raise self._no_row(*error.args) from None
        self._count(batch)
        return sequence

    def claim(self, timeout_s: float | None = None) -> int:
        """Waits for the grant and for a free slot; returns the slot's address.

        For gradients that come piece by piece: append() each of them, or write_named(), at
        PAYLOAD_AT, then publish().
        """
        self._check_process()
        self._land()
        self._wait_grant(timeout_s)
        self._frame = UNWRITTEN
        self._payload = 0
        what = "no slot came free: does the server apply gradients?"
        return self._wait(_native.claim, (), timeout_s, what)

    def carried_by(self, carrier: Carrier) -> None:
        """From now on the carrier publishes, too: nothing is claimed while it is about to, waits
        end when it fails, and detach() closes it."""
        self._carrier = weakref.ref(carrier)

    def _land(self) -> None:
        """A slot is claimed by its number, and what is on its way has the next one."""
        if carrier := self._carrier():
            carrier.flush()

    def _check_process(self) -> None:
        if _forks != self._forks:
            raise UsageError("this client belongs to the parent process; make one after the fork")

    def _wait_grant(self, timeout_s: float | None) -> None:
        self._wait(_native.wait_grant, (self.published,), timeout_s, "no grant to go on")

    def _addresses(self, gradients: Gradients | FloatArray, kept: list[object]) -> list[int]:
        """For push_from(). kept: takes what they are of. Raises ModelMismatch."""
        if isinstance(gradients, np.ndarray):
            if gradients.shape != (self.model.elements,):
                raise ModelMismatch(
                    f"gradient has shape {list(gradients.shape)}, the model [{self.model.elements}]"
                )
            flat = np.ascontiguousarray(gradients, np.float32)
            kept.append(flat)
            return [_native.address(flat)]
        if not isinstance(gradients, Mapping):
            raise ModelMismatch(
                f"gradients are a {type(gradients).__name__}, not arrays by name or one flat array"
            )
        unknown = gradients.keys() - self._tensors.keys()
        if unknown:
            raise ModelMismatch(f"the job's model has no tensor {sorted(unknown)[0]!r}")
        where: list[int] = []
        for name, tensor in self._tensors.items():
            gradient = gradients.get(name)
            if gradient is None:
                where += NONE
            elif isinstance(gradient, Rows):
                indices, values = _rows(tensor, gradient)
                kept += (indices, values)
                where += rows_at(_native.address(indices), _native.address(values), indices.size)
            else:
                source = _source(tensor, gradient)
                kept.append(source)
                where += whole_at(_native.address(source))
        return where

    def write_named(self, payload: int, gradients: Gradients | FloatArray) -> None:
        """Writes all tensors' gradients, as push() takes them, into a claimed slot."""
        kept: list[object] = []
        where = self._addresses(gradients, kept)
        try:
            self._payload = 0
            self._frame = _native.write_frame(*self._target, *self._way, payload, *where)
        except IndexError as error:
            raise self._no_row(*error.args) from None

    def append(self, payload: int, number: int, where: Where) -> None:
        """Writes one tensor into a claimed slot: any of them, in any order, once.

        number: in the model. where: four numbers as push_from() takes them. Tensors that are
        not appended are left as they are. Raises ModelMismatch for a row that there is not.
        """
        if where == NONE:
            return
        if self._frame is UNWRITTEN:
            frame = int(FrameKind.ROWS), 0, _native.first_block(self._target[0]), 0.0
            self._appended.clear()
        elif not self._payload or number in self._appended:
            raise UsageError(
                "append() writes each tensor once, into a slot that holds nothing else"
            )
        else:
            frame = self._frame
        kind, blocks, at, squares = frame
        try:
            at, more = _native.append(
                *self._target, *self._way, payload, at, blocks, number, *where
            )
        except IndexError as error:
            raise self._no_row(*error.args) from None
        self._frame = kind, blocks + 1, at, squares + more
        self._payload = payload
        self._appended.add(number)

    def _no_row(self, number: int, row: int) -> ModelMismatch:
        tensor = self.model.tensors[number]
        return ModelMismatch(f"{tensor.name!r} has no row {row} of {tensor.rows}")

    def publish(
        self,
        *,
        loss: float = float("nan"),
        samples: int = 0,
        rate_scale: float = 1.0,
        batch: int | None = None,
        version: int | None = None,
    ) -> int:
        """Makes the claimed and written slot visible; returns the gradient's sequence number."""
        kind, blocks, payload_bytes, squares = self._frame
        if self._frame is UNWRITTEN:
            raise UsageError("nothing is written into the claimed slot")
        if self._payload:
            _native.sort_blocks(self._payload, blocks)
        batch = self._answered(batch)
        sequence = _native.publish(
            *self._rings,
            self.published,
            self.version if version is None else version,
            self.wire,
            kind,
            blocks,
            payload_bytes,
            batch,
            samples,
            squares,
            rate_scale,
            loss,
            self._started,
            time.monotonic(),
        )
        self._count(batch)
        return sequence

    def publish_landed(
        self,
        landing: int,
        sums: int,
        parts: int,
        frame: tuple[int, int, int],
        launch: Callable[[], None],
        *,
        version: int,
        loss: float | None = None,
        samples: int = 0,
        rate_scale: float = 1.0,
        batch: int | None = None,
    ) -> None:
        """Lets a device's driver publish the claimed slot, once transfers into it are through.

        Prepares `landing`, _native.LANDING_BYTES of memory. launch: has the driver call
        _native.LAND with it; the gradient counts as published from then on. sums: address of what
        is transferred beside the payload (native/ps_land.h), parts: of the sum of squares in it.
        frame: kind, blocks, bytes of the payload. loss: None if it is among the sums.
        """
        batch = self._answered(batch)
        kind, blocks, payload_bytes = frame
        _native.prepare_landing(
            *self._rings,
            landing,
            sums,
            len(self.model.tensors),
            parts,
            int(loss is None),
            self.published,
            version,
            self.wire,
            kind,
            blocks,
            payload_bytes,
            batch,
            samples,
            rate_scale,
            0.0 if loss is None else loss,
            self._started,
        )
        launch()
        self._count(batch)

    @property
    def wanted(self) -> bool:
        """Whether the gradient of the iteration in hand may still be applied.

        False once the synchronization model has gone on without it (Cutoff): what is computed now
        will be dropped, and give_up() is the quicker way to the next iteration.
        """
        return self.published >= _native.load(self._obsolete_at)

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
        self._frame = int(FrameKind.EMPTY), int(computed), 0, 0.0
        return self.publish(batch=batch)

    def _answered(self, batch: int | None) -> int:
        """The batch that a gradient answers: unless said, the one taken first of those in hand."""
        if batch is not None:
            return batch
        return self._taken[0] if self._taken else layout.NO_BATCH

    def _count(self, batch: int) -> None:
        """A gradient is published: there was room for it, so the job has lived."""
        self._gone_since = None
        self.published += 1
        if batch in self._taken:
            self._taken.remove(batch)
        self._started = time.monotonic()
        if not self._copies:
            self.version = self.current_version  # it reads the live weights

    @property
    def last_frame(self) -> npt.NDArray[np.void]:
        """Header (layout.FRAME, shape (1,)) of the gradient published last."""
        slot = (self.published - 1) % int(self._ring["slots"])
        at = int(self._ring["slots_at"]) + slot * int(self._ring["slot_bytes"])
        return self.place.ring.array(layout.FRAME, 1, at)

    def wait_applied(self, sequence: int | None = None, timeout_s: float | None = None) -> None:
        """Waits until the gradient, by default the last one, is in the weights or dropped."""
        wanted = self.published - 1 if sequence is None else sequence
        if wanted >= 0:
            what = "the gradient was not applied in time"
            self._wait(_native.wait_applied, (wanted,), timeout_s, what)

    # -- work -----------------------------------------------------------------------------------

    def set_work(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> None:
        """Tells the server what there is to hand out; every learner may, all must say the same."""
        if samples <= 0 or batch_size <= 0 or epochs <= 0:
            raise UsageError("samples, batch_size and epochs must be above 0")
        self._connection.request(
            SetWork(batches=-(-samples // batch_size), epochs=epochs, seed=seed)
        )

    def batches(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """Mini-batches as the server hands them out, until all epochs are done or the job stops.

        samples: rows of the data set, which every learner has whole. Each epoch is shuffled anew
        by (seed, epoch), so that all learners agree. Every batch is to be answered by one push.
        Also waits for the turn that the synchronization model gives. Under WSP a batch is a wave:
        `wave` mini-batches of batch_size, whose gradients are added up and pushed as one.
        """
        batch_size *= self.wave
        self.set_work(samples, batch_size, epochs, seed)
        order = np.empty(0, np.int64)
        epoch = -1
        while (taken := self.take_batch()) is not None:
            index = taken & 0xFFFFFFFF
            if taken >> 32 != epoch:
                epoch = taken >> 32
                order = epoch_order(samples, seed, epoch)
            try:
                self.wait_turn()
            except JobStopped:
                return
            yield Batch(epoch, index, order[index * batch_size : (index + 1) * batch_size])

    def take_batch(self, timeout_s: float | None = None) -> int | None:
        """Id of the next batch handed to this learner; None when there will be no more."""
        if len(self._taken) >= int(self._control["ahead"]):
            raise UsageError(
                f"{len(self._taken)} batches wait for their gradients: push once for each batch"
            )
        try:
            taken = self._wait(_native.take_work, (), timeout_s, "no batch was handed out")
        except JobStopped:
            return None
        if taken == _native.PS_FINISHED:
            if int(self._control["phase"]) == Phase.FAILED:
                raise self._ended()
            return None
        self._taken.append(taken)
        return taken

    @property
    def unanswered(self) -> int:
        """Batches taken that no push has answered yet."""
        return len(self._taken)

    # -- waiting --------------------------------------------------------------------------------

    def _wait(
        self,
        wait: Callable[..., int],
        arguments: tuple[int, ...],
        timeout_s: float | None,
        what: str,
    ) -> int:
        """Repeats a native wait in slices, looking between them whether the job lives."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = SLICE_NS
            if until is not None:
                left = min(left, max(0, int((until - time.monotonic()) * 1e9)))
            result = wait(*self._rings, *arguments, left)
            if result >= 0 or result == _native.PS_FINISHED:
                self._gone_since = None
                return result
            if result == _native.PS_STOPPED:
                raise self._ended()
            if result == _native.PS_EVICTED:
                raise Evicted(f"job {self.job!r} has given this learner's place away")
            if carrier := self._carrier():
                carrier.check()
            now = time.monotonic()
            if self._job_lives():
                self._gone_since = None
            elif self._gone_since is None:
                self._gone_since = now
            elif now - self._gone_since > GONE_S:
                raise JobFailed(f"the server and the watchdog of job {self.job!r} are gone")
            if until is not None and now >= until:
                raise PushTimeout(f"{what} within {timeout_s} s")

    def _job_lives(self) -> bool:
        """Whether a server serves, or somebody is there to start one."""
        return any(
            process.alive(int(self._control[f"{who}_pid"]), int(self._control[f"{who}_start"]))
            for who in ("lease", "watchdog")
        )

    def _ended(self) -> GadeiError:
        if int(self._control["phase"]) == Phase.FAILED:
            return JobFailed(f"job {self.job!r} has failed: its parameter server died")
        return JobStopped(f"job {self.job!r} has been stopped")

    @property
    def current_version(self) -> int:
        """Gradients that the job has applied so far."""
        return _native.load(self._version_at)

    @property
    def writes(self) -> int:
        """Grows with every write to the weights. Unlike current_version, which one shard counts,
        it tells whether another shard has written since."""
        return sum(map(_native.load, self._writes_at))

    @property
    def hyper(self) -> npt.NDArray[np.float64]:
        """The job's optimizer, packed (gadei_ps.kernels.optimizers.OptimizerSpec.unpack)."""
        packed: npt.NDArray[np.float64] = self._control["hyper"]
        return packed

    @property
    def waits_for_others(self) -> bool:
        """Whether the job's synchronization model makes learners wait for one another."""
        return bool(int(self._control["report"]))

    @property
    def drops(self) -> bool:
        """Whether the job's synchronization model may go on without a learner that computes."""
        return int(self._control["mode"]) & 3 == Mode.COLLECT

    @property
    def wave(self) -> int:
        """Mini-batches whose gradients are to be added up and pushed as one; above 1 under WSP."""
        return max(1, int(self._control["wave"]))

    @property
    def stopping(self) -> bool:
        """Whether the job wants its learners to end."""
        return bool(int(self._control["stop"]))

    # -- the end --------------------------------------------------------------------------------

    def detach(self) -> None:
        """Leaves the job. What has been published is applied; batches not answered go to others."""
        carrier = self._carrier()
        try:
            if carrier is not None:
                carrier.close()
        finally:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


def _indices(tensor: str, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Raises ModelMismatch for what are no whole numbers."""
    given = np.asarray(indices)
    if given.size and given.dtype.kind not in "iu":
        raise ModelMismatch(f"rows of {tensor!r}: indices of {given.dtype}, not integers")
    return np.ascontiguousarray(given, np.int64)


def _rows(tensor: Tensor, given: Rows) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Rows as C reads them. Raises ModelMismatch."""
    indices = _indices(tensor.name, given.indices)
    values = np.ascontiguousarray(given.values, np.float32)
    if indices.ndim != 1 or values.shape != (indices.size, *tensor.shape[1:]):
        raise ModelMismatch(
            f"rows of {tensor.name!r}: {list(indices.shape)} indices and values of shape "
            f"{list(values.shape)}; the tensor has shape {list(tensor.shape)}"
        )
    return indices, values


def whole_at(values: int) -> Where:
    """For Client.push_from: all of a tensor, by its address."""
    return values, 0, 0, 0


def rows_at(indices: int, values: int, count: int) -> Where:
    """For Client.push_from: int64 indices and their float32 rows, by address."""
    # No rows at all are rows too; an empty array may have no address.
    return (values, indices, count, 0) if count else (1, 1, 0, 0)


def product_at(factors: int, vectors: int, count: int) -> Where:
    """For Client.push_from: the transposed of `factors` times `vectors`, by address.

    factors: float32 of shape (count, rows of the tensor). vectors: (count, values of a row).
    """
    return (vectors, 0, count, factors) if count else NONE


def _source(tensor: Tensor, gradient: npt.NDArray[Any]) -> FloatArray:
    """The gradient of a whole tensor as C reads it. Raises ModelMismatch."""
    if not hasattr(gradient, "shape"):
        raise ModelMismatch(
            f"gradient of {tensor.name!r} is a {type(gradient).__name__}, not an array or Rows"
        )
    if gradient.shape != tensor.shape:
        raise ModelMismatch(
            f"gradient of {tensor.name!r} has shape {list(gradient.shape)}, "
            f"the tensor {list(tensor.shape)}"
        )
    return np.ascontiguousarray(gradient, np.float32)


def epoch_order(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of an epoch's samples, shape (samples,); the same in every learner."""
    return np.random.default_rng([seed, epoch]).permutation(samples)
