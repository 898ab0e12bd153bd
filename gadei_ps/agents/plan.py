"""What one exchange is to do, in the form that `native/mesh_exchange.c` takes.

`Plan` has the fields of `struct mesh_plan` in native/mesh.h, in the same order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gadei_ps import _mesh

MOST_MEMBERS = _mesh.MESH_MEMBERS
PIECE_VALUES = 65536
"""Values of a piece: 256 KB. A piece stays in a core's cache from its arrival to its sum."""
SLOTS = 2
"""Pieces of one member that may wait until the others' have come."""

Floats = NDArray[np.float32]
Parts = Sequence[slice]
"""Each member's part of the values, in order, without gaps."""

_U64, _U32, _I32 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32


class Plan(ctypes.Structure):
    """One exchange. Addresses are of memory that the caller keeps alive."""

    _fields_ = (
        ("generation", _U64),
        ("round", _U64),
        ("samples", _U64),
        ("part_at", _U64 * (MOST_MEMBERS + 1)),
        ("input", _U64),
        ("out", _U64),
        ("scratch", _U64),
        ("start_ns", _U64),
        ("piece_ns", _U64),
        ("give", _U64 * MOST_MEMBERS),
        ("want", _U64 * MOST_MEMBERS),
        ("held", _U64),
        ("alive_ns", _U64 * MOST_MEMBERS),
        ("moved", _U64),
        ("sent", _U64),
        ("received", _U64),
        ("calls", _U64),
        ("fd", _I32 * MOST_MEMBERS),
        ("wake", _I32),
        ("members", _U32),
        ("me", _U32),
        ("parts", _U32),
        ("reduce", _U32),
        ("piece", _U32),
        ("slots", _U32),
        ("culprit", _I32),
        ("error", _I32),
    )


assert ctypes.sizeof(Plan) == _mesh.PLAN_BYTES


class Scratch:
    """Room for pieces that wait to be summed; grows to what the largest group needs, once."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.float32)

    def address(self, values: int) -> int:
        """The address of room for this many values, valid until the next call."""
        if self._room.size < values:
            self._room = np.empty(values, np.float32)
        return self._room.ctypes.data


def make(
    *,
    generation: int,
    round_number: int,
    me: int,
    members: int,
    parts: Parts,
    fds: Mapping[int, int],
    wake: int,
    out: Floats,
    piece_s: float,
    start_s: float | None,
) -> Plan:
    """A plan that moves nothing yet. me, and the keys of fds: places in the group's order."""
    plan = Plan()
    plan.generation, plan.round = generation, round_number
    plan.members, plan.me, plan.parts, plan.wake = members, me, len(parts), wake
    plan.piece, plan.slots = PIECE_VALUES, SLOTS
    for place, part in enumerate(parts):
        plan.part_at[place], plan.part_at[place + 1] = part.start, part.stop
    for place in range(members):
        plan.fd[place] = fds.get(place, -1)
    plan.out = out.ctypes.data
    plan.piece_ns = _ns(piece_s)
    plan.start_ns = 0 if start_s is None else _ns(start_s)
    return plan


def _ns(seconds: float) -> int:
    """At least 1, for 0 is without end; at most some thirty years, so that no sum overflows."""
    return max(1, round(min(seconds, 1e9) * 1e9))


def to_aggregate(plan: Plan, values: Floats, samples: int, scratch: Scratch) -> None:
    """Each member sums its part and gives it to all others. Parts and members are as many."""
    plan.reduce = 1
    plan.samples = samples
    plan.input = values.ctypes.data
    plan.scratch = scratch.address(plan.members * plan.slots * plan.piece)
    for place in range(plan.members):
        if place != plan.me:
            plan.give[place] = 1 << plan.me
            plan.want[place] = 1 << place


def to_hand_over(plan: Plan, held: Sequence[int]) -> bool:
    """Each part goes from the first member that holds it to those that do not.

    held: for each member the parts that it holds whole, as bits. Returns False if a part is held by
    nobody: then nothing can be handed over.
    """
    plan.held = held[plan.me]
    for part in range(plan.parts):
        if plan.part_at[part] == plan.part_at[part + 1]:
            continue
        holders = [place for place, parts in enumerate(held) if parts >> part & 1]
        if not holders:
            return False
        for place in range(plan.members):
            if place not in holders and plan.me == holders[0]:
                plan.give[place] |= 1 << part
            if place == plan.me and place not in holders:
                plan.want[holders[0]] |= 1 << part
    return True
