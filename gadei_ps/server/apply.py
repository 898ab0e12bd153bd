"""Applies the frames that a shard has in hand, whatever their kind.

A frame is dense (dense.py) or of rows (rows.py); a mean may have frames of both kinds. This is the
only file that chooses between them.
"""

from __future__ import annotations

import functools

import numba
from numba import types

from gadei_ps.kernels.compiled import compiled
from gadei_ps.server.chunks import Walk, move_of
from gadei_ps.server.constants import ROWS
from gadei_ps.server.context import Shard, shard_of
from gadei_ps.server.dense import apply_dense
from gadei_ps.server.record import lock, unlock
from gadei_ps.server.rows import apply_rows
from gadei_ps.server.structs import PART
from gadei_ps.server.symbols import call_apply, structs

_part_at = structs(PART)


def _apply(part: int, members: int, first: int, reopen: int) -> None:
    """Does what apply_frames() does, as a C function. part: address."""
    s = shard_of(_part_at(part))
    walk = Walk(members, first, reopen != 0)
    has_rows = False
    for m in range(members):
        has_rows = has_rows or s.hands[m].kind == ROWS
    move = move_of(s)
    lock(s)
    if has_rows:
        apply_rows(s, move, walk)
    else:
        apply_dense(s, move, walk)
    unlock(s)


@functools.cache
def applier() -> int:
    """Returns the address of _apply, for PART; compiles it if need be.

    Numba compiles a function's callees again as a part of it, and so on for each of its callers.
    Behind an address, the loops that apply are compiled once.
    """
    signature = types.void(types.uint64, types.int64, types.int64, types.int64)
    made = numba.cfunc(signature, cache=True, error_model="numpy")(_apply)
    return int(made.address)


@compiled
def apply_frames(s: Shard, walk: Walk) -> None:
    """Applies the frames in hand. The sequence lock of the shard is odd meanwhile."""
    call_apply(s.part[0].apply, s.here, walk.members, walk.first, walk.reopen)
