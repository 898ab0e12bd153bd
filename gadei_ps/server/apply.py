"""Application of a shard's current frames, whatever their kind.

A frame is dense (dense.py) or of rows (rows.py); a mean may have frames of both kinds. An
assignment has the blocks of a frame of rows, and is alone. This is the only file that chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from gadei_ps.kernels.compiled import inner
from gadei_ps.server.chunks import Walk, prepare
from gadei_ps.server.constants import APPLY, ASSIGN, MAX_LEARNERS, ONE, ROWS
from gadei_ps.server.context import GENERATION, Shard, is_there, shard_of
from gadei_ps.server.dense import apply_dense
from gadei_ps.server.record import lock, note_torn, unlock
from gadei_ps.server.rows import apply_rows
from gadei_ps.server.symbols import call


@inner
def _count_torn(s: Shard) -> int:
    """Count the current frames that are lost.

    In the mean of a superstep such a frame counts as zeros, so that the others weigh the same in
    every shard.
    """
    record = s.state[0].record[s.number]
    if record.ring < np.uint64(MAX_LEARNERS):
        here = is_there(s.hands[0].watch - GENERATION, record.generation, record.sequence)
        return 0 if here else 1
    torn = 0
    member = 0  # the current frames are in the order of their rows
    for row in range(MAX_LEARNERS):
        if s.c[0].superstep_action[row] == APPLY:
            slot = s.hands[member].watch - GENERATION
            sequence = s.c[0].superstep_upto[row] - ONE
            if not is_there(slot, s.board[0].ring[row].generation, sequence):
                torn += 1
            member += 1
    return torn


def _apply(part: int, members: int, first: int, start: int) -> None:
    """Do what apply_frames() does, as a C function. part: address."""
    s = shard_of(np.uint64(part))
    walk = Walk(members, first, start)
    has_rows = False
    for m in range(members):
        has_rows = has_rows or s.hands[m].kind == ROWS or s.hands[m].kind == ASSIGN
    prepare(s)
    lock(s)
    if has_rows:
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
