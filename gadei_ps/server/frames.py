"""Which frames may be applied: a bad one is refused, counted and named (Reason)."""

from __future__ import annotations

import math

import numpy as np

from gadei_ps.kernels.compiled import compiled
from gadei_ps.memory import layout
from gadei_ps.memory.layout import FrameKind, Reason
from gadei_ps.memory.layout import WireType as Wire
from gadei_ps.server.apply import OK, frame_at
from gadei_ps.server.places import ELEMENTS
from gadei_ps.server.rows import check_rows

# Plain integers: Numba would carry an enum member along as a type of its own.
DENSE = int(FrameKind.DENSE)
ROWS = int(FrameKind.ROWS)
EMPTY = int(FrameKind.EMPTY)
FLOAT32 = int(Wire.FLOAT32)
BFLOAT16 = int(Wire.BFLOAT16)
FLOAT16 = int(Wire.FLOAT16)
CHECKED = np.uint32(layout.CHECKED)
NONFINITE = np.uint32(layout.NONFINITE)
BAD_KIND = int(Reason.BAD_KIND)
BAD_DTYPE = int(Reason.BAD_DTYPE)
BAD_SIZE = int(Reason.BAD_SIZE)
BAD_GENERATION = int(Reason.BAD_GENERATION)
BAD_SEQUENCE = int(Reason.BAD_SEQUENCE)
UNCHECKED = int(Reason.UNCHECKED)
NOT_FINITE = int(Reason.NOT_FINITE)
BAD_SCALE = int(Reason.BAD_SCALE)
GIVEN_UP = int(Reason.GIVEN_UP)


@compiled
def check_frame(
    c: np.ndarray,
    slot: np.uint64,
    generation: np.uint64,
    sequence: np.uint64,
    places: np.ndarray,
) -> int:
    """Why the frame must not be applied; OK if it may. Every shard comes to the same answer.

    c: CONTROL, shape (1,). slot: address of the frame. places: see places.py.
    """
    frame = frame_at(slot)
    if frame[0].generation != generation:
        return BAD_GENERATION
    if frame[0].sequence != sequence:
        return BAD_SEQUENCE
    if frame[0].kind == EMPTY:
        return GIVEN_UP
    if frame[0].kind != DENSE and frame[0].kind != ROWS:
        return BAD_KIND
    if frame[0].dtype == FLOAT32:
        size = 4
    elif frame[0].dtype == BFLOAT16 or frame[0].dtype == FLOAT16:
        size = 2
    else:
        return BAD_DTYPE
    if frame[0].kind == DENSE:
        if frame[0].payload_bytes != places[ELEMENTS] * np.uint64(size):
            return BAD_SIZE
    else:
        reason = check_rows(slot, size, places)
        if reason != OK:
            return reason
    if c[0].refuse_nonfinite:
        if not frame[0].flags & CHECKED:
            return UNCHECKED
        if frame[0].flags & NONFINITE:
            return NOT_FINITE
    scale = frame[0].rate_scale
    if not (scale >= 0.0 and math.isfinite(scale)):
        return BAD_SCALE
    return OK
