"""Drives the job's synchronization model: reports pushes to it, publishes grants and supersteps.

The manager of the active server calls this module. The model exists in this process only. The next
server makes an equal model from the roster (`member`, `base`) and from the control segment, where
the watchdog has written the model's text under a number. When control asks for another number, the
driver changes the model at a barrier (change.py). When a learner asks for it, the driver pauses all
others (stand.py).
"""

from __future__ import annotations

import time

import numpy as np

from gadei_ps import _native, sync
from gadei_ps.job import modes, numbers
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, Reason
from gadei_ps.memory.segment import Segment
from gadei_ps.server.change import Change, hold
from gadei_ps.server.member import Member, Next
from gadei_ps.server.new_numbers import NewNumbers, counts_agree
from gadei_ps.server.rings import Mapped
from gadei_ps.server.stand import Stand, Stands
from gadei_ps.server.start import Start
from gadei_ps.server.supersteps import Supersteps
from gadei_ps.server.team import Team
from gadei_ps.sync import NotGranted


class Driver(Team):
    """The driver of one active server."""

    def __init__(self, control: Segment, state: Segment, part: np.ndarray, start: Start) -> None:
        """part: PART of any shard; it has the sizes that frames must have."""
        super().__init__(control, state)
        self.number = modes.done(control)
        self.sync = modes.model(control, self.number)
        self._part = part
        self._supersteps = Supersteps(control, self._state, self._shards)
        self._resumed = False
        self._offset = 0  # clocks in the roster, which outlive servers, minus clocks of the model
        self._change: Change | None = None
        self._stands = Stands(control, part)
        self._stand: Stand | None = None
        self._loaded = self.number
        self._numbers = NewNumbers(control, self._state, self._shards)
        self._start = start
        self._starts = False  # before the first superstep

    def follow(self) -> None:
        """Make the model that the active server uses, while another server is active."""
        if modes.done(self._segment) != self.number:
            self.number = modes.done(self._segment)
            self.sync = modes.model(self._segment, self.number)

    def run(self, serving: bool, loaded: int) -> None:
        """One pass over all members. serving: True if all shards serve.

        loaded: number of the model whose code is loaded: the wanted one, or the one before.
        """
        self._loaded = loaded
        if not self._resumed and self._stand is None:
            self._stand = self._stands.left(self.members)
        if self._stand is not None and self._stand.begun:
            self._assign(self._stand)
            return
        if not self._resumed:
            if modes.wanted(self._segment) != loaded:
                return
            self.follow()  # the previous server may have changed the model just before it died
        if self._numbers.are_due and not (self._at_barrier or self._settle_numbers(serving)):
            return
        if not self._resumed:
            self._resumed = self._take_over()
            if not self._resumed:
                return
        elif not self._frozen and self._is_to_change():
            self._change = Change(self._segment, loaded, self._shards)
        elif not self._frozen:
            self._stand = self._stands.asked(self.members)
        if self.sync.uses_pushes and not self._at_barrier:
            self._report_pushes()
            if self._starts:
                self._look_at_start()
            self._supersteps.carry_out(self.members)
        if self._stand is not None:
            self._come_to_a_stand(self._stand, serving)
        if self._change is not None:
            self._come_to_a_change(self._change, serving)
        if not self._frozen:
            self._publish_grants()

    def take_in(self, one: Mapped) -> None:
        """Begin to serve a new learner. Before the shards know of its ring: then all is theirs."""
        # Shards believe `applied` only where it names the ring that they know;
        # and it comes last, because the next server must not do the same again.
        served = self._word(one.row, "served")
        _native.store(served, 0)
        for shard in range(layout.MAX_SHARDS):
            _native.store(self._applied_at + 8 * (layout.MAX_LEARNERS * shard + one.row), 0)
        self._roster[one.row]["member"] = 0
        self._roster[one.row]["obsolete"] = 0
        self._roster[one.row]["stand"] = 0
        self._state["runs"]["sequence"][one.row] = 0  # of the learner before
        free = not (self.sync.uses_pushes or self._frozen or self._roster["stand"].any())
        self.publish_grant(one.row, layout.UNBOUNDED if free else 0)
        _native.store(served, one.generation)  # SYNC POINT: served

    # -- another model, and stands --------------------------------------------------------------

    def _is_to_change(self) -> bool:
        return self._loaded != self.number

    @property
    def _frozen(self) -> bool:
        """Whether no other iterations are granted."""
        return self._change is not None or self._stand is not None

    @property
    def _at_barrier(self) -> bool:
        if self._stand is not None and self._stand.at_barrier:
            return True
        return self._change is not None and self._change.at_barrier

    def _come_to_a_change(self, change: Change, serving: bool) -> None:
        """Change to the other model at the barrier, as soon as the shards hold."""
        if not change.at_barrier:
            change.at_barrier = self._all_wait(change.freeze) and self._supersteps_over
        held = change.at_barrier and serving and change.shards_hold()
        if held and counts_agree(self._segment, self._state, self._shards):
            self._switch(change)

    def _switch(self, change: Change) -> None:
        self._supersteps.clear()
        self._offset = 0
        self.sync, self.number = change.model, change.number
        for member in self.members.values():
            member.reported = self._applied(member)
            member.joined = False
            member.granted = member.reported if self.sync.uses_pushes else layout.UNBOUNDED
            self._roster[member.row]["member"] = False
            self.publish_obsolete(member, 0)
            self.publish_grant(member.row, member.granted)
        change.finish()
        self._change = None
        _native.bell(self._segment.word(CONTROL, "manager_bell"))

    def _come_to_a_stand(self, stand: Stand, serving: bool) -> None:
        """Pause all other learners."""
        if self._stands.is_over(stand, self.members):
            self._end_stand(stand)
            return
        asks = stand.member
        if not stand.at_barrier:
            self._control["report"] = True  # each push may be the last one that is awaited
            waits = self._all_wait(stand.freeze, asks) and self._is_applied(asks)
            if not (waits and self._supersteps_over):
                return
            self._stands.hold(stand)
        changes = self.number + numbers.done(self._segment)
        if not (serving and hold(self._segment, changes, self._shards)):
            return
        if not counts_agree(self._segment, self._state, self._shards):
            return
        if self._is_applied(asks):
            asks.reported = self._applied(asks)
            self._stands.begin(stand)
        else:  # it has pushed once more
            stand.at_barrier = False
            modes.enforce(self._segment, self.number, self.sync)

    def _assign(self, stand: Stand) -> None:
        """Assign while all others pause. At a failover, before anything else is done."""
        member, over = stand.member, self._stands.is_over(stand, self.members)
        if self._supersteps_over:  # once it is over, too: what comes later than other gradients
            member.reported = self._applied(member)  # would take them out of the weights
            self._report_assignments(member)
        self._supersteps.carry_out(self.members)
        if over and self._supersteps_over:
            self._end_stand(stand)

    def _end_stand(self, stand: Stand) -> None:
        """End the pause of all learners."""
        self._stands.end(stand)
        self._stand = None
        _native.bell(self._segment.word(CONTROL, "manager_bell"))
        if not self._resumed:
            return  # the take-over does the rest
        if self.sync.on_arrival:  # the model is not notified of the assignments
            stand.member.reported = self._applied(stand.member)
            if stand.member.joined:
                self._note_clock(stand.member)
        for member in self.members.values():
            before = stand.freeze.before(member.row, member.generation)
            if not self.sync.uses_pushes:
                self._roster[member.row]["member"] = False
            elif before is not None and not member.joined:
                self.publish_grant(member.row, before)
            member.granted = -1
        modes.enforce(self._segment, self.number, self.sync)

    def _settle_numbers(self, serving: bool) -> bool:
        open_ = not self._supersteps.done()
        return self._numbers.settle(self.number, self.sync, serving=serving, superstep=open_)

    def sees_nonsense(self, member: Member) -> bool:
        """Return whether a ring's head is impossible, if the shards do not look at it."""
        stands = self._stand is not None and self._stand.begun and self._stand.member is member
        if self.sync.on_arrival and not stands:
            return False
        before = member.mapped.head
        applied = self._applied(member)  # between the two looks: the shards move on meanwhile
        return before > applied + self._slots or member.mapped.head < applied

    def holds(self, member: Member) -> bool:
        """Return whether the model waits to decide on a gradient of this learner."""
        return not self.sync.on_arrival and self._applied(member) < member.reported

    def done_with(self, member: Member) -> bool:
        """True if the model no longer refers to this learner, which is gone."""
        if member.joined or (self._stand is not None and self._stand.member is member):
            return False
        if not self.sync.uses_pushes:
            return True
        # Until its reported frames are consumed, a commit may name it.
        return self._resumed and (self.sync.on_arrival or self._applied(member) >= member.reported)

    # -- take-over ------------------------------------------------------------------------------

    def _take_over(self) -> bool:
        """The first pass. False while shards still finish what the previous server published.

        A change of the model that was under way is made at once, without waiting for learners.
        """
        if not self._supersteps.done():
            return False
        if self._is_to_change():
            self._change = Change(self._segment, self._loaded, self._shards)
            self._change.at_barrier = True
            return True
        modes.enforce(self._segment, self.number, self.sync)
        if self.sync.uses_pushes:
            self._starts = self._start.learners > 1 and modes.awaits_start(self._segment)
            if self._starts:
                self.sync.await_others()
            self._resume()
        else:  # the server before may have frozen learners
            for member in self.members.values():
                self._roster[member.row]["member"] = False
        return True

    def _resume(self) -> None:
        """Make the model equal to the previous server's: same members, same distances of clocks.

        If the model holds gradients, the next passes report again what is unconsumed in the rings.
        """
        now = time.monotonic()
        found = [one for one in self.members.values() if int(self._roster[one.row]["member"])]
        clocks = {}
        for member in self.members.values():
            member.reported = self._applied(member)
        for member in found:
            clock = (int(self._roster[member.row]["base"]) + member.reported) % 2**64
            clocks[member.row] = clock - 2**64 if clock >= 2**63 else clock
        for member in found + self._waiting():
            self.sync.join(member.row, now)
            member.joined = True
        first = min(clocks.values(), default=0)
        if found:
            self._offset = first - self.sync.clock(found[0].row)
        if self.sync.on_arrival:
            for member in found:
                for _ in range(clocks[member.row] - first):
                    try:
                        self.sync.push(member.row, now)
                    except NotGranted:  # it had published more than it was granted
                        break
        # Writes what the roster already has, except for members that had published without a grant.
        # So if this server dies halfway, the next one finds the same clocks.
        for member in found:
            self._note_clock(member)

    def _look_at_start(self) -> None:
        """Has the first superstep end once all learners have come, or are awaited no longer."""
        there = [one for one in self.members.values() if not one.leaving]
        wants = [one.mapped.wants for one in there if not one.joined]
        if self._start.is_over(self._control, sum(one.joined for one in there), wants):
            self._starts = False
            self._supersteps.add(self.sync.start())

    def _waiting(self) -> list[Member]:
        """Former members with a gradient that waits for its superstep."""
        if self.sync.on_arrival:
            return []
        return [
            one
            for one in self.members.values()
            if not int(self._roster[one.row]["member"]) and self._published(one) > one.reported
        ]

    def _note_clock(self, member: Member) -> None:
        """Write the learner's clock and membership into the roster, for the next server."""
        entry = self._roster[member.row]
        if member.joined:
            clock = self.sync.clock(member.row) + self._offset
            entry["base"] = (clock - member.reported) % 2**64
        entry["member"] = member.joined

    # -- pushes ---------------------------------------------------------------------------------

    def _published(self, member: Member) -> int:
        """Number of frames to report: published ones for a collecting model, else applied ones."""
        applied = self._applied(member)
        if self.sync.on_arrival:
            if applied > max(member.granted, member.reported) + self._slots:
                member.reported = applied  # it overwrote its head; these were not iterations
            return applied
        head = member.mapped.head
        # If the learner overwrote its head, nothing more is known.
        return head if 0 <= head - applied <= self._slots else member.reported

    def _report_pushes(self) -> None:
        now = time.monotonic()
        for member in list(self.members.values()):
            newcomer = not member.joined and not member.leaving and not self._frozen
            if newcomer and self._has_work(member):
                self._join(member, now)
            held = self._report_member(member, now)
            if held and member.leaving and self.sync.on_arrival:
                # Applied without a grant. The clock of a learner that is gone no longer matters.
                member.reported = self._published(member)
            behind = member.reported < self._published(member)
            if member.joined and not behind and (member.leaving or not self._has_work(member)):
                self._supersteps.add(self.sync.leave(member.row, now))
                member.joined = False
                self._note_clock(member)

    def _join(self, member: Member, now: float) -> None:
        self.sync.join(member.row, now)
        member.joined = True
        self._note_clock(member)

    def _report_member(self, member: Member, now: float) -> bool:
        """Report new pushes to the model. True if some of them have no grant yet."""
        published = self._published(member)
        while member.reported < published:
            found = None if self.sync.on_arrival else member.next(self._slots)
            if found and found.writes:
                if self._applied(member) < member.reported:
                    return False  # once what it has pushed before is in the weights
                self._commit_assignment(found)
                continue
            if not member.joined and self._frozen:
                return True  # for the next model, or after the stand
            if not member.joined:
                # The learner left the model, but has frames: it published without a grant, or did
                # not name its last batch. It joins again, so that they count as iterations.
                self._join(member, now)
            if self.sync.clock(member.row) >= self.sync.grant(member.row):
                return True
            refused = False
            started = None
            if found:
                reason = found.check(self._part)
                refused = reason != Reason.OK
                started = found.started
                if refused:
                    self._supersteps.refuse(member.row, member.reported, reason)
            commits = self.sync.push(member.row, now, started=started, refused=refused)
            member.reported += 1
            self._supersteps.add(commits)
        return False

    def _report_assignments(self, member: Member) -> None:
        """Has each assignment of this learner made, in a superstep of its own."""
        while member.reported < member.mapped.head and not self.sees_nonsense(member):
            found = member.next(self._slots)
            if not found.writes or self._applied(member) < member.reported:
                return
            self._commit_assignment(found)

    def _commit_assignment(self, found: Next) -> None:
        """An assignment is a superstep of its own, between two of the model's."""
        member, row, reason = found.member, found.member.row, found.check(self._part)
        if reason == Reason.OK:
            self._supersteps.add([sync.Commit((row,))])
        else:
            self._supersteps.refuse(row, member.reported, reason)
            self._supersteps.add([sync.Commit((), (row,))])
        member.reported += 1
        if member.joined:
            self._note_clock(member)

    # -- grants ---------------------------------------------------------------------------------

    @property
    def _supersteps_over(self) -> bool:
        return not self._supersteps.due and self._supersteps.done()

    def _publish_grants(self) -> None:
        """Publish grants in the learner's own clock: iterations begun since it attached."""
        if not self.sync.uses_pushes:
            for member in self.members.values():
                if member.granted != layout.UNBOUNDED:
                    member.granted = layout.UNBOUNDED
                    self.publish_grant(member.row, layout.UNBOUNDED)
            return
        if not self._supersteps_over:
            return  # a grant promises that all gradients on which it depends are applied
        members = [one for one in self.members.values() if one.joined]
        # First, so that a learner that sees others continue also sees that it may abandon its own.
        for member in members:
            behind = self.sync.wanted(member.row) - self.sync.clock(member.row)
            if behind > 0:
                self.publish_obsolete(member, member.reported + behind)
        for member in members:
            ahead = self.sync.grant(member.row) - self.sync.clock(member.row)
            grant = min(member.reported + ahead, layout.UNBOUNDED)
            if grant != member.granted:
                member.granted = grant
                self.publish_grant(member.row, grant)
