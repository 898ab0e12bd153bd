"""Application of a shard's current frames: the walks over their payloads.

A payload is dense or has blocks (blocks.py); a mean may have frames of both. Rows that no current
frame names do not change, and neither does their optimizer state ("lazily": a row of momentum does
not decay while no gradient names it, as with torch.optim.SparseAdam). Compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types

from gadei_ps.kernels import cpu
from gadei_ps.kernels.compiled import inner
from gadei_ps.server.blocks import (
    BLOCK_BYTES,
    count_blocks,
    fits,
    payload_bytes_of,
    read_block,
    rows_of,
    tensor_of,
)
from gadei_ps.server.chunks import Span, Walk, move_span, prepare
from gadei_ps.server.constants import APPLY, BFLOAT16, CHUNK, FLOAT16, MAX_LEARNERS, ONE
from gadei_ps.server.context import (
    GENERATION,
    PAYLOAD_AT,
    Shard,
    among,
    integer,
    is_lost,
    is_there,
    shard_of,
)
from gadei_ps.server.kinds import BLOCKS, BUFFERS, DENSE, ROWS
from gadei_ps.server.payload import (
    BFLOAT16_FORM,
    FLOAT32_FORM,
    MEAN,
    SCRATCH,
    as_float32,
    mean_at,
    scale_of,
    size_of,
)
from gadei_ps.server.record import lock, note_torn, unlock
from gadei_ps.server.structs import WINDOW
from gadei_ps.server.symbols import call, floats, prefetch, words

STRETCH = 1 << 16
"""Values of a frame that is read in place, between two looks whether it was lost; whole chunks."""
ABSENT = 0  # no block of a frame names the tensor
NO_ROW = 2**62
AHEAD = 8
"""Rows of a frame between the one that is applied and the one that is fetched into the cache."""
FETCHED = 512
"""Bytes of a row that are fetched ahead; the processor finds the rest by itself."""
LINE = 64
"""Bytes of a line of the cache."""
WHOLE = -1  # instead of a row: the tensor is given whole


# -- dense payloads -------------------------------------------------------------------------------


@inner
def apply_dense(s: Shard, walk: Walk) -> None:
    """Apply the current frames, all of which are dense.

    They move parameters, group by group. Each group begins at a chunk, so the pieces are the
    shard's chunks. A single frame that is lost on the way is left as it is then.
    """
    payload, dtype = s.current[0].payload, s.current[0].dtype
    # Several frames, or a clipped one, are worked out window by window before they are applied.
    mixed = walk.members > 1 or scale_of(s, 0) != 1.0
    start = walk.start
    group = 0
    high = min(s.high, integer(s.part[0].parameters))
    while start < high:
        if walk.members == 1 and is_lost(s):
            return
        while start >= s.part[0].group_end[group]:
            group += 1  # the last group ends with the parameters
        end = min(high, s.part[0].group_end[group])
        end = min(end, start + (WINDOW if mixed or dtype == FLOAT16 else STRETCH))
        count = end - start
        piece = walk.first + -(-(start - walk.start) // CHUNK)
        span = Span(piece, start, end)
        if not mixed and dtype == BFLOAT16:
            g = payload + np.uint64(start * 2)
            move_span(s, group, BFLOAT16_FORM, g, span)
        else:
            if mixed:
                mean = mean_at(s.here + MEAN, count)
                for k in range(walk.members):
                    current = s.current[k]
                    one = as_float32(current.payload, current.dtype, start, count, s.here + SCRATCH)
                    cpu.accumulate(mean, floats(one, count), scale_of(s, k))
                cpu.scale(mean, 1.0 / walk.members)
                g = s.here + MEAN
            else:
                g = as_float32(payload, dtype, start, count, s.here + SCRATCH)
            move_span(s, group, FLOAT32_FORM, g, span)
        start = end


# -- payloads with blocks -------------------------------------------------------------------------


class Stretch(NamedTuple):
    """Values low to high, of one row or of rows that follow each other in a single frame."""

    row: int
    """The first one; WHOLE."""
    shift: int
    """Distance of a single frame's values from their place in a tensor given whole."""
    low: int
    high: int


@inner
def _meet(s: Shard, members: int, number: int, tensor: np.ndarray) -> int:
    """Move to the next tensor in each frame: DENSE if one gives all of it, ROWS, or ABSENT."""
    met = ABSENT
    for m in range(members):
        current = s.current[m]
        size = size_of(current.dtype)
        if not among(BLOCKS, current.kind):
            current.form = DENSE
            current.values = current.payload + np.uint64(integer(tensor[0].start) * size)
            met = DENSE
            continue
        current.form = ABSENT
        slot = current.payload - PAYLOAD_AT
        payload_bytes = payload_bytes_of(slot, s.part)
        if current.next >= count_blocks(slot) or (current.next + 1) * BLOCK_BYTES > payload_bytes:
            continue
        block = read_block(slot, current.next)
        if block.tensor != number:
            continue
        current.next += 1
        if not fits(block, tensor, size, payload_bytes):
            continue
        current.form = block.form
        current.values = current.payload + block.values_at
        if block.form == ROWS:
            current.indices = current.payload + block.indices_at
            current.count = block.rows
            current.at = -1
            _next_row(s, m, tensor)
            if met == ABSENT:
                met = ROWS
        else:
            met = DENSE
    return met


