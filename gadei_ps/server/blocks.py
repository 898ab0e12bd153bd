"""The blocks of a payload, as its learner wrote them, and their check.

Such a payload has a block for each tensor that the frame changes: all of it, or the rows that it
lists. A learner may write over a frame at any time. So whatever decides where a store goes is read
once and checked where it is used; a block that does not fit moves nothing. Compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gadei_ps.kernels.compiled import inner
from gadei_ps.memory import layout
from gadei_ps.server.constants import BAD_ROWS, BAD_SIZE, OK
from gadei_ps.server.context import PAYLOAD_AT, integer
from gadei_ps.server.kinds import DENSE, ROWS
from gadei_ps.server.symbols import get, get32, structs, words

TENSOR_BYTES = np.uint64(layout.TENSOR.itemsize)
PAYLOAD_BYTES = np.uint64(layout.offset(layout.FRAME, "payload_bytes"))
BLOCKS = np.uint64(layout.offset(layout.FRAME, "blocks"))
BLOCK_BYTES = layout.BLOCK.itemsize

_tensor_at = structs(layout.TENSOR)


class Block(NamedTuple):
    """A block as it was read, once; its learner may write over it."""

    tensor: int
    form: int
    rows: int
    indices_at: np.uint64
    values_at: np.uint64


@inner
def tensor_of(part: np.ndarray, number: int) -> np.ndarray:
    """Return the model's number-th tensor, TENSOR of shape (1,)."""
    tensor: np.ndarray = _tensor_at(part[0].tensors_at + np.uint64(number) * TENSOR_BYTES)
    return tensor


@inner
def rows_of(tensor: np.ndarray) -> int:
    """Return the rows of a tensor: its first dimension; 1 for a tensor without values."""
    return max(integer(tensor[0].shape[0]), 1) if tensor[0].dims > 0 else 1


@inner
def read_block(slot: np.uint64, number: int) -> Block:
    """Read the number-th block of the frame in this slot."""
    at = slot + PAYLOAD_AT + np.uint64(number * BLOCK_BYTES)
    # Opaque loads: what is checked is what is used.
    first, rows = get(at), get(at + np.uint64(8))
    most = np.uint64(2**62)  # as signed words they stay what they are: too large
    return Block(
        integer(first & np.uint64(0xFFFFFFFF)),
        integer(first >> np.uint64(32)),
        integer(min(rows, most)),
        get(at + np.uint64(16)),
        get(at + np.uint64(24)),
    )


@inner
def fits(block: Block, tensor: np.ndarray, size: int, payload_bytes: int) -> bool:
    """Return whether a block lies within the payload. size: bytes of a value."""
    room = np.uint64(payload_bytes)
    rows = rows_of(tensor)
    count = integer(tensor[0].count)
    if block.values_at > room or block.values_at % np.uint64(64) != 0:
        return False
    if block.form == DENSE:
        return integer(block.values_at) + count * size <= payload_bytes
    if block.form != ROWS or block.rows > rows:
        return False
    if block.indices_at > room or block.indices_at % np.uint64(64) != 0:
        return False
    return (
        integer(block.indices_at) + block.rows * 8 <= payload_bytes
        and integer(block.values_at) + block.rows * (count // rows) * size <= payload_bytes
    )


@inner
def payload_bytes_of(header: np.uint64, part: np.ndarray) -> int:
    """Return the payload's size (bytes) from a header at this address; -1 above a slot's room."""
    size = get(header + PAYLOAD_BYTES)
    return integer(size) if size <= part[0].capacity else -1


@inner
def count_blocks(header: np.uint64) -> int:
    """Return the number of blocks of a frame from its header at this address, by its learner."""
    return integer(get32(header + BLOCKS))


@inner
def check_rows(
    header: np.uint64, slot: np.uint64, size: int, part: np.ndarray, buffers: bool
) -> int:
    """Return why the frame of rows in this slot must not be applied; OK if it may.

    header: address of a copy of its header. size: bytes of a value. part: PART, shape (1,), of
    any shard. buffers: whether it may have blocks of them.
    """
    tensors = integer(part[0].tensors)
    blocks = count_blocks(header)
    payload_bytes = payload_bytes_of(header, part)
    if blocks > tensors or blocks * BLOCK_BYTES > payload_bytes:
        return BAD_SIZE
    before = -1
    for i in range(blocks):
        block = read_block(slot, i)
        if block.tensor <= before or block.tensor >= tensors:
            return BAD_ROWS
        before = block.tensor
        tensor = tensor_of(part, block.tensor)
        if tensor[0].start >= part[0].parameters and not buffers:
            return BAD_ROWS
        if not fits(block, tensor, size, payload_bytes):
            return BAD_SIZE
        if block.form == ROWS:
            indices = words(slot + PAYLOAD_AT + block.indices_at, block.rows)
            last = -1
            for k in range(indices.size):
                index = indices[k]
                if index >= np.uint64(rows_of(tensor)) or integer(index) <= last:
                    return BAD_ROWS
                last = integer(index)
    return OK
