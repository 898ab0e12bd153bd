"""Payloads of frames, as a client writes them and as a test reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from gadei_ps import _native
from gadei_ps.learners.client import rows_at
from gadei_ps.memory import layout
from gadei_ps.memory.layout import FrameKind, WireType
from gadei_ps.memory.weights import Model, payload_bytes, write_table

_claim = ctypes.CDLL(_native.__file__).ps_claim
_claim.argtypes = [*[ctypes.c_uint64] * 3, ctypes.POINTER(ctypes.c_int)]
_claim.restype = ctypes.c_void_p


def claim(ring: int, control: int, timeout_ns: int) -> int:
    """Return the address of the free slot, or a result < 0: see ps_claim."""
    result = ctypes.c_int()
    slot: int | None = _claim(ring, control, timeout_ns, result)
    return slot or result.value


def same(arrays: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> None:
    """Compare to the last bit."""
    for one, other in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(one, other)


class Loose:
    """A weights segment's table in private memory, for weights.write_table."""

    def __init__(self, model: Model) -> None:
        size = layout.WEIGHTS.itemsize + len(model.tensors) * layout.TENSOR.itemsize
        self.bytes = np.zeros(size, np.uint8)
        write_table(self, model)  # type: ignore[arg-type]

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def view(self, dtype: np.dtype[np.void]) -> np.void:
        one: np.void = self.bytes[: dtype.itemsize].view(dtype)[0]
        return one

    def array(self, dtype: np.dtype[np.void], count: int, at: int) -> np.ndarray:
        return self.bytes[at : at + count * dtype.itemsize].view(dtype)


def written(
    model: Model,
    where: Sequence[int],
    room: np.ndarray,
    wire: WireType,
    *,
    skip_zeros: bool,
    residue: np.ndarray | None = None,
) -> _native.Learner:
    """Let a learner without a job write a whole frame into `room`. Return what it has written.

    where: as Client.push_from takes it. skip_zeros: whether rows of zeros may be left out. residue:
    what rounding has not sent yet (error feedback).
    """
    control, table = np.zeros(1, layout.CONTROL), Loose(model)
    at = 0 if residue is None else residue.ctypes.data
    learner = _native.Learner(0, _native.address(control), table.address, wire, at)
    learner.skips_zeros = skip_zeros
    learner.write_frame(room.ctypes.data, where)
    return learner


def payload_of(
    model: Model,
    gradients: dict[int, tuple[np.ndarray, np.ndarray] | np.ndarray],
    wire: WireType = WireType.FLOAT32,
    *,
    skip_zeros: bool = False,
    residue: np.ndarray | None = None,
) -> tuple[np.ndarray, FrameKind, int, float]:
    """Return a slot's contents as a client writes them, uint8; kind, blocks and sum of squares."""
    room = np.zeros(payload_bytes(model) + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :]
    where: list[int] = []
    kept = []
    for number in range(len(model.tensors)):
        given = gradients.get(number)
        if given is None:
            where += (0, 0, 0, 0)
        elif isinstance(given, np.ndarray):
            kept.append(np.ascontiguousarray(given, np.float32))
            where += (kept[-1].ctypes.data, 0, 0, 0)
        else:
            indices = np.ascontiguousarray(given[0], np.int64)
            values = np.ascontiguousarray(given[1], np.float32)
            kept += [indices, values]
            where += rows_at(indices.ctypes.data, values.ctypes.data, indices.size)
    learner = written(model, where, room, wire, skip_zeros=skip_zeros, residue=residue)
    kind, size = FrameKind(learner.kind), learner.payload_bytes
    return room[:size].copy(), kind, learner.blocks, learner.squares


def decoded_frame(
    model: Model, payload: np.ndarray, kind: FrameKind, blocks: int, wire: WireType
) -> dict[int, np.ndarray]:
    """The dense gradients in a payload, by tensor's number."""

    def read(at: int, count: int) -> np.ndarray:
        raw = payload[at : at + count * layout.WIRE_BYTES[wire]]
        if wire == WireType.BFLOAT16:
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return raw.view(np.float16 if wire == WireType.FLOAT16 else np.float32).astype(np.float32)

    found = {}
    if kind is FrameKind.DENSE:
        for number, tensor in enumerate(model.tensors):
            at = tensor.start * layout.WIRE_BYTES[wire]
            found[number] = read(at, tensor.count).reshape(tensor.shape)
        return found
    for i in range(blocks):
        block = payload[i * layout.BLOCK.itemsize :][: layout.BLOCK.itemsize].view(layout.BLOCK)[0]
        tensor = model.tensors[int(block["tensor"])]
        if int(block["form"]) == FrameKind.DENSE:
            values = read(int(block["values_at"]), tensor.count).reshape(tensor.shape)
        else:
            count, at = int(block["rows"]), int(block["indices_at"])
            values = np.zeros(tensor.shape, np.float32)
            indices = payload[at : at + 8 * count].view(np.int64)
            width = tensor.count // tensor.rows
            values[indices] = read(int(block["values_at"]), count * width).reshape(count, width)
        found[int(block["tensor"])] = values
    return found


def rows_payload(
    model: Model,
    gradients: dict[int, tuple[np.ndarray, np.ndarray] | np.ndarray],
    wire: WireType = WireType.FLOAT32,
) -> tuple[np.ndarray, int]:
    """Payload of a frame of rows, uint8, and how many blocks it has."""
    # A client writes no frame of rows without rows, nor one with rows that also has a buffer; an
    # assignment may have both.
    room = np.zeros(payload_bytes(model) + 64, np.uint8)
    further, blocks = gradients, 0
    at = layout.rounded(len(model.tensors) * layout.BLOCK.itemsize, 64)
    if any(isinstance(given, tuple) for given in gradients.values()):
        trained = {key: one for key, one in gradients.items() if key < len(model.trained)}
        payload, _, blocks, _ = payload_of(model, trained, wire)
        further = {key: one for key, one in gradients.items() if key not in trained}
        at = payload.size
        room[:at] = payload
    for number, given in sorted(further.items()):
        at = layout.rounded(at, 64)
        values = np.ascontiguousarray(given, np.float32)
        entry = room[blocks * layout.BLOCK.itemsize :][: layout.BLOCK.itemsize].view(layout.BLOCK)
        entry["tensor"], entry["form"], entry["values_at"] = number, FrameKind.DENSE, at
        _native.copy(wire, room.ctypes.data + at, values.ctypes.data, values.size, 0)
        at += values.size * layout.WIRE_BYTES[wire]
        blocks += 1
    return room[:at].copy(), blocks
