"""Gradients of which only some rows are given (embeddings): checked, walked, applied.

A frame of rows has a block for each tensor that it moves: all of it, or the rows listed. What no
frame in hand names is left as it is, with its optimizer state ("lazily": the rows of a momentum do
not decay while nobody touches them, as with torch.optim.SparseAdam).

The walk goes by tensor and row and cuts each row, or dense tensor, into pieces of at most CHUNK
values within the shard; a single frame's rows that follow each other are cut as one. Its pieces are
numbered like the chunks of a dense gradient, and the cursor and the undo log serve them in the same
way. The same frames give the same walk, so that whoever recovers finds the piece that was open by
walking again.

A learner may write over a frame at any time. So whatever places a write is read once and checked
where it is used; what does not fit moves nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numba
import numpy as np
from numba import types

from gadei_ps.kernels import cpu
from gadei_ps.kernels.compiled import compiled
from gadei_ps.kernels.optimizers import COEFFICIENTS
from gadei_ps.memory import layout
from gadei_ps.server.apply import (
    AS_BFLOAT16,
    AS_FLOAT32,
    BFLOAT16,
    BLOCK,
    CHUNK,
    DTYPE,
    FLOAT16,
    FLOAT32,
    KIND,
    OK,
    PAYLOAD,
    PAYLOAD_AT,
    WALK,
    Shard,
    apply_chunks,
    gradient_at,
    integer,
    lock,
    move_span,
    restore,
    scale_of,
    shard_of,
    take_coefficients,
    unlock,
)
from gadei_ps.server.places import APPLY_AT, CAPACITY, PARAMETERS, PLACES, TENSORS, TENSORS_AT
from gadei_ps.server.symbols import call_apply, doubles, floats, get, get32, structs, words

tensor_at = structs(layout.TENSOR)
TENSOR_BYTES = np.uint64(layout.TENSOR.itemsize)
PAYLOAD_BYTES = np.uint64(layout.offset(layout.FRAME, "payload_bytes"))
BLOCKS = np.uint64(layout.offset(layout.FRAME, "blocks"))
BLOCK_SIZE = layout.BLOCK.itemsize
BLOCK_BYTES = np.uint64(BLOCK_SIZE)
DENSE = int(layout.FrameKind.DENSE)
ROWS = int(layout.FrameKind.ROWS)
BAD_SIZE = int(layout.Reason.BAD_SIZE)
BAD_ROWS = int(layout.Reason.BAD_ROWS)

# What a shard remembers of each frame in hand while it walks: more lines of Shard.hands.
NEXT = WALK  # block to look at next
FORM = WALK + 1  # of the tensor at hand: ABSENT, ROWS, DENSE
VALUES = WALK + 2  # address of its values
INDICES = WALK + 3  # address of its rows' numbers
COUNT = WALK + 4  # of its rows
AT = WALK + 5  # row to look at next
ROW = WALK + 6  # its number; NO_ROW after the last
ABSENT = 0
NO_ROW = 2**62


@compiled
def _rows_of(tensor: np.ndarray) -> int:
    """How many rows a tensor has; its first dimension."""
    return integer(tensor[0].shape[0]) if tensor[0].dims > 0 else 1


class Block(NamedTuple):
    """A block as it was read, once; its learner may write over it."""

    tensor: int
    form: int
    rows: int
    indices_at: np.uint64
    values_at: np.uint64


@compiled
def _read_block(at: np.uint64) -> Block:
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


@compiled
def _fits(block: Block, tensor: np.ndarray, size: int, payload_bytes: int) -> bool:
    """Whether what a block describes lies within the payload. size: bytes of a value."""
    room = np.uint64(payload_bytes)
    rows = _rows_of(tensor)
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


@compiled
def _payload_bytes(slot: np.uint64, places: np.ndarray) -> int:
    """Of the frame in this slot; more than there is room for: -1."""
    size = get(slot + PAYLOAD_BYTES)
    return integer(size) if size <= places[CAPACITY] else -1


@compiled
def check_rows(slot: np.uint64, size: int, places: np.ndarray) -> int:
    """Why the frame of rows in this slot must not be applied; OK if it may.

    size: bytes of a value.
    """
    tensors = integer(places[TENSORS])
    payload = slot + PAYLOAD_AT
    blocks = integer(get32(slot + BLOCKS))
    payload_bytes = _payload_bytes(slot, places)
    if blocks > tensors or blocks * BLOCK_SIZE > payload_bytes:
        return BAD_SIZE
    before = -1
    for i in range(blocks):
        block = _read_block(payload + np.uint64(i) * BLOCK_BYTES)
        if block.tensor <= before or block.tensor >= tensors:
            return BAD_ROWS
        before = block.tensor
        tensor = tensor_at(places[TENSORS_AT] + np.uint64(block.tensor) * TENSOR_BYTES)
        if not _fits(block, tensor, size, payload_bytes):
            return BAD_SIZE
        if block.form == ROWS:
            indices = words(payload + block.indices_at, block.rows)
            last = -1
            for k in range(indices.size):
                index = indices[k]
                if index >= np.uint64(_rows_of(tensor)) or integer(index) <= last:
                    return BAD_ROWS
                last = integer(index)
    return OK


@compiled
def _meet(s: Shard, members: int, number: int, tensor: np.ndarray) -> int:
    """Goes on to the next tensor in each frame: DENSE if one gives all of it, ROWS, or ABSENT."""
    met = ABSENT
    for m in range(members):
        size = 4 if s.hands[DTYPE, m] == FLOAT32 else 2
        payload = np.uint64(s.hands[PAYLOAD, m])
        if s.hands[KIND, m] == DENSE:
            s.hands[FORM, m] = DENSE
            s.hands[VALUES, m] = integer(payload) + integer(tensor[0].start) * size
            met = DENSE
            continue
        s.hands[FORM, m] = ABSENT
        slot = payload - PAYLOAD_AT
        payload_bytes = _payload_bytes(slot, s.places)
        at = s.hands[NEXT, m]
        if at >= integer(get32(slot + BLOCKS)) or (at + 1) * BLOCK_SIZE > payload_bytes:
            continue
        block = _read_block(payload + np.uint64(at) * BLOCK_BYTES)
        if block.tensor != number:
            continue
        s.hands[NEXT, m] = at + 1
        if not _fits(block, tensor, size, payload_bytes):
            continue
        s.hands[FORM, m] = block.form
        s.hands[VALUES, m] = integer(payload + block.values_at)
        if block.form == ROWS:
            s.hands[INDICES, m] = integer(payload + block.indices_at)
            s.hands[COUNT, m] = block.rows
            s.hands[AT, m] = -1
            _next_row(s, m, tensor)
            if met == ABSENT:
                met = ROWS
        else:
            met = DENSE
    return met


@compiled
def _next_row(s: Shard, m: int, tensor: np.ndarray) -> None:
    """Goes on to the next row that a frame lists."""
    at = s.hands[AT, m] + 1
    s.hands[AT, m] = at
    s.hands[ROW, m] = NO_ROW
    if at < s.hands[COUNT, m]:
        row = words(np.uint64(s.hands[INDICES, m]), s.hands[COUNT, m])[at]
        if row < np.uint64(_rows_of(tensor)):
            s.hands[ROW, m] = integer(row)


@compiled
def _next_gap(s: Shard, tensor: np.ndarray) -> int:
    """Goes on past the rows that follow the one at hand without a gap; the one after them."""
    after = integer(s.hands[ROW, 0]) + 1
    _next_row(s, 0, tensor)
    while s.hands[ROW, 0] == after:
        after += 1
        _next_row(s, 0, tensor)
    return after


@compiled
def _add_row(
    s: Shard, m: int, mean: np.ndarray, width: int, row_start: int, start: int, end: int
) -> None:
    """Adds the part of a frame's row at hand that lies in values start to end of the weights."""
    low, high = max(start, row_start), min(end, row_start + width)
    if low >= high:
        return
    size = 4 if s.hands[DTYPE, m] == FLOAT32 else 2
    row = np.uint64(s.hands[VALUES, m] + s.hands[AT, m] * width * size)
    g = gradient_at(row, s.hands[DTYPE, m], low - row_start, high - low, s.at.scratch)
    scale = scale_of(s, m, row_start < integer(s.places[PARAMETERS]))
    cpu.accumulate(mean[low - start : high - start], floats(g, high - low), scale)