@inner
def _next_row(s: Shard, m: int, tensor: np.ndarray) -> None:
    """Move to the next row that a frame lists."""
    current = s.current[m]
    current.at += 1
    current.row = NO_ROW
    if current.at < current.count:
        row = words(current.indices, current.count)[current.at]
        if row < np.uint64(rows_of(tensor)):
            current.row = integer(row)
    if current.at + AHEAD < current.count:
        _fetch(s, tensor, words(current.indices, current.count)[current.at + AHEAD])


@inner
def _fetch(s: Shard, tensor: np.ndarray, row: np.uint64) -> None:
    """Fetch a row's weights and slots into the cache. row: as the learner wrote it, unchecked.

    The processor's own prefetcher does not find rows, so it would wait for each of them.
    """
    width = integer(tensor[0].count) // rows_of(tensor)
    start = integer(tensor[0].start) + integer(row) * width
    if start < s.low or start >= s.high:
        return
    at = np.uint64(start * 4)
    for line in range(0, min(width * 4, FETCHED), LINE):
        prefetch(s.at.weights + at + np.uint64(line))
        if s.kept > 0:
            prefetch(s.at.slot0 + at + np.uint64(line))
        if s.kept > 1:
            prefetch(s.at.slot1 + at + np.uint64(line))


@inner
def _next_gap(s: Shard, tensor: np.ndarray) -> int:
    """Skip the rows that follow the current one without a gap; return the one after them."""
    after: int = s.current[0].row + 1
    _next_row(s, 0, tensor)
    while s.current[0].row == after:
        after += 1
        _next_row(s, 0, tensor)
    return after


@inner
def _add_row(s: Shard, m: int, mean: np.ndarray, tensor: np.ndarray, start: int, end: int) -> None:
    """Add the part of a frame's row at hand that lies in values start to end of the weights."""
    current = s.current[m]
    width = integer(tensor[0].count) // rows_of(tensor)
    row_start = integer(tensor[0].start) + current.row * width
    low, high = max(start, row_start), min(end, row_start + width)
    if low >= high:
        return
    row = current.values + np.uint64(current.at * width * size_of(current.dtype))
    g = as_float32(row, current.dtype, low - row_start, high - low, s.here + SCRATCH)
    scale = scale_of(s, m)
    cpu.accumulate(mean[low - start : high - start], floats(g, high - low), scale)


@inner
def _mean(s: Shard, members: int, tensor: np.ndarray, row: int, start: int, end: int) -> np.uint64:
    """Return the address of the mean gradient of values start to end. row: at hand; WHOLE."""
    mean = mean_at(s.here + MEAN, end - start)
    first = integer(tensor[0].start)
    width = integer(tensor[0].count) // rows_of(tensor)
    for m in range(members):
        current = s.current[m]
        if current.form == DENSE:
            g = as_float32(
                current.values, current.dtype, start - first, end - start, s.here + SCRATCH
            )
            scale = scale_of(s, m)
            cpu.accumulate(mean, floats(g, end - start), scale)
        elif current.form == ROWS and row != WHOLE:
            if current.row == row:
                _add_row(s, m, mean, tensor, start, end)
        elif current.form == ROWS:
            while current.row != NO_ROW and first + current.row * width < end:
                _add_row(s, m, mean, tensor, start, end)
                if first + (current.row + 1) * width > end:
                    break
                _next_row(s, m, tensor)
    cpu.scale(mean, 1.0 / members)
    return s.here + MEAN


