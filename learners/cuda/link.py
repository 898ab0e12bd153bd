"""A client's push and pull on a CUDA device, in the order of its streams."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from gadei_ps import _native
from gadei_ps.errors import DeviceError, ModelMismatch, UsageError
from gadei_ps.learners.client import NONE, Client, Rows, Where, rows_at, whole_at
from gadei_ps.learners.cuda.device_errors import Guard, is_full, mib
from gadei_ps.learners.cuda.kernels import Kernels
from gadei_ps.learners.cuda.staging import Staging
from gadei_ps.learners.gradients import (
    check_integers,
    check_names,
    check_rows,
    check_whole,
    no_gradient,
)
from gadei_ps.machine.cuda import first_line
from gadei_ps.memory import layout, segment
from gadei_ps.memory.layout import Role, SegmentKind
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Tensor

PORTABLE, MAPPED, READ_ONLY = 1, 2, 8  # flags of cudaHostRegister
LINE = 64
MOST_ROWS = 1 << 29  # PLACE_BITS of kernels.cu
FUNCTIONS = (
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuLaunchKernel",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemsetD8Async",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuLaunchHostFunc",
)
"""Functions of libcuda.so.1, in the order of struct ps_driver (native/ps_cuda.h)."""

Stream = Callable[[], int]
"""Returns the stream that is computed on, as CUDA's handle."""