@compiled
def _mean(s: Shard, members: int, tensor: np.ndarray, row: int, start: int, end: int) -> np.uint64:
    """Address of the mean gradient of values start to end. row: at hand; -1: the whole tensor."""
    mean = floats(s.at.mean, end - start)
    mean[:] = np.float32(0)
    first = integer(tensor[0].start)
    width = integer(tensor[0].count) // _rows_of(tensor)
    for m in range(members):
        if s.hands[FORM, m] == DENSE:
            values = np.uint64(s.hands[VALUES, m])
            g = gradient_at(values, s.hands[DTYPE, m], start - first, end - start, s.at.scratch)
            scale = scale_of(s, m, start < integer(s.places[PARAMETERS]))
            cpu.accumulate(mean, floats(g, end - start), scale)
        elif s.hands[FORM, m] == ROWS and row >= 0:
            if s.hands[ROW, m] == row:
                _add_row(s, m, mean, width, first + row * width, start, end)
        elif s.hands[FORM, m] == ROWS:
            while s.hands[ROW, m] != NO_ROW and first + s.hands[ROW, m] * width < end:
                begin = first + s.hands[ROW, m] * width
                _add_row(s, m, mean, width, begin, start, end)
                if begin + width > end:
                    break
                _next_row(s, m, tensor)
    cpu.scale(mean, 1.0 / members)
    return s.at.mean


