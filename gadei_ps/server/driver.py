"""Drives the job's synchronization model: reports pushes to it, publishes grants and supersteps.

The manager of the active server calls this module. The model exists in this process only. The next
server makes an equal model from the roster (`member`, `base`) and from the control segment, where
the watchdog has written the model's text under a number. When control asks for another number, the
driver changes the model at a barrier (change.py).
"""

from __future__ import annotations

import collections
import time

import numpy as np

from gadei_ps import _native, sync
from gadei_ps.job import modes
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, Action, Reason, Work
from gadei_ps.memory.segment import Segment
from gadei_ps.server.change import Change
from gadei_ps.server.member import Member, Next
from gadei_ps.server.new_numbers import NewNumbers, counts_agree
from gadei_ps.server.rings import Mapped
from gadei_ps.server.start import Start
from gadei_ps.sync import NotGranted


class Driver:
    """The driver of one active server."""

    def __init__(self, control: Segment, state: Segment, part: np.ndarray, start: Start) -> None:
        """part: PART of any shard; it has the sizes that frames must have."""
        self.number = modes.done(control)
        self.sync = modes.model(control, self.number)
        self.members: dict[int, Member] = {}
        self._segment = control
        self._control = control.view(CONTROL)
        self._roster = self._control["roster"]
        self._state = state.view(layout.STATE)
        self._applied_at = state.word(layout.STATE, "applied")
        self._part = part
        self._slots = int(self._control["slots"])
        self._shards = int(self._control["shards"])
        self._commits: collections.deque[sync.Commit] = collections.deque()
        self._refusals: dict[tuple[int, int], int] = {}  # (row, sequence) -> reason
        self._resumed = False
        self._offset = 0  # clocks in the roster, which outlive servers, minus clocks of the model
        self._change: Change | None = None
        self._loaded = self.number
        self._numbers = NewNumbers(control, self._state, self._shards)
        self._start = start
        self._starts = False  # before the first superstep

    def follow(self) -> None:
        """While another server is active: makes the model that the active server uses."""
        if modes.done(self._segment) != self.number:
            self.number = modes.done(self._segment)
            self.sync = modes.model(self._segment, self.number)

    def run(self, serving: bool, loaded: int) -> None:
        """One pass over all members. serving: True if all shards serve.

        loaded: number of the model whose code is loaded: the wanted one, or the one before.
        """
        self._loaded = loaded
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
        elif self._change is None and self._is_to_change():
            self._change = Change(self._segment, loaded, self._shards)
        if self.sync.uses_pushes and not self._at_barrier:
            self._report_pushes()
            if self._starts:
                self._look_at_start()
            self._carry_out()
        if self._change is None:
            if self.sync.uses_pushes:
                self._publish_grants()
            return
        if not self._at_barrier:
            self._come_to_a_barrier(self._change)
        if self._at_barrier and serving:
            self._switch(self._change)

    def take_in(self, one: Mapped) -> None:
        """Begins to serve a new learner. Before the shards know of its ring: then all is theirs."""
        # Shards believe `applied` only where it names the ring that they know;
        # and it comes last, because the next server must not do the same again.
        at = self._segment.word(CONTROL, "roster") + one.row * ENTRY.itemsize
        served = at + layout.offset(ENTRY, "served")
        _native.store(served, 0)
        for shard in range(layout.MAX_SHARDS):
            _native.store(self._applied_at + 8 * (layout.MAX_LEARNERS * shard + one.row), 0)
        self._roster[one.row]["member"] = 0
        self._roster[one.row]["obsolete"] = 0
        self._state["runs"]["sequence"][one.row] = 0  # of the learner before
        free = not (self.sync.uses_pushes or self.changing)
        self.publish_grant(one.row, layout.UNBOUNDED if free else 0)
        _native.store(served, one.generation)  # SYNC POINT: served

    # -- another model --------------------------------------------------------------------------

    def _is_to_change(self) -> bool:
        return self._loaded != self.number

    @property
    def _at_barrier(self) -> bool:
        return self._change is not None and self._change.at_barrier

    def _come_to_a_barrier(self, change: Change) -> None:
        """Lets each learner finish its current iteration, and grants no other."""
        all_wait = True
        for member in self.members.values():
            if member.leaving:
                continue
            head = member.mapped.head
            granted = int(self._roster[member.row]["grant"])
            last = change.freeze(member.row, member.generation, granted, head)
            if last != granted:
                self.publish_grant(member.row, last)
            if self._has_work(member):
                self._roster[member.row]["member"] = True  # it holds others up if it hangs
                # The next model gets what a collecting model still holds.
                done = self._applied(member) if self.sync.on_arrival else head
                all_wait = all_wait and head >= last <= done
        if all_wait and not self._commits and self._supersteps_done():
            change.at_barrier = True

    def _switch(self, change: Change) -> None:
        """At the barrier: changes to the other model as soon as the shards stand still."""
        if not (change.shards_hold() and counts_agree(self._segment, self._state, self._shards)):
            return
        self._commits.clear()
        self._refusals.clear()
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

    def _settle_numbers(self, serving: bool) -> bool:
        open_ = not self._supersteps_done()
        return self._numbers.settle(self.number, self.sync, serving=serving, superstep=open_)

    @property
    def changing(self) -> bool:
        """True while a change of the model is under way."""
        return self._change is not None

    def sees_nonsense(self, member: Member) -> bool:
        """Whether a ring's head cannot be, where the shards do not look at it."""
        if self.sync.on_arrival:
            return False
        before = member.mapped.head
        applied = self._applied(member)  # between the two looks: the shards move on meanwhile
        return before > applied + self._slots or member.mapped.head < applied

    def holds(self, member: Member) -> bool:
        """Whether the model waits to decide on a gradient of this learner."""
        return not self.sync.on_arrival and self._applied(member) < member.reported

    def is_settled(self, member: Member) -> bool:
        """Whether all shards are done with a broken ring: they count the same, with none in hand.

        Also once it is drained: a shard of a dying server may have begun a frame after that.
        """
        if not member.mapped.told:
            return False
        records = self._state["record"][: self._shards]
        # First: what is in hand counts at last, and nothing is begun any more.
        if ((records["cursor"] != layout.IDLE) & (records["ring"] == member.row)).any():
            return False
        counts = self._state["applied"][: self._shards, member.row]
        return bool((counts == counts[0]).all())

    def done_with(self, member: Member) -> bool:
        """True if the model no longer refers to this learner, which is gone."""
        if member.joined:
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
        if self._is_to_change():
            if not self._supersteps_done():
                return False
            self._change = Change(self._segment, self._loaded, self._shards)
            self._change.at_barrier = True
            return True
        modes.enforce(self._segment, self.number, self.sync)
        if self.sync.uses_pushes:
            if not self._supersteps_done():
                return False
            self._starts = self._start.learners > 1 and modes.awaits_start(self._segment)
            if self._starts:
                self.sync.await_others()
            self._resume()
        return True

    def _resume(self) -> None:
        """Makes the model equal to the previous server's: same members, same distances of clocks.

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
            self._commits.extend(self.sync.start())

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
        """Writes the learner's clock and membership into the roster, for the next server."""
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
                member.reported = applied  # it overwrote its head; these were no iterations
            return applied
        head = member.mapped.head
        # If the learner overwrote its head, nothing more is known.
        return head if 0 <= head - applied <= self._slots else member.reported

    def _applied(self, member: Member) -> int:
        """Number of frames that every shard has consumed."""
        return int(self._state["applied"][: self._shards, member.row].min())

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

    def _report_pushes(self) -> None:
        now = time.monotonic()
        for member in list(self.members.values()):
            newcomer = not member.joined and not member.leaving and self._change is None
            if newcomer and self._has_work(member):
                self._join(member, now)
            held = self._report_member(member, now)
            if held and member.leaving and self.sync.on_arrival:
                # Applied without a grant. The clock of a learner that is gone no longer matters.
                member.reported = self._published(member)
            behind = member.reported < self._published(member)
            if member.joined and not behind and (member.leaving or not self._has_work(member)):
                self._commits.extend(self.sync.leave(member.row, now))
                member.joined = False
                self._note_clock(member)

    def _join(self, member: Member, now: float) -> None:
        self.sync.join(member.row, now)
        member.joined = True
        self._note_clock(member)

    def _report_member(self, member: Member, now: float) -> bool:
        """Reports new pushes to the model. True if some of them have no grant yet."""
        published = self._published(member)
        while member.reported < published:
            found = None if self.sync.on_arrival else member.next(self._slots)
            if found and found.assigns:
                if self._applied(member) < member.reported:
                    return False  # once what it has pushed before is in the weights
                self._commit_assignment(found)
                continue
            if not member.joined and self._change is not None:
                return True  # for the next model
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
                    self._refusals[member.row, member.reported] = reason
            commits = self.sync.push(member.row, now, started=started, refused=refused)
            member.reported += 1
            self._commits.extend(commits)
        return False

    def _commit_assignment(self, found: Next) -> None:
        """An assignment is a superstep of its own, between two of the model's."""
        member, row, reason = found.member, found.member.row, found.check(self._part)
        if reason == Reason.OK:
            self._commits.append(sync.Commit((row,)))
        else:
            self._refusals[row, member.reported] = reason
            self._commits.append(sync.Commit((), (row,)))
        member.reported += 1
        if member.joined:
            self._note_clock(member)

    # -- supersteps and grants --------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Publishes the next superstep if every shard is done with the previous one."""
        if not self._commits or not self._supersteps_done() or self._paused():
            return
        commit = self._commits.popleft()
        action, upto = self._control["superstep_action"], self._control["superstep_upto"]
        action[:] = Action.SKIP
        tail = {row: int(self._state["applied"][0, row]) for row in self.members}
        for row in commit.apply:
            action[row] = Action.APPLY
            upto[row] = tail[row] + 1
        for row in commit.drop:
            reason = self._refusals.pop((row, tail[row]), Reason.OK)
            good = reason in (Reason.OK, Reason.GIVEN_UP)
            action[row] = Action.DROP if good else Action.REFUSE
            self._control["superstep_reason"][row] = reason
            upto[row] = tail[row] + 1
        number = int(self._control["superstep"]) + 1
        _native.store(self._segment.word(CONTROL, "superstep"), number)  # SYNC POINT: superstep
        _native.bell(self._segment.word(CONTROL, "shard_bell"))

    def _paused(self) -> bool:
        """True while a checkpoint is taken. The next superstep waits for its end."""
        return _native.load(self._segment.word(CONTROL, "pause")) > time.monotonic_ns()

    def _supersteps_done(self) -> bool:
        done = self._state["record"]["supersteps"][: self._shards]
        finished = bool((done == self._control["superstep"]).all())
        if finished:
            self._control["supersteps_done"] = self._control["superstep"]
        return finished

    def _publish_grants(self) -> None:
        """Publishes grants in the learner's own clock: iterations begun since it attached."""
        if self._commits or not self._supersteps_done():
            return  # a grant promises that all gradients on which it depends are applied
        members = [one for one in self.members.values() if one.joined]
        # First, so that a learner that sees others continue also sees that it may give up.
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

    def note_broken(self, member: Member) -> None:
        """The next server does not read its ring either. From now on shard 0 may let it go."""
        at = self._segment.word(CONTROL, "roster") + member.row * ENTRY.itemsize
        at += layout.offset(ENTRY, "broken")
        _native.store(at, member.generation)  # SYNC POINT: broken
        _native.bell(self._segment.word(CONTROL, "shard_bell"))

    def publish_obsolete(self, member: Member, below: int) -> None:
        """Tells the learner that gradients of its iterations below `below` will be dropped."""
        at = self._segment.word(CONTROL, "roster") + member.row * ENTRY.itemsize
        at += layout.offset(ENTRY, "obsolete")
        _native.store(at, below)

    def publish_grant(self, row: int, grant: int) -> None:
        """Allows the learner in this row to begin iterations below `grant`."""
        at = self._segment.word(CONTROL, "roster") + row * ENTRY.itemsize
        _native.store(at + layout.offset(ENTRY, "grant"), grant)  # SYNC POINT: grant
        _native.bell(at + layout.offset(ENTRY, "grant_seq"))
