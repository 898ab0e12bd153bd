"""Applies the frames that a shard has in hand, whatever their kind.

A frame is dense (dense.py) or of rows (rows.py); a mean may have frames of both kinds. This is the
only file that chooses between them.
"""

from __future__ import annotations

import functools

from numba import types

from gadei_ps.kernels.compiled import address_of, inner
from gadei_ps.server.chunks import Walk, prepare
from gadei_ps.server.constants import ROWS
from gadei_ps.server.context import Shard, shard_of
from gadei_ps.server.dense import apply_dense
from gadei_ps.server.record import lock, unlock
from gadei_ps.server.rows import apply_rows
from gadei_ps.server.structs import PART
from gadei_ps.server.symbols import call, structs

_part_at = structs(PART)


def _apply(part: int, members: int, first: int, start: int) -> None:
    """Does what apply_frames() does, as a C function. part: address."""
    s = shard_of(_part_at(part))
    walk = Walk(members, first, start)
    has_rows = False
    for m in range(members):
        has_rows = has_rows or s.hands[m].kind == ROWS
    prepare(s)
    lock(s)
    if has_rows:
        apply_rows(s, walk)
    else:
        apply_dense(s, walk)
    unlock(s)


@functools.cache
def applier() -> int:
    """Address of _apply, for PART; it is compiled if need be."""
    return address_of(types.void(types.uint64, types.int64, types.int64, types.int64), _apply)


@inner
def apply_frames(s: Shard, walk: Walk) -> None:
    """Applies the frames in hand. The sequence lock of the shard is odd meanwhile."""
    call(s.part[0].apply, s.here, walk.members, walk.first, walk.start)
