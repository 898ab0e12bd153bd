"""The learners of a job in the manager of the active server, and its words to them."""

from __future__ import annotations

import numpy as np

from gadei_ps import _native
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, Work
from gadei_ps.memory.segment import Segment
from gadei_ps.server.change import Freeze
from gadei_ps.server.member import Member
from gadei_ps.sync import SyncModel


class Team:
    """All learners whose rings are served, and their rows of the roster."""

    sync: SyncModel

    def __init__(self, control: Segment, state: Segment) -> None:
        self.members: dict[int, Member] = {}
        self._segment = control
        self._control = control.view(CONTROL)
        self._roster = self._control["roster"]
        self._state: np.void = state.view(layout.STATE)
        self._applied_at = state.word(layout.STATE, "applied")
        self._slots = int(self._control["slots"])
        self._shards = int(self._control["shards"])

    def _applied(self, member: Member) -> int:
        """Number of frames that every shard has consumed."""
        return int(self._state["applied"][: self._shards, member.row].min())

    def _is_applied(self, member: Member) -> bool:
        """Return whether every shard has consumed all that the learner has published."""
        return self._applied(member) == member.mapped.head

    def _has_work(self, member: Member) -> bool:
        """True if barriers must wait for this learner.

        They do not wait for a learner that only reads, nor for one that takes work from the server
        while it has no batch, nor, except under BSP, for one that has paused.
        """
        wants = member.mapped.wants
        if wants & layout.WANTS_PAUSE and not self.sync.awaits_paused:
            return False
        if wants & layout.WANTS_WORK and int(self._control["work"]) != Work.NONE:
            return bool((self._roster[member.row]["outstanding"] != layout.NO_BATCH).any())
        return bool(wants & layout.WANTS_TURN)

    def _all_wait(self, freeze: Freeze, asks: Member | None = None) -> bool:
        """Let each learner finish its iteration, and grant no other; return whether all have.

        asks: a learner for which the others pause; it is granted what it was.
        """
        all_wait = True
        for member in self.members.values():
            if member.leaving or member is asks:
                continue
            head = member.mapped.head
            works = self._has_work(member)
            if asks is not None and self.sync.uses_pushes:
                works = works and member.joined  # joining learners are not in the model yet
            granted = int(self._roster[member.row]["grant"])
            most = head + 1 if works or asks is None else head
            last = freeze.last(member.row, member.generation, granted, most)
            if last != granted:
                self.publish_grant(member.row, last)
                if asks is not None:  # it may be publishing: another look
                    all_wait = False
                    _native.bell(self._segment.word(CONTROL, "manager_bell"))
            if works:
                self._roster[member.row]["member"] = True  # it holds others up if it hangs
            if works or asks is not None:
                # What a collecting model still holds stays where it is.
                done = self._applied(member) if self.sync.on_arrival else head
                all_wait = all_wait and last <= head <= done
        return all_wait

    def is_settled(self, member: Member) -> bool:
        """Return whether all shards are done with a broken ring: equal counts, no current frame.

        Even after it is drained: a shard of a dying server may have begun a frame after that.
        """
        if not member.mapped.told:
            return False
        records = self._state["record"][: self._shards]
        # First: the current frame counts at last, and nothing is begun any more.
        if ((records["cursor"] != layout.IDLE) & (records["ring"] == member.row)).any():
            return False
        counts = self._state["applied"][: self._shards, member.row]
        return bool((counts == counts[0]).all())

    def note_broken(self, member: Member) -> None:
        """The next server does not read its ring either. From now on shard 0 may let it go."""
        _native.store(self._word(member.row, "broken"), member.generation)  # SYNC POINT: broken
        _native.bell(self._segment.word(CONTROL, "shard_bell"))

    def publish_obsolete(self, member: Member, below: int) -> None:
        """Notify the learner that gradients of its iterations below `below` will be dropped."""
        _native.store(self._word(member.row, "obsolete"), below)

    def publish_grant(self, row: int, grant: int) -> None:
        """Allow the learner in this row to begin iterations below `grant`."""
        _native.store(self._word(row, "grant"), grant)  # SYNC POINT: grant
        _native.bell(self._word(row, "grant_seq"))

    def _word(self, row: int, field: str) -> int:
        """Address of a word of the roster."""
        at = self._segment.word(CONTROL, "roster") + row * ENTRY.itemsize
        return at + layout.offset(ENTRY, field)
