"""A CUDA device, by CuPy: compute, push and pull on three streams (GaDei, Figures 4 and 5).

The weights segment and the ring's slots are registered as pinned memory. So a push is one transfer
from the device's staging buffer into the slot, a pull one from the segment into the device's
weights, both by the DMA engines; the host copies nothing. Staging and weights are double-buffered.

    compute   ... backward | stage |  forward, backward ...      whoever computes goes on at once
    push                           | transfer | publish
    pull           transfer of newer weights    |

`stage` (kernels.cu) puts the gradients where the slot will have them and converts them. Behind the
transfer the driver calls ps_land() (native/ps_land.h), which makes the frame visible to the server;
no thread of Python is needed for it, and none waits for another's interpreter lock.

The host waits in push() only: for the push before, so that it is one step ahead of the device at
most, and for a free slot. The compute stream never waits for the host.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from gadei_ps import _native
from gadei_ps.errors import DeviceError, ModelMismatch, UsageError
from gadei_ps.learners.client import NONE, Client, Rows, Where, rows_at, whole_at
from gadei_ps.learners.cuda import kernels as cuda_kernels
from gadei_ps.learners.cuda.kernels import BLOCKS, ITEMS, SKIPPED, THREADS, Kernels, Launch
from gadei_ps.machine import cuda
from gadei_ps.memory import layout, segment, weights
from gadei_ps.memory.layout import FrameKind, SegmentKind, WireType
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Tensor

PORTABLE, MAPPED, READ_ONLY = 1, 2, 8  # flags of cudaHostRegister
NOT_READY = 600  # cudaErrorNotReady
LINE = 64
FIRST_ROWS = 4096  # that a mini-batch may name before room for them is made anew
BAD, LOSS, LISTED = 0, 1, 2  # words of the sums; native/ps_land.h

Stream = Callable[[], int]
"""Tells the stream that is computed on, as CUDA's handle."""


def current_stream() -> int:
    """CuPy's."""
    return int(cupy.cuda.get_current_stream().ptr)


class Cuda:
    """One GPU, by default CuPy's current one. Raises DeviceError if it cannot be used."""

    name = "cuda"

    def __init__(self, index: int | None = None) -> None:
        if why := cuda.missing():
            raise DeviceError(f"device cuda: {why}")
        self.index = int(runtime.getDevice()) if index is None else index

    def link(self, client: Client, compute: Stream = current_stream) -> CudaLink:
        """compute: whose stream is computed on, when another library than CuPy computes."""
        return CudaLink(client, self.index, compute)


class _Here:
    """Makes a device the current one, and what fails there an error of one line."""

    def __init__(self, index: int, model_bytes: int) -> None:
        self._index = index
        self._model_bytes = model_bytes
        self._device = cupy.cuda.Device(index)

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self._device.__exit__(kind, error, trace)
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
            raise self._too_small(error) from None
        if isinstance(error, runtime.CUDARuntimeError):
            raise DeviceError(f"GPU {self._index} has failed ({_told(error)})") from None

    def _too_small(self, error: BaseException) -> DeviceError:
        with self._device:
            free, total = runtime.memGetInfo()
        return DeviceError(
            f"GPU {self._index} is out of memory: a learner needs {_size(4 * self._model_bytes)} "
            f"for weights and gradients of {_size(self._model_bytes)}, twice each, and "
            f"{_size(free)} of {_size(total)} are free ({_told(error)}); end other processes on "
            "it, or use --device host"
        )


class _Stage(NamedTuple):
    """A launch of `stage` for some tensors."""

    launch: Launch
    tensors: slice
    blocks: int
    items: np.ndarray
    """Where each tensor is and where it goes, u64 of shape (ITEMS, 2)."""


