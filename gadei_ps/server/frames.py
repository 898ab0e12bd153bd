"""A frame's header: its check, and what the loops take from it.

A frame that fails the check is refused, counted and has its Reason kept. Compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from gadei_ps.kernels import cpu
from gadei_ps.kernels.compiled import inner
from gadei_ps.memory import layout
from gadei_ps.server.blocks import check_rows
from gadei_ps.server.constants import (
    ABANDONED,
    ADD,
    BAD_ASSIGN,
    BAD_DTYPE,
    BAD_GENERATION,
    BAD_KIND,
    BAD_SCALE,
    BAD_SEQUENCE,
    BAD_SIZE,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    MOST_STEPS,
    NOT_FINITE,
    OK,
    ONE,
    RESET,
    SAME_STEPS,
    UNCHECKED,
    ZERO,
)
from gadei_ps.server.context import (
    GENERATION,
    PAYLOAD_AT,
    Shard,
    among,
    control_at,
    frame_at,
    integer,
    part_at,
)
from gadei_ps.server.kinds import APPLIED, ASSIGN, BLOCKS, BUFFERS, DENSE, EMPTY

CHECKED = np.uint32(layout.CHECKED)
NONFINITE = np.uint32(layout.NONFINITE)


@inner
def _may_assign(frame: np.ndarray, part: np.ndarray) -> bool:
    """Return whether the optimizer has an assignment's slot, and can have made its steps.

    Only to weights values are added.

    frame: its header, FRAME of shape (1,).
    """
    stream, steps = frame[0].stream, frame[0].steps
    if frame[0].flags & ADD and stream != ZERO:
        return False
    if stream == np.uint64(1) and part[0].slot0 == ZERO:
        return False
    if stream == np.uint64(2) and part[0].slot1 == ZERO:
        return False
    return bool(stream <= np.uint64(2) and (steps == SAME_STEPS or steps <= MOST_STEPS))


@inner
def are_scales(frame: np.ndarray, groups: int) -> bool:
    """Return whether a frame's scales and momentum are valid. frame: its header."""
    for group in range(groups):
        scale = frame[0].rate_scale[group]
        if not (scale >= 0.0 and math.isfinite(scale)):
            return False
    momentum = frame[0].momentum
    return math.isnan(momentum) or 0.0 <= momentum < 1.0


@inner
def check_frame(
    header: np.uint64, slot: np.uint64, generation: np.uint64, sequence: np.uint64, part: np.ndarray
) -> int:
    """Return why the frame must not be applied; OK if it may. All shards come to one answer.

    header: address of a copy of its header. slot: address of the frame. generation: of its ring.
    sequence: the one that is due. part: PART, shape (1,), of any shard.
    """
    frame = frame_at(header)
    if frame[0].generation != generation:
        return BAD_GENERATION
    if frame[0].sequence != sequence:
        return BAD_SEQUENCE
    kind = integer(frame[0].kind)
    if kind == EMPTY:
        return ABANDONED
    if not among(APPLIED, kind):
        return BAD_KIND
    if frame[0].dtype == FLOAT32:
        size = 4
    elif frame[0].dtype == BFLOAT16 or frame[0].dtype == FLOAT16:
        size = 2
    else:
        return BAD_DTYPE
    if among(BLOCKS, kind):
        reason = check_rows(header, slot, size, part, among(BUFFERS, kind))
        if reason != OK:
            return reason
    elif frame[0].payload_bytes != part[0].parameters * np.uint64(size):
        return BAD_SIZE
    if kind == ASSIGN and not _may_assign(frame, part):
        return BAD_ASSIGN
    if control_at(part[0].control)[0].refuse_nonfinite:
        if not frame[0].flags & CHECKED:
            return UNCHECKED
        if frame[0].flags & NONFINITE:
            return NOT_FINITE
    if not are_scales(frame, part[0].groups):
        return BAD_SCALE
    return OK


@inner
def take(s: Shard, member: int, slot: np.uint64, frame: np.ndarray) -> None:
    """Make the frame in this slot the member-th of the current ones. frame: its header.

    Its learner may have written over the header since it was checked.
    """
    current = s.current[member]
    current.payload = slot + PAYLOAD_AT
    current.dtype = integer(frame[0].dtype)
    kind = integer(frame[0].kind)
    current.kind = kind if among(APPLIED, kind) else DENSE
    current.scale = cpu.clip_scale(s.c[0].hyper[0], frame[0].squares)
    steps = s.state[0].record[s.number].steps
    current.next_step = steps + ONE
    if kind == ASSIGN:
        current.scale = 1.0
        current.stream = integer(frame[0].stream)
        current.reset = 1 if frame[0].flags & RESET else 0
        current.adds = 1 if frame[0].flags & ADD else 0
        current.next_step = steps if frame[0].steps == SAME_STEPS else frame[0].steps
    current.watch = slot + GENERATION


def _check(
    header: np.uint64, slot: np.uint64, generation: np.uint64, sequence: np.uint64, part: np.uint64
) -> int:
    """Do what check_frame() does, as a C function for the manager. part: address."""
    return check_frame(header, slot, generation, sequence, part_at(part))


SIGNATURE = types.int64(types.uint64, types.uint64, types.uint64, types.uint64, types.uint64)


def source(name: str) -> tuple[Any, Callable[..., int]]:
    """Return the source of the unit."""
    return SIGNATURE, _check