class CudaLink:
    """See devices.Link. The device's arrays are CuPy's.

    Gradients may be overwritten by what is computed after push(): they are staged in the order of
    the compute stream.
    """

    def __init__(self, client: Client, index: int, compute: Stream) -> None:
        if not client.model.trained:
            raise UsageError(
                f"the model of job {client.job!r} has no parameters that require a gradient"
            )
        self._client = client
        self._index = index
        self._guard = Guard(index, 4 * client.model.elements)
        self._compute = compute
        self._tensors = {tensor.name: tensor for tensor in client.model.tensors}
        self.tensor_numbers = {name: number for number, name in enumerate(self._tensors)}
        """Numbers of the tensors by name."""
        self.version = client.base_version
        self.current = self.version
        """Version of the weights that were copied last to where the model has them."""
        self._writes = -1  # client.writes before the last pull
        self._cleanup = contextlib.ExitStack()
        with self._guard, contextlib.ExitStack() as undo:
            # Makes the context, so that a full device does not fail as if it could not register.
            runtime.memGetInfo()
            self._source = _register_weights(client, index, undo)
            _register_slots(client, index, undo)
            self._kernels = Kernels(index)
            self._staging = Staging(client)
            self._push = cupy.cuda.Stream(non_blocking=True)
            self._pull = cupy.cuda.Stream(non_blocking=True)
            # staged, published, read, arrived. The host waits for the second only, and sleeps: it
            # may have work for other learners.
            self._events = [
                cupy.cuda.Event(block=block, disable_timing=True)
                for block in (False, True, False, False)
            ]
            self._cuda = _native.Cuda(
                *_functions(),
                *self._kernels.addresses,
                *self.streams,
                *(event.ptr for event in self._events),
                client.place.weights.address,
                int(client.wire),
                self._source,
                *self._staging.addresses,
            )
            # CuPy's stream, not always the one computed on, has cleared what was made above.
            runtime.deviceSynchronize()
            self._cleanup.push(undo.pop_all())
        self._cuda.set_ranges(0, 4 * client.model.elements)
        self._wanted: cupy.ndarray | None = None
        """The buffer of a pull that waits for newer weights."""
        self._coming = False  # whether a pull is in flight
        self._kept: list[Any] = []  # gradients of other libraries, until they are staged
        self._room: list[cupy.ndarray] = []
        self._finalizer = weakref.finalize(self, _release, index, self._cleanup)
        atexit.register(self._finalizer)  # before the client's own, which leaves the job
        client.set_publisher(self)

    @property
    def streams(self) -> tuple[int, int]:
        """CUDA's handles of the streams for push and pull."""
        return int(self._push.ptr), int(self._pull.ptr)

    def buffer(self) -> cupy.ndarray:
        with self._guard:
            made = cupy.zeros(self._client.model.elements, np.float32)
            cupy.cuda.get_current_stream().synchronize()
            return made

    def views(self, buffer: cupy.ndarray) -> dict[str, cupy.ndarray]:
        return self._client.model.views(buffer)

    # -- pull -----------------------------------------------------------------------------------

    def leave_out(self, names: Collection[str]) -> None:
        """Leave these tensors out of pulls; gather() reads their rows."""
        self._coming = False  # a pull that began before copies other tensors
        self._writes = -1  # the next pull copies weights even if none is newer
        ranges: list[int] = []
        for tensor in self._client.model.tensors:
            if tensor.name in names or not tensor.count:
                continue
            begin = 4 * tensor.start
            if ranges and begin == ranges[-1]:
                ranges.pop()
            else:
                ranges.append(begin)
            ranges.append(layout.rounded(begin + 4 * tensor.count, LINE))
        self._cuda.set_ranges(*ranges)

    def fill(self, buffer: cupy.ndarray) -> None:
        self._look()
        self._coming = False  # a pull that began before is out of date
        self._check(self._cuda.fill(buffer.data.ptr, self._compute()))
        self.current = self.version

    def _look(self) -> None:
        self._writes = self._client.writes
        self.version = self._client.base_version

    def pull(self, buffer: cupy.ndarray, stream: int | None = None) -> None:
        """See devices.Link. stream: the one computed on, if the caller knows it."""
        if not self._coming:
            self._wanted = buffer
            self._pull_if_newer(stream)

    def _pull_if_newer(self, stream: int | None) -> None:
        if self._wanted is None or self._client.writes == self._writes:
            return
        self._look()
        # Behind what was asked for before: that may still read the buffer.
        stream = self._compute() if stream is None else stream
        self._check(self._cuda.pull(self._wanted.data.ptr, stream))
        self._wanted = None
        self._coming = True

    def pulled(self, stream: int | None = None) -> bool:
        if not self._has_arrived(stream):
            return False
        self._coming = False
        return True

    def _has_arrived(self, stream: int | None) -> bool:
        self._pull_if_newer(stream)
        return self._is_done(self._cuda.arrived()) and self._coming

    def refresh(self, buffer: cupy.ndarray, to: cupy.ndarray) -> None:
        """Copy weights from the buffer of a pull, if it has arrived, and begin the next pull.

        On the device, in the order of the compute stream.
        """
        stream = self._compute()
        if self.pulled(stream):
            self._check(self._cuda.copy(to.data.ptr, buffer.data.ptr, stream))
            self.current = self.version
        self.pull(buffer, stream)

    def gather(
        self, tensor: str, indices: int, count: int, to: int, *, narrow: bool = False
    ) -> None:
        """Read the current rows of a tensor straight from the segment, over the bus.

        indices: address of `count` int64 on the device, or int32 if `narrow`; to: of float32,
        (count, width).
        """
        number = self.tensor_numbers[tensor]
        self._check(self._cuda.gather(number, indices, count, to, narrow, self._compute()))

    # -- push -----------------------------------------------------------------------------------

    def gradients(self) -> dict[str, cupy.ndarray]:
        room = self._staging.room(self._cuda.now)
        if room is None:
            if not self._room:
                self._room = [self.buffer()]
            (room,) = self._room
        return self._client.model.gradients(room)

    def push(self, gradients: Mapping[str, Any], version: int, **facts: Any) -> None:
        check_names(gradients, self._tensors)
        kept: list[Any] = []
        with self._guard:
            where: list[int] = []
            for tensor in self._tensors.values():
                gradient = gradients.get(tensor.name)
                if gradient is not None and tensor.role is Role.BUFFER:
                    raise no_gradient(tensor)
                where += _where_is(tensor, gradient, kept)
        self.push_from(where, version=version, kept=kept, **facts)

    def push_from(
        self,
        where: Sequence[int],
        *,
        version: int,
        loss: float = float("nan"),
        loss_at: int = 0,
        samples: int = 0,
        rate_scale: _native.Scales = 1.0,
        batch: int | None = None,
        kept: list[Any] | None = None,
        refresh: tuple[cupy.ndarray, cupy.ndarray] | None = None,
    ) -> None:
        """Push from addresses on the device, as Client.push_from() takes them.

        Of rows, the fourth number is twice 1 + the padding row, which counts as not named, or 0;
        and 1 more if the indices are int32, not int64.
        loss_at: address of the loss there, float32, instead of `loss`. kept: what is not to be
        freed until the gradient is published. refresh: two buffers as of refresh(), whose copy the
        same launch makes; gradients may lie in the second. The next call raises ModelMismatch for a
        row that the tensor does not have.
        """
        client = self._client
        if not client.wanted:
            client.publish_nothing(batch, computed=True)
            return
        facts = client.check_facts(
            version=version,
            loss=None if loss_at else loss,
            samples=samples,
            rate_scale=rate_scale,
            batch=batch,
        )
        stream, copy = self._compute(), (0, 0)
        if refresh and self._has_arrived(stream):
            buffer, to = refresh
            copy = to.data.ptr, buffer.data.ptr
        self._stage(where, stream, loss_at, *copy)
        if any(copy):
            self._coming, self.current = False, self.version
        self._check(client.publish_landed(self._cuda, facts))
        self._kept = kept or []

    def _stage(self, where: Sequence[int], stream: int, loss_at: int, *copy: int) -> None:
        """Launch the kernel that puts a gradient into the staging buffer.

        copy: addresses as of Cuda.copy(), which the same launch then does; or zeros.
        """
        try:
            status = self._cuda.stage(where, stream, loss_at, *copy)
            if status == _native.PS_CROWDED:
                rows = max(where[2::4])
                if rows > MOST_ROWS:
                    raise UsageError(
                        f"a gradient names {rows:,} rows of a tensor; at most {MOST_ROWS:,} can be"
                    )
                with self._guard:
                    self._cuda.set_lists(*self._staging.grow(rows, stream))
                status = self._cuda.stage(where, stream, loss_at, *copy)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self._check(status)

    def flush(self) -> None:
        status = self._cuda.flush()
        if status >= 0:
            self._check(status)
            return
        tensor = self._client.model.tensors[-status - 1]
        raise ModelMismatch(
            f"a gradient named a row that {tensor.name!r} does not have (it has {tensor.rows}); "
            "it was not applied"
        )

    def check(self) -> None:
        """Raise DeviceError if the GPU has failed, so that what is in flight never arrives."""
        self._is_done(self._cuda.published())

    def _is_done(self, status: int) -> bool:
        if status == _native.PS_NOT_READY:
            return False
        self._check(status)
        return True

    def _check(self, status: int) -> None:
        """Raise DeviceError for an error of the driver."""
        if status:
            raise self._guard.failure(driver.CUDADriverError(status=status))

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._finalizer.alive:
            return
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        self._finalizer()
        atexit.unregister(self._finalizer)