class CudaLink:
    """See device.Link. The device's arrays are CuPy's.

    Gradients may be overwritten by what is computed after push(): they are staged in the order of
    the compute stream.
    """

    def __init__(self, client: Client, index: int, compute: Stream) -> None:
        self._client = client
        self._index = index
        self._device = _Here(index, 4 * client.model.elements)
        self._compute = compute
        self._tensors = {tensor.name: tensor for tensor in client.model.tensors}
        self._wire = client.wire
        self._width = 4 if self._wire is WireType.FLOAT32 else 2
        self.version = client.current_version
        self._writes = -1  # before the last pull
        self._cleanup = contextlib.ExitStack()
        with self._device, contextlib.ExitStack() as made:
            self._source = self._register_weights(made)
            self._register_slots(made)
            self._kernels = self._compile()
            self._make_room()
            self._push = cupy.cuda.Stream(non_blocking=True)
            self._pull = cupy.cuda.Stream(non_blocking=True)
            # Those that the host waits for let it sleep: it may have work for other learners.
            self._staged, self._published, self._read, self._arrived = (
                cupy.cuda.Event(block=True, disable_timing=True) for _ in range(4)
            )
            # What was made above was cleared on CuPy's stream, not always the one computed on.
            runtime.deviceSynchronize()
            self._cleanup.push(made.pop_all())
        self._ranges = [(0, 4 * client.model.elements)]
        self._wanted: cupy.ndarray | None = None
        self._coming = False
        self._kept: list[Any] = []  # gradients of other libraries, until they are staged
        self._room: list[cupy.ndarray] = []
        self._finalizer = weakref.finalize(self, _release, index, self._cleanup)
        atexit.register(self._finalizer)  # before the client's own, which leaves the job
        client.carried_by(self)

    # -- memory ---------------------------------------------------------------------------------

    def _register_weights(self, undo: contextlib.ExitStack) -> int:
        """Where the weights are for the device."""
        mapping: Segment = self._client.place.weights
        flags = PORTABLE | MAPPED
        attribute = runtime.cudaDevAttrHostRegisterReadOnlySupported
        if runtime.deviceGetAttribute(attribute, self._index):
            flags |= READ_ONLY
        else:  # needs a mapping that could be written; nobody else gets to know of it
            job_id = mapping.header["job_id"].tobytes()
            kind = SegmentKind.WEIGHTS
            mapping = segment.attach(mapping.name, kind, writable=True, job_id=job_id)
        at = mapping.address + int(mapping.view(layout.WEIGHTS)["data_at"])
        self._register(at, mapping.address + mapping.size - at, flags, mapping, undo)
        return int(runtime.pointerGetAttributes(at).devicePointer)

    def _register_slots(self, undo: contextlib.ExitStack) -> None:
        ring = self._client.place.ring
        head = ring.view(layout.RING)
        at, size = int(head["slots_at"]), int(head["slots"]) * int(head["slot_bytes"])
        self._register(ring.address + at, size, PORTABLE | MAPPED, ring, undo)

    def _register(
        self, at: int, size: int, flags: int, mapping: Segment, undo: contextlib.ExitStack
    ) -> None:
        try:
            runtime.hostRegister(at, size, flags)
        except runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"GPU {self._index} cannot register {_size(size)} of {mapping.name[1:]} "
                f"({_told(error)}); gadei-ps doctor tells what it can"
            ) from None
        undo.callback(lambda: mapping)  # keeps it mapped until after:
        undo.callback(runtime.hostUnregister, at)

    def _compile(self) -> Kernels:
        try:
            return Kernels()
        except (OSError, RuntimeError, cupy.cuda.compiler.CompileException) as error:
            raise DeviceError(f"GPU {self._index}: no kernels ({_told(error)})") from None

    def _make_room(self) -> None:
        model = self._client.model
        chunks = cuda_kernels.pieces(model)
        self._places = [self._width * tensor.start for tensor in model.tensors]
        self._parts = len(chunks)
        self._chunks = cupy.asarray(chunks.view(np.uint8))
        counts = np.bincount(chunks["tensor"], minlength=len(model.tensors))
        self._first_chunk = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self._staging = [cupy.zeros(weights.payload_bytes(model), np.uint8) for _ in range(2)]
        words = LISTED + len(model.tensors) + self._parts
        self._sums = [cupy.zeros(words, np.uint64) for _ in range(2)]
        left = self._client.error_feedback and self._wire is not WireType.FLOAT32
        self._left = cupy.zeros(model.elements if left else 0, np.float32)
        # What comes beside the payload, and what the driver needs to publish: pinned, for a
        # transfer into memory that is not makes the host wait.
        pinned = cupy.cuda.alloc_pinned_memory(2 * (8 * words + _native.LANDING_BYTES))
        self._pinned = pinned
        self._landed = [pinned.ptr + 8 * words * turn for turn in range(2)]
        self._landing = [
            pinned.ptr + 16 * words + _native.LANDING_BYTES * turn for turn in range(2)
        ]
        for turn in range(2):
            ctypes.memset(self._landed[turn], 0, 8 * words)
        self._turn = 0
        self._lists: cupy.ndarray | None = None
        self._stages = [self._make_stages(turn) for turn in range(2)]
        self._rows = [self._kernels.launch(name) for name in ("link_rows", "list_rows", "add_rows")]
        self._gather = self._kernels.launch("gather")

    def _make_stages(self, turn: int) -> list[_Stage]:
        """With all that stays the same from one gradient to the next."""
        made = []
        tensors = len(self._client.model.tensors)
        for first in range(0, tensors, ITEMS):
            end = min(first + ITEMS, tensors)
            begin, blocks_end = self._first_chunk[first], self._first_chunk[end]
            launch = self._kernels.launch("stage")
            argument = launch.argument
            argument["left"] = self._left.data.ptr if self._left.size else 0
            argument["staging"] = self._staging[turn].data.ptr
            argument["wire"] = int(self._wire)
            argument["first"] = first
            argument["chunks"] = self._chunks.data.ptr + begin * cuda_kernels.CHUNK.itemsize
            argument["parts"] = self._sums[turn].data.ptr + 8 * (LISTED + tensors + begin)
            items = argument["items"][0].view(np.uint64).reshape(ITEMS, 2)
            made.append(_Stage(launch, slice(first, end), blocks_end - begin, items))
        return made

    def buffer(self) -> cupy.ndarray:
        with self._device:
            made = cupy.zeros(self._client.model.elements, np.float32)
            cupy.cuda.get_current_stream().synchronize()
            return made

    def views(self, buffer: cupy.ndarray) -> dict[str, cupy.ndarray]:
        return self._client.model.views(buffer)

    def count_buffers_from(self, buffer: cupy.ndarray) -> None:
        """Has buffers (batch-norm statistics) pushed by how much they differ from those here.

        Without it, what push() is given for a buffer is its change.
        """
        for stage in (*self._stages[0], *self._stages[1]):
            stage.launch.argument["base"] = buffer.data.ptr

    # -- pull -----------------------------------------------------------------------------------

    def leave_out(self, names: Collection[str]) -> None:
        """Pulls bring all tensors but these; gather() reads their rows."""
        self._coming = False  # a pull that began before has brought others
        self._writes = -1  # and what is current so far need not be all
        self._ranges = []
        for tensor in self._client.model.tensors:
            begin, end = 4 * tensor.start, 4 * (tensor.start + tensor.count)
            if tensor.name in names:
                continue
            if self._ranges and begin - self._ranges[-1][1] < LINE:
                begin = self._ranges.pop()[0]
            self._ranges.append((begin, end))

    def fill(self, buffer: cupy.ndarray) -> None:
        self._look()
        self._coming = False  # a pull that began before is out of date
        with self._device:
            self._transfer_weights(buffer, self._compute())

    def _look(self) -> None:
        self._writes = self._client.writes
        self.version = self._client.current_version

    def _transfer_weights(self, buffer: cupy.ndarray, stream: int) -> None:
        for begin, end in self._ranges:
            to, source = buffer.data.ptr + begin, self._source + begin
            runtime.memcpyAsync(to, source, end - begin, runtime.memcpyHostToDevice, stream)

    def pull(self, buffer: cupy.ndarray) -> None:
        if self._coming:
            return
        self._wanted = buffer
        with self._device:
            self._pull_if_newer()

    def _pull_if_newer(self) -> None:
        if self._wanted is None or self._client.writes == self._writes:
            return
        # What was computed so far may still read the buffer.
        runtime.eventRecord(self._read.ptr, self._compute())
        runtime.streamWaitEvent(self._pull.ptr, self._read.ptr)
        self._look()
        self._transfer_weights(self._wanted, self._pull.ptr)
        runtime.eventRecord(self._arrived.ptr, self._pull.ptr)
        self._wanted = None
        self._coming = True

    def pulled(self) -> bool:
        with self._device:
            self._pull_if_newer()
            if not self._coming or not self._is_done(self._arrived):
                return False
        self._coming = False
        return True

    def copy(self, source: cupy.ndarray, to: cupy.ndarray) -> None:
        """On the device, for what must stay where it is: in the order of the compute stream."""
        with self._device:
            for begin, end in self._ranges:
                places = to.data.ptr + begin, source.data.ptr + begin
                size, kind = end - begin, runtime.memcpyDeviceToDevice
                runtime.memcpyAsync(*places, size, kind, self._compute())

    def gather(self, tensor: str, indices: int, count: int, to: int) -> None:
        """Reads rows of a tensor straight from the segment, as they are now, over the bus.

        indices: address of `count` int64 on the device; to: of float32, (count, width).
        """
        found = self._tensors[tensor]
        if not count:
            return
        width = found.count // found.rows
        where = (self._source + 4 * found.start, indices, to, found.rows, width, count)
        self._gather.argument[0] = where
        with self._device:
            self._gather(self._compute(), _blocks(count * width))

    # -- push -----------------------------------------------------------------------------------

    def gradients(self) -> dict[str, cupy.ndarray]:
        if self._wire is WireType.FLOAT32:  # where they are staged
            flat = self._staging[self._turn][: 4 * self._client.model.elements].view(np.float32)
            return self.views(flat)
        if not self._room:
            self._room = [self.buffer()]
        return self.views(self._room[0])

    def push(self, gradients: Mapping[str, Any], version: int, **facts: Any) -> None:
        unknown = gradients.keys() - self._tensors.keys()
        if unknown:
            raise ModelMismatch(f"the job's model has no tensor {sorted(unknown)[0]!r}")
        kept: list[Any] = []
        with self._device:
            where: list[int] = []
            for tensor in self._tensors.values():
                where += _where(tensor, gradients.get(tensor.name), kept)
        self.push_from(where, version=version, kept=kept, **facts)

    def push_from(
        self,
        where: Sequence[int],
        *,
        version: int,
        loss: float = float("nan"),
        loss_at: int = 0,
        samples: int = 0,
        rate_scale: float = 1.0,
        batch: int | None = None,
        kept: list[Any] | None = None,
    ) -> None:
        """The same from addresses on the device, as Client.push_from() takes them.

        loss_at: address of the loss there, float32, instead of `loss`. kept: what is not to be
        freed until the gradient is published. The next call tells of a row that there is not.
        """
        client = self._client
        if not client.wanted:
            client.publish_nothing(batch, computed=True)
            return
        with self._device:
            turn, stream = self._turn, self._compute()
            frame, blocks, begin = self._stage(where, stream)
            if loss_at:
                to = self._sums[turn].data.ptr + 8 * LOSS
                runtime.memcpyAsync(to, loss_at, 4, runtime.memcpyDeviceToDevice, stream)
            runtime.eventRecord(self._staged.ptr, stream)
            payload = client.claim() + layout.PAYLOAD_AT  # once the push before is published
            if len(blocks):
                ctypes.memmove(payload, blocks.ctypes.data, blocks.nbytes)
            push = self._push.ptr
            runtime.streamWaitEvent(push, self._staged.ptr)
            source = self._staging[turn].data.ptr
            kind = runtime.memcpyDeviceToHost
            runtime.memcpyAsync(payload + begin, source + begin, frame[2] - begin, kind, push)
            sums = self._sums[turn]
            runtime.memcpyAsync(self._landed[turn], sums.data.ptr, sums.nbytes, kind, push)
            client.publish_landed(
                self._landing[turn],
                self._landed[turn],
                self._parts,
                frame,
                functools.partial(_launch_host_function, push, self._landing[turn]),
                version=version,
                loss=None if loss_at else loss,
                samples=samples,
                rate_scale=rate_scale,
                batch=batch,
            )
            runtime.eventRecord(self._published.ptr, push)
            self._kept = kept or []
            self._turn = 1 - turn

    def flush(self) -> None:
        with self._device:
            runtime.eventSynchronize(self._published.ptr)
            last = 1 - self._turn
            bad = ctypes.c_uint64.from_address(self._landed[last] + 8 * BAD)
            if not bad.value:
                return
            tensor = self._client.model.tensors[bad.value - 1]
            bad.value = 0
            runtime.memsetAsync(self._sums[last].data.ptr, 0, 8, self._compute())
        raise ModelMismatch(
            f"a gradient named a row of {tensor.name!r} that is none of its {tensor.rows}; "
            "it was not applied"
        )

    def check(self) -> None:
        """Raises DeviceError if the GPU has failed, so that what is on its way never arrives."""
        with self._device:
            self._is_done(self._published)

    def _stage(
        self, where: Sequence[int], stream: int
    ) -> tuple[tuple[int, int, int], np.ndarray, int]:
        """Launches what puts the gradient into the staging buffer.

        Returns kind, blocks and bytes of the frame; the blocks; and where what is transferred
        begins, bytes from the payload's begin.
        """
        if not any(where[1::4]):  # no rows
            self._stage_whole(where[::4], self._places, stream)
            size = self._width * self._client.model.elements
            return (int(FrameKind.DENSE), 0, size), np.zeros(0, layout.BLOCK), 0
        given = [where[at : at + 4] for at in range(0, len(where), 4)]
        self._check_apart(given)
        blocks, begin, size = self._layout_rows(given)
        sums = self._sums[self._turn]
        runtime.memsetAsync(sums.data.ptr, 0, sums.nbytes, stream)
        places = [SKIPPED] * len(given)
        for block in blocks:
            if not given[block["tensor"]][1]:
                places[block["tensor"]] = int(block["values_at"])
        self._stage_whole(where[::4], places, stream)
        for block in blocks:
            number = int(block["tensor"])
            if given[number][1]:
                self._stage_rows(number, given[number], block, stream)
        return (int(FrameKind.ROWS), len(blocks), size), blocks, begin

    def _stage_whole(self, sources: Sequence[int], places: Sequence[int], stream: int) -> None:
        """Tensors that are given whole; in a dense frame those that are not given are zero."""
        for stage in self._stages[self._turn]:
            count = stage.tensors.stop - stage.tensors.start
            stage.items[:count, 0] = sources[stage.tensors]
            stage.items[:count, 1] = places[stage.tensors]
            stage.launch(stream, stage.blocks)

    def _check_apart(self, given: Sequence[Sequence[int]]) -> None:
        """In a frame of rows no tensor is where gradients() has it."""
        staging = self._staging[self._turn]
        end = staging.data.ptr + staging.nbytes
        if any(staging.data.ptr <= one[0] < end for one in given):
            raise UsageError("rows cannot be pushed together with arrays of gradients()")

    def _layout_rows(self, given: Sequence[Sequence[int]]) -> tuple[np.ndarray, int, int]:
        """Blocks of a frame of rows: room for as many rows as may turn out to be named."""
        blocks = []
        begin = at = _native.first_block(self._client.place.weights.address)
        for number, (tensor, one) in enumerate(zip(self._client.model.tensors, given, strict=True)):
            if not any(one):
                continue
            row = tensor.count // tensor.rows
            rows = min(one[2], tensor.rows) if one[1] else tensor.rows
            listed, values = _rounded(8 * rows), _rounded(self._width * rows * row)
            # As native/ps_rows.c: a slot has no room for the numbers of rows of one value.
            crowded = row == 1 and listed + values > _rounded(4 * tensor.rows) + LINE
            if not one[1] or crowded:
                whole = _rounded(self._width * tensor.count)
                blocks.append((number, FrameKind.DENSE, 0, at, at))
                at += whole
            else:
                blocks.append((number, FrameKind.ROWS, rows, at, at + listed))
                at += listed + values
        return np.array(blocks, layout.BLOCK), begin, at

    def _stage_rows(self, number: int, where: Sequence[int], block: np.void, stream: int) -> None:
        tensor, count = self._client.model.tensors[number], int(where[2])
        whole = int(block["form"]) == FrameKind.DENSE
        to = self._staging[self._turn].data.ptr + int(block["values_at"])
        if whole:
            runtime.memsetAsync(to, 0, self._width * tensor.count, stream)
        if not count:
            return
        first, following, head, listed = self._room_for(count)
        if not whole:
            listed = self._staging[self._turn].data.ptr + int(block["indices_at"])
        sums = self._sums[self._turn].data.ptr
        parts = sums + 8 * (LISTED + len(self._client.model.tensors) + self._first_chunk[number])
        left = self._left.data.ptr + 4 * tensor.start if self._left.size else 0
        width = tensor.count // tensor.rows
        argument = (
            *(where[1], where[0], count, tensor.rows, width, first, following, head, listed),
            *(sums, parts, to, left, number, int(self._wire), whole),
        )
        pieces = self._first_chunk[number + 1] - self._first_chunk[number]  # each has a part
        blocks = _blocks(count)
        for launch, some in zip(self._rows, (blocks, blocks, min(count, pieces)), strict=True):
            launch.argument[0] = argument
            launch(stream, some)

    def _room_for(self, count: int) -> tuple[int, int, int, int]:
        """Addresses of three arrays of `count` u32 and one of i64; tensors take turns in it."""
        if self._lists is None or self._lists.size < 20 * count:
            with self._device:
                runtime.streamSynchronize(self._compute())  # which may still use what there was
                self._lists = cupy.zeros(20 * max(2 * count, FIRST_ROWS), np.uint8)
                cupy.cuda.get_current_stream().synchronize()
        at = self._lists.data.ptr
        return at + 8 * count, at + 12 * count, at + 16 * count, at

    # -- the end --------------------------------------------------------------------------------

    def _is_done(self, event: cupy.cuda.Event) -> bool:
        status = runtime.eventQuery(event.ptr)
        if status not in (0, NOT_READY):
            raise DeviceError(f"GPU {self._index} has failed (CUDA error {status})")
        return bool(status == 0)

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