@inner
def _move_stretch(s: Shard, walk: Walk, tensor: np.ndarray, stretch: Stretch, piece: int) -> int:
    """Change the values of a stretch from the piece-th piece; return the next piece's number.

    Values before walk.start are done already.
    """
    high = stretch.high
    at = max(stretch.low, walk.start)
    if at >= high:
        return piece
    group = integer(tensor[0].group)
    start = integer(tensor[0].start)
    single = walk.members == 1
    scale = scale_of(s, 0)
    values, dtype = s.current[0].values, s.current[0].dtype
    in_place = single and scale == 1.0 and dtype != FLOAT16
    while at < high:
        end = high if in_place else min(high, at + WINDOW)
        skip = at - start + stretch.shift
        span = Span(piece, at, end)
        if in_place and dtype == BFLOAT16:
            g = values + np.uint64(skip * 2)
            move_span(s, group, BFLOAT16_FORM, g, span)
        else:
            if single:
                g = as_float32(values, dtype, skip, end - at, s.here + SCRATCH)
            else:
                g = _mean(s, walk.members, tensor, stretch.row, at, end)
            if single and scale != 1.0:
                cpu.accumulate(mean_at(s.here + MEAN, end - at), floats(g, end - at), scale)
                g = s.here + MEAN
            move_span(s, group, FLOAT32_FORM, g, span)
        piece += -(-(end - at) // CHUNK)
        at = end
    return piece


@inner
def _least_row(s: Shard, members: int) -> int:
    """Return the first row at hand in any frame; NO_ROW after the last."""
    row = NO_ROW
    for m in range(members):
        if s.current[m].form == ROWS:
            row = min(row, s.current[m].row)
    return row


@inner
def apply_rows(s: Shard, walk: Walk) -> None:
    """Apply the current frames, at least one of which has blocks.

    The walk goes by tensor and row and cuts each row, or dense tensor, into pieces of at most CHUNK
    values within the shard; a single frame's rows that follow each other are cut as one. The pieces
    are numbered like the chunks of a dense gradient, and the cursor and the undo log serve them in
    the same way. The walk goes up through the weights, so recovery continues from the place of the
    piece that was open.

    A single frame that is lost on the way is left as it is then.
    """
    piece = walk.first
    single = walk.members == 1  # and nothing else: recovery must cut the same pieces
    most = s.high
    if not among(BUFFERS, s.current[0].kind):
        most = min(most, integer(s.part[0].parameters))
    for member in range(walk.members):
        s.current[member].next = 0
    for number in range(integer(s.part[0].tensors)):
        tensor = tensor_of(s.part, number)
        met = _meet(s, walk.members, number, tensor)
        start = integer(tensor[0].start)
        end = start + integer(tensor[0].count)
        if met == ABSENT or max(start, s.low) >= min(end, most):
            continue
        width = (end - start) // rows_of(tensor)
        row = WHOLE if met == DENSE else _least_row(s, walk.members)
        while row != NO_ROW:
            if single and is_lost(s):
                return
            shift, low, high = 0, start, end
            if row != WHOLE:
                after = row + 1
                if single:
                    shift = (s.current[0].at - row) * width
                    after = _next_gap(s, tensor)
                low, high = start + row * width, start + after * width
            low, high = max(low, s.low), min(high, s.high)
            if low < high:
                piece = _move_stretch(s, walk, tensor, Stretch(row, shift, low, high), piece)
            if row == WHOLE:
                break
            for member in range(0 if single else walk.members):
                if s.current[member].form == ROWS and s.current[member].row == row:
                    _next_row(s, member, tensor)
            row = _least_row(s, walk.members)


# -- all current frames ---------------------------------------------------------------------------


@inner
def _count_torn(s: Shard) -> int:
    """Count the current frames that are lost.

    In the mean of a superstep such a frame counts as zeros, so that the others weigh the same in
    every shard.
    """
    record = s.state[0].record[s.number]
    if record.ring < np.uint64(MAX_LEARNERS):
        here = is_there(s.current[0].watch - GENERATION, record.generation, record.sequence)
        return 0 if here else 1
    torn = 0
    member = 0  # the current frames are in the order of their rows
    for row in range(MAX_LEARNERS):
        if s.c[0].superstep_action[row] == APPLY:
            slot = s.current[member].watch - GENERATION
            sequence = s.c[0].superstep_upto[row] - ONE
            if not is_there(slot, s.board[0].ring[row].generation, sequence):
                torn += 1
            member += 1
    return torn


def _apply(part: int, members: int, first: int, start: int) -> None:
    """Do what apply_frames() does, as a C function. part: address."""
    s = shard_of(np.uint64(part))
    walk = Walk(members, first, start)
    has_blocks = False
    for m in range(members):
        has_blocks = has_blocks or among(BLOCKS, s.current[m].kind)
    prepare(s)
    lock(s)
    if has_blocks:
        apply_rows(s, walk)
    else:
        apply_dense(s, walk)
    note_torn(s, _count_torn(s))  # a server that finds all applied reads no frame
    unlock(s)


SIGNATURE = types.void(types.uint64, types.int64, types.int64, types.int64)


def source(name: str) -> tuple[Any, Callable[..., None]]:
    """Return the source of the unit."""
    return SIGNATURE, _apply


@inner
def apply_frames(s: Shard, walk: Walk) -> None:
    """Apply the current frames. The sequence lock of the shard is odd meanwhile."""
    call(s.part[0].apply, s.here, walk.members, walk.first, walk.start)