def _release(index: int, registered: contextlib.ExitStack) -> None:
    """Wait until nothing is in flight and unregister the host's memory.

    If the process is killed, the kernel's driver does that.
    """
    with contextlib.suppress(runtime.CUDARuntimeError), cupy.cuda.Device(index):
        try:
            runtime.deviceSynchronize()  # the compute stream may read registered memory as well
        finally:
            registered.close()


# -- the job's memory, which the DMA engines reach ----------------------------------------------


def _register_weights(client: Client, index: int, undo: contextlib.ExitStack) -> int:
    """Register the weights; return their address for device `index`. Raises DeviceError."""
    known: Segment = client.place.weights
    attribute = runtime.cudaDevAttrHostRegisterReadOnlySupported
    if runtime.deviceGetAttribute(attribute, index):
        with contextlib.suppress(DeviceError):  # not every driver that names it can do it
            return _register_values(known, READ_ONLY, index, undo)
    # The driver needs a mapping that can be written; nothing else uses this one.
    mapping = segment.attach(
        known.name,
        SegmentKind.WEIGHTS,
        writable=True,
        job_id=known.header["job_id"].tobytes(),
        owner=known.owner,
    )
    return _register_values(mapping, 0, index, undo)


def _register_values(mapping: Segment, flags: int, index: int, undo: contextlib.ExitStack) -> int:
    at = mapping.address + int(mapping.view(layout.WEIGHTS)["data_at"])
    size = mapping.address + mapping.size - at
    _register(at, size, PORTABLE | MAPPED | flags, mapping, index, undo)
    return int(runtime.pointerGetAttributes(at).devicePointer)


