"""Global pause: all other learners wait while one of them copies the weights and assigns others.

    freeze     every other learner finishes its current iteration; none is granted another one
    barrier    all that was granted is pushed, applied or dropped
    hold       the shards let frames lie, and all have consumed the same
    stand      `stand` of the learner's row := what it asks by. Only its assignments are made now,
               each as a superstep of its own
    end        it asks no more, or is gone: what it has assigned is made; `stand` := 0, then grants
               and mode

What a learner publishes all the same lies in its ring until the end. If the server dies during the
pause, the next one finds it in the roster, and continues with it before it does anything else; the
shards hold meanwhile, by `mode`. If it dies before that, the next one starts the pause again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gadei_ps import _native
from gadei_ps.machine import log
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, Stop
from gadei_ps.memory.segment import Segment
from gadei_ps.server.change import Freeze
from gadei_ps.server.member import Member
from gadei_ps.server.structs import BOARD

Members = Mapping[int, Member]


@dataclass(eq=False)
class Stand:
    """One of them. asked: the word by which its learner asks for it."""

    member: Member
    asked: int
    at_barrier: bool = False
    """Whether the barrier is reached: the shards hold from here on."""
    begun: bool = False
    """Whether all others pause, and the learner was notified."""
    freeze: Freeze = field(default_factory=Freeze)


class Stands:
    """Requests for global pauses, in the manager of the active server."""

    def __init__(self, control: Segment, part: np.ndarray) -> None:
        """part: PART of any shard."""
        self._segment = control
        self._control = control.view(CONTROL)
        self._roster = self._control["roster"]
        self._wishes_at = int(part[0]["board"]) + layout.offset(BOARD, "wishes")
        self._wishes = -1
        self._last = -1  # the row that had the last stand

    def left(self, members: Members) -> Stand | None:
        """Return at a failover the pause that the server before has begun."""
        for row in np.flatnonzero(self._roster["stand"]).tolist():
            member = members.get(row)
            if member is not None:
                return Stand(member, int(self._roster[row]["stand"]), at_barrier=True, begun=True)
            self._tell(row, 0)
        return None

    def asked(self, members: Members) -> Stand | None:
        """The next stand that a learner asks for. They take turns."""
        wishes = _native.load(self._wishes_at)
        if wishes == self._wishes or int(self._control["stop"]) != Stop.GO:
            return None
        asking = {
            row: (member, asked)
            for row, member in members.items()
            if not member.leaving and (asked := member.mapped.stand)
        }
        if not asking:
            self._wishes = wishes
            return None
        row = min(asking, key=lambda row: (row - self._last - 1) % layout.MAX_LEARNERS)
        return Stand(*asking[row])

    def is_over(self, stand: Stand, members: Members) -> bool:
        """Return whether the others may continue."""
        member = stand.member
        there = members.get(member.row) is member and not member.leaving
        return not there or member.mapped.stand != stand.asked

    def hold(self, stand: Stand) -> None:
        """The barrier is reached: the shards are to be held, for this stand and no other one."""
        stand.at_barrier = True
        self._control["stands"] += 1

    def begin(self, stand: Stand) -> None:
        """Begin the pause of all others."""
        stand.begun = True
        self._tell(stand.member.row, stand.asked)
        log.get().debug("all others pause", learner=stand.member.row)

    def end(self, stand: Stand) -> None:
        """End the pause, before the others continue."""
        self._wishes = -1  # others may have asked meanwhile
        self._last = stand.member.row
        if stand.begun:
            self._tell(stand.member.row, 0)

    def _tell(self, row: int, asked: int) -> None:
        at = self._segment.word(CONTROL, "roster") + row * ENTRY.itemsize
        _native.store(at + layout.offset(ENTRY, "stand"), asked)  # SYNC POINT: stand
        _native.bell(at + layout.offset(ENTRY, "grant_seq"))