def _release(index: int, made: contextlib.ExitStack) -> None:
    """Waits until nothing is on its way and gives the host's memory back.

    A process that is killed leaves that to the kernel's driver.
    """
    with contextlib.suppress(runtime.CUDARuntimeError), cupy.cuda.Device(index):
        try:
            runtime.deviceSynchronize()  # the compute stream, too, may read registered memory
        finally:
            made.close()


def _launch_host_function(stream: int, landing: int) -> None:
    """CuPy's own calls Python, and would wait for the interpreter's lock."""
    status = _driver().cuLaunchHostFunc(stream, _native.LAND, landing)
    if status:
        raise DeviceError(f"the driver does not take the publishing of a gradient (error {status})")


_loaded: list[Any] = []


def _driver() -> Any:
    if not _loaded:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchHostFunc.argtypes = [ctypes.c_void_p] * 3
        _loaded.append(library)
    return _loaded[0]


def _where(tensor: Tensor, gradient: Any, kept: list[Any]) -> Where:
    """Where a gradient lies on the device. Raises ModelMismatch."""
    if gradient is None:
        return NONE
    if isinstance(gradient, Rows):
        given = _array(tensor, gradient.indices)
        if given.size and given.dtype.kind not in "iu":
            raise ModelMismatch(f"rows of {tensor.name!r}: indices of {given.dtype}, not integers")
        indices = cupy.ascontiguousarray(given, np.int64)
        values = cupy.ascontiguousarray(_array(tensor, gradient.values), np.float32)
        if indices.ndim != 1 or values.shape != (indices.size, *tensor.shape[1:]):
            raise ModelMismatch(
                f"rows of {tensor.name!r}: {list(indices.shape)} indices and values of shape "
                f"{list(values.shape)}; the tensor has shape {list(tensor.shape)}"
            )
        kept += (indices, values)
        return rows_at(indices.data.ptr, values.data.ptr, indices.size)
    array = _array(tensor, gradient)
    if array.shape != tensor.shape:
        raise ModelMismatch(
            f"gradient of {tensor.name!r} has shape {list(array.shape)}, "
            f"the tensor {list(tensor.shape)}"
        )
    array = cupy.ascontiguousarray(array, np.float32)
    kept.append(array)
    return whole_at(array.data.ptr)


def _array(tensor: Tensor, given: Any) -> cupy.ndarray:
    """Without a copy, also of other libraries' arrays. Raises ModelMismatch."""
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


def _blocks(threads: int) -> int:
    return min(-(-threads // THREADS), BLOCKS)


def _rounded(size: int) -> int:
    return layout.rounded(size, LINE)


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _told(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