def _register_slots(client: Client, index: int, undo: contextlib.ExitStack) -> None:
    ring = client.place.ring
    head = ring.view(layout.RING)
    at, size = int(head["slots_at"]), int(head["slots"]) * int(head["slot_bytes"])
    _register(ring.address + at, size, PORTABLE | MAPPED, ring, index, undo)


def _register(
    at: int, size: int, flags: int, mapping: Segment, index: int, undo: contextlib.ExitStack
) -> None:
    try:
        runtime.hostRegister(at, size, flags)
    except runtime.CUDARuntimeError as error:
        if is_full(error) and runtime.memGetInfo()[0] < size:
            raise
        raise DeviceError(
            f"GPU {index} cannot register {mib(size)} of {mapping.name[1:]} "
            f"({first_line(error)}); gadei-ps doctor shows how much it can"
        ) from None
    undo.callback(lambda: mapping)  # keeps it mapped until this is undone:
    undo.callback(runtime.hostUnregister, at)


def _functions() -> list[int]:
    """Return the addresses of FUNCTIONS."""
    library = libcuda()
    found = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in FUNCTIONS)
    return [address or 0 for address in found]


def libcuda() -> Any:
    """Return CUDA's driver. It is loaded: CuPy has been used."""
    return ctypes.CDLL("libcuda.so.1")


# -- gradients as addresses: arrays of CuPy, and of other libraries by DLPack --------------------


def _where_is(tensor: Tensor, gradient: Any, kept: list[Any]) -> Where:
    """Return the addresses of a tensor's gradient, valid as long as `kept`, which takes the arrays.

    Raises ModelMismatch.
    """
    if gradient is None:
        return NONE
    if isinstance(gradient, Rows):
        given = _array(tensor, gradient.indices)
        check_integers(tensor.name, given)
        indices = cupy.ascontiguousarray(given, np.int64)
        values = cupy.ascontiguousarray(_array(tensor, gradient.values), np.float32)
        check_rows(tensor, indices, values)
        kept += (indices, values)
        return rows_at(indices.data.ptr, values.data.ptr, indices.size)
    array = _array(tensor, gradient)
    check_whole(tensor, array)
    array = cupy.ascontiguousarray(array, np.float32)
    kept.append(array)
    return whole_at(array.data.ptr)


def _array(tensor: Tensor, given: Any) -> cupy.ndarray:
    """Return an array of CuPy without a copy. Raises ModelMismatch unless it is on a device."""
    if isinstance(given, cupy.ndarray):
        return given
    if not isinstance(given, np.ndarray) and hasattr(given, "__dlpack__"):
        try:
            return cupy.from_dlpack(given)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, runtime.CUDARuntimeError):
                raise
    raise ModelMismatch(
        f"gradient of {tensor.name!r} is a {type(given).__module__}.{type(given).__name__}, not an "
        "array on the GPU"
    )