@compiled
def _span(
    s: Shard,
    coef: cpu.Scalars,
    members: int,
    tensor: np.ndarray,
    row: int,
    shift: int,
    low: int,
    high: int,
    piece: int,
    first: int,
    reopen: bool,
) -> int:
    """Moves values low to high, of one row (-1: of a tensor given whole); the next piece's number.

    Where one frame is applied as it is, also of several rows that follow each other; shift: how
    far its values of them are from where they were if it gave the tensor whole. Pieces before the
    first-th are done. reopen: that one is open, its old values in the undo log.
    """
    pieces = -(-(high - low) // CHUNK)
    if piece + pieces <= first:
        return piece + pieces
    is_parameter = low < integer(s.places[PARAMETERS])
    kept = s.kept if is_parameter else 0
    at = low
    if piece < first:
        at += (first - piece) * CHUNK
        piece = first
    if reopen and piece == first:
        restore(s.at, kept, np.uint64(piece), at, min(CHUNK, high - at))
    start = integer(tensor[0].start)
    single = members == 1
    scale = scale_of(s, 0, is_parameter)
    kind = s.kind if is_parameter else 0
    while at < high:
        as_it_is = single and scale == 1.0 and s.hands[DTYPE, 0] != FLOAT16
        end = high if as_it_is else min(high, at + BLOCK)
        values, skip = np.uint64(s.hands[VALUES, 0]), at - start + shift
        if as_it_is and s.hands[DTYPE, 0] == BFLOAT16:
            g = values + np.uint64(skip * 2)
            move_span(kind, kept, coef, s.at, g, AS_BFLOAT16, s.cursor, piece, at, end)
        else:
            if single:
                g = gradient_at(values, s.hands[DTYPE, 0], skip, end - at, s.at.scratch)
            else:
                g = _mean(s, members, tensor, row, at, end)
            if single and scale != 1.0:
                mean = floats(s.at.mean, end - at)
                mean[:] = np.float32(0)
                cpu.accumulate(mean, floats(g, end - at), scale)
                g = s.at.mean
            move_span(kind, kept, coef, s.at, g, AS_FLOAT32, s.cursor, piece, at, end)
        piece += -(-(end - at) // CHUNK)
        at = end
    return piece


@compiled
def apply_rows(s: Shard, members: int, first: int, reopen: bool) -> None:
    """Applies the gradient in hand, or the mean of several, from the first-th piece on.

    At least one frame is one of rows. The sequence lock of the shard is odd meanwhile.
    """
    take_coefficients(s)
    lock(s)
    coef = cpu.scalars(doubles(s.at.coef, COEFFICIENTS))
    piece = 0
    single = members == 1  # and nothing else: recovery must cut the same pieces
    for m in range(members):
        s.hands[NEXT, m] = 0
    for number in range(integer(s.places[TENSORS])):
        tensor = tensor_at(s.places[TENSORS_AT] + np.uint64(number) * TENSOR_BYTES)
        met = _meet(s, members, number, tensor)
        start = integer(tensor[0].start)
        end = start + integer(tensor[0].count)
        low, high = max(start, s.low), min(end, s.high)
        if met == ABSENT or low >= high:
            continue
        if met == DENSE:
            piece = _span(s, coef, members, tensor, -1, 0, low, high, piece, first, reopen)
            continue
        width = (end - start) // _rows_of(tensor)
        if single:
            while s.hands[ROW, 0] != NO_ROW:
                row = integer(s.hands[ROW, 0])
                shift = (s.hands[AT, 0] - row) * width
                after = _next_gap(s, tensor)
                low = max(start + row * width, s.low)
                high = min(start + after * width, s.high)
                if low < high:
                    piece = _span(
                        s, coef, members, tensor, row, shift, low, high, piece, first, reopen
                    )
            continue
        while True:
            row = NO_ROW
            for m in range(members):
                if s.hands[FORM, m] == ROWS:
                    row = min(row, integer(s.hands[ROW, m]))
            if row == NO_ROW:
                break
            low = max(start + row * width, s.low)
            high = min(start + (row + 1) * width, s.high)
            if low < high:
                piece = _span(s, coef, members, tensor, row, 0, low, high, piece, first, reopen)
            for m in range(members):
                if s.hands[FORM, m] == ROWS and s.hands[ROW, m] == row:
                    _next_row(s, m, tensor)
    unlock(s)


def _apply(
    index: int, low: int, high: int, places_at: int, members: int, first: int, reopen: int
) -> None:
    """What apply_frames() does, as a C function. Of the frames in hand tells Shard.hands."""
    s = shard_of(index, low, high, words(places_at, PLACES))
    for m in range(members):
        if s.hands[KIND, m] == ROWS:
            apply_rows(s, members, first, reopen != 0)
            return
    apply_chunks(s, members, first, reopen != 0)


@functools.cache
def applier() -> int:
    """Address of _apply, for places; compiled if need be.

    Numba compiles all that a function calls once more as a part of it, and of each of its callers
    in turn. Behind an address, the loops that apply are compiled once.
    """
    word, address = types.int64, types.uint64
    signature = types.void(word, word, word, address, word, word, word)
    made = numba.cfunc(signature, cache=True, error_model="numpy")(_apply)
    return int(made.address)


@compiled
def apply_frames(s: Shard, members: int, first: int, reopen: bool) -> None:
    """Applies the gradient in hand, or the mean of several, from the first-th chunk on.

    reopen: that one is open, its old values are in the undo log.
    """
    places = np.uint64(s.places.ctypes.data)
    call_apply(s.places[APPLY_AT], s.number, s.low, s.high, places, members, first, reopen)
