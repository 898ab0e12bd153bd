"""Checks a frame before it is applied. What fails is refused, counted and has its Reason kept."""

from __future__ import annotations

import math

import numpy as np

from gadei_ps.kernels.compiled import compiled
from gadei_ps.memory import layout
from gadei_ps.server.blocks import check_rows
from gadei_ps.server.constants import (
    BAD_DTYPE,
    BAD_GENERATION,
    BAD_KIND,
    BAD_SCALE,
    BAD_SEQUENCE,
    BAD_SIZE,
    BFLOAT16,
    DENSE,
    EMPTY,
    FLOAT16,
    FLOAT32,
    GIVEN_UP,
    NOT_FINITE,
    OK,
    ROWS,
    UNCHECKED,
)
from gadei_ps.server.context import control_at, frame_at

CHECKED = np.uint32(layout.CHECKED)
NONFINITE = np.uint32(layout.NONFINITE)


@compiled
def check_frame(
    header: np.uint64,
    slot: np.uint64,
    generation: np.uint64,
    sequence: np.uint64,
    part: np.ndarray,
) -> int:
    """Returns why the frame must not be applied; OK if it may. All shards come to one answer.

    header: address of a copy of its header. slot: address of the frame. generation: of its ring.
    sequence: the one that is due. part: PART, shape (1,), of any shard.
    """
    frame = frame_at(header)
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
        if frame[0].payload_bytes != part[0].elements * np.uint64(size):
            return BAD_SIZE
    else:
        reason = check_rows(header, slot, size, part)
        if reason != OK:
            return reason
    if control_at(part[0].control)[0].refuse_nonfinite:
        if not frame[0].flags & CHECKED:
            return UNCHECKED
        if frame[0].flags & NONFINITE:
            return NOT_FINITE
    scale = frame[0].rate_scale
    if not (scale >= 0.0 and math.isfinite(scale)):
        return BAD_SCALE
    return OK
