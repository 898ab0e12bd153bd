"""Driver of the job's synchronization model: reports pushes to it, publishes grants and supersteps.

The manager of the active server calls the Driver. The model exists in this process only. The next
server makes an equal model from the roster (`member`, `base`) and from the control segment, where
the watchdog has written the model's text under a number.

Three operations wait for a state that all shards share, and end with the mode of the model:

    another model         when control asks for another number. Every learner finishes its current
                          iteration; at the barrier the shards hold, and all have consumed the same;
                          then the mode of the new model, then its number
    global pause          when a learner asks for it. The same for all other learners. Then
                          `exclusive` of the learner's row is set to its request, and only its
                          assignments are made, each as a superstep of its own. It ends when the
                          learner no longer asks or is gone: its assignments are made, then
                          `exclusive` is cleared, then grants are published
    hyperparameters       when control asks for others. The shards hold (or, for a model that
                          collects, no superstep is open), and all have consumed the same; then
                          `hyper` and its number

To hold means that shards leave frames in the rings. If the server dies in between, the number of
the model or of the hyperparameters has not changed, and the next server begins again: with another
model without a barrier, because the old model's state is gone. A global pause that has begun is in
the roster; the next server continues it before it does anything else.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gadei_ps import _native
from gadei_ps.job import hyperparameters, sync_change
from gadei_ps.machine import log
from gadei_ps.memory import finished, layout, owned
from gadei_ps.memory.layout import CONTROL, ENTRY, Action, Mode, Reason, Stop, Work
from gadei_ps.memory.segment import Segment
from gadei_ps.server import kinds, units
from gadei_ps.server.rings import Mapped
from gadei_ps.server.structs import BOARD
from gadei_ps.sync import Commit, NotGranted, SyncModel

EPOCHS = 2  # at most so many are open at once


# -- learners -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Member:
    """A learner whose ring is served, as the driver knows it."""

    mapped: Mapped
    reported: int = 0  # frames that were reported to the sync model, and assignments
    joined: bool = False
    leaving: bool = False
    granted: int = -1

    @property
    def row(self) -> int:
        return self.mapped.row

    @property
    def generation(self) -> int:
        return self.mapped.generation

    def next(self, slots: int) -> Next:
        """Return the next frame to report. slots: of the ring."""
        slot = self.mapped.slot(self.reported, slots)
        return Next(self, slot, self.mapped.header(slot))


class Next(NamedTuple):
    """A frame whose header was read once: its learner may write over it."""

    member: Member
    slot: int
    """Offset of the slot from the ring's begin (bytes)."""
    header: np.ndarray
    """FRAME, shape (1,)."""

    @property
    def writes(self) -> bool:
        """Whether it is a write, which is not reported to the synchronization model."""
        return bool(kinds.WRITES >> int(self.header[0]["kind"]) & 1)

    @property
    def started(self) -> float:
        return float(self.header[0]["started"])

    def check(self, part: np.ndarray) -> int:
        """Return why it must not be applied (layout.Reason). part: PART of any shard."""
        member = self.member
        return units.check_frame(
            self.header.ctypes.data,
            member.mapped.ring.address + self.slot,
            member.generation,
            member.reported,
            part.ctypes.data,
        )


# -- operations at a barrier ----------------------------------------------------------------------


class Freeze:
    """The last grants of learners: each finishes the current iteration, and begins no other."""

    def __init__(self) -> None:
        self._grants: dict[tuple[int, int], tuple[int, int]] = {}

    def last(self, row: int, generation: int, granted: int, head: int) -> int:
        """Return the last grant of a learner, in its own clock; the same in each call.

        granted: so far. head: of its ring.
        """
        first = granted, min(granted, head + 1)
        return self._grants.setdefault((row, generation), first)[1]

    def before(self, row: int, generation: int) -> int | None:
        """Return the learner's earlier grant; None if it was not frozen."""
        found = self._grants.get((row, generation))
        return found[0] if found else None


@dataclass(eq=False)
class Change:
    """Change to another synchronization model."""

    number: int
    """Number of the model that is wanted."""
    model: SyncModel
    at_barrier: bool = False
    freeze: Freeze = field(default_factory=Freeze)


@dataclass(eq=False)
class Pause:
    """Global pause: all others wait while a learner copies the weights and assigns others."""

    member: Member
    """The learner that asks for it."""
    asked: int
    """The word by which it asks."""
    at_barrier: bool = False
    """Whether the barrier is reached: the shards hold from here on."""
    begun: bool = False
    """Whether all others pause, and the learner was notified."""
    freeze: Freeze = field(default_factory=Freeze)


# -- supersteps -----------------------------------------------------------------------------------


class Supersteps:
    """Execution of the model's decisions, one superstep after the other.

    A commit names learners whose oldest gradients are applied as one mean, and others whose oldest
    ones are dropped. The shards do that; the manager publishes the next commit when all have done
    the last.
    """

    def __init__(self, control: Segment, state: np.void, shards: int) -> None:
        """state: STATE."""
        self._segment = control
        self._control = control.view(CONTROL)
        self._state = state
        self._shards = shards
        self._commits: collections.deque[Commit] = collections.deque()
        self._refusals: dict[tuple[int, int], int] = {}  # (row, sequence) -> reason

    @property
    def due(self) -> bool:
        """Whether there are commits that are not published yet."""
        return bool(self._commits)

    def add(self, commits: Iterable[Commit]) -> None:
        """Append commits to those that are due."""
        self._commits.extend(commits)

    def refuse(self, row: int, sequence: int, reason: int) -> None:
        """Have the commit that drops this frame refuse it."""
        self._refusals[row, sequence] = reason

    def clear(self) -> None:
        """Forget the commits of a model that is not in force any more."""
        self._commits.clear()
        self._refusals.clear()

    def carry_out(self, rows: Iterable[int]) -> None:
        """Publish the next superstep if every shard is done with the previous one.

        rows: of all learners.
        """
        if not self._commits or not self.done() or self._paused():
            return
        commit = self._commits.popleft()
        action, upto = self._control["superstep_action"], self._control["superstep_upto"]
        action[:] = Action.SKIP
        tail = {row: int(self._state["applied"][0, row]) for row in rows}
        for row in commit.apply:
            action[row] = Action.APPLY
            upto[row] = tail[row] + 1
        for row in commit.drop:
            reason = self._refusals.pop((row, tail[row]), Reason.OK)
            good = reason in (Reason.OK, Reason.ABANDONED)
            action[row] = Action.DROP if good else Action.REFUSE
            self._control["superstep_reason"][row] = reason
            upto[row] = tail[row] + 1
        number = int(self._control["superstep"]) + 1
        _native.store(self._segment.word(CONTROL, "superstep"), number)  # SYNC POINT: superstep
        _native.bell(self._segment.word(CONTROL, "shard_bell"))

    def _paused(self) -> bool:
        """Return whether a checkpoint is being taken. The next superstep waits for its end."""
        return _native.load(self._segment.word(CONTROL, "pause")) > time.monotonic_ns()

    def done(self) -> bool:
        """Return whether every shard is done with the last one that was published."""
        done = self._state["record"]["supersteps"][: self._shards]
        finished = bool((done == self._control["superstep"]).all())
        if finished:
            self._control["supersteps_done"] = self._control["superstep"]
        return finished


# -- start of a job -------------------------------------------------------------------------------


@dataclass(eq=False)
class Start:
    """Start of a job whose learners begin together, so that each run of it gives the same weights.

    The first superstep of BSP includes all learners of the job, except those that have ended for
    good. A learner has come when it asks for a turn or for work.
    """

    learners: int
    """Learners that are to begin together."""
    patience_s: float
    """Time after which a learner that does not come is not awaited any more (s); 0: unlimited."""
    log: Any
    _came: int = 0
    _since: float = 0.0

    def is_over(self, control: np.void, joined: int, wants: Iterable[int]) -> bool:
        """Return whether the first superstep may end; log a warning if not all have come.

        control: CONTROL. joined: learners that have a turn or batches. wants: what each of the
        others asks for.
        """
        there = joined
        if _all_handed(control):  # of few batches there are none for some of them
            there += sum(bool(one & layout.WANTS_WORK) for one in wants)
        awaited = max(1, self.learners - finished.count(control))
        if there >= awaited:
            return True
        now = time.monotonic()
        if there != self._came:
            self._came, self._since = there, now
        if not there or not self.patience_s or now - self._since < self.patience_s:
            return False
        self.log.warning(
            "not all learners have come, continuing without them: this run cannot be repeated "
            "to the last bit; see their output",
            learners=there,
            awaited=awaited,
        )
        return True


def _all_handed(control: np.void) -> bool:
    """Return whether all batches that can be handed out at first are handed out."""
    if int(control["work"]) == Work.NONE:
        return False
    if owned.is_on(control):
        return not owned.left(control)
    batches, following = int(control["batches"]), int(control["next"])
    handed = (following >> 32) * batches + (following & 0xFFFFFFFF)
    return handed >= batches * min(EPOCHS, int(control["epochs"]))


# -- driver ---------------------------------------------------------------------------------------


class Driver:
    """The driver of one active server: all learners whose rings are served, and the model."""

    def __init__(self, control: Segment, state: Segment, part: np.ndarray, start: Start) -> None:
        """part: PART of any shard; it has the sizes that frames must have."""
        self.members: dict[int, Member] = {}
        self.number = sync_change.in_force(control)
        self.sync = sync_change.model(control, self.number)
        self._segment = control
        self._control = control.view(CONTROL)
        self._roster = self._control["roster"]
        self._state: np.void = state.view(layout.STATE)
        self._applied_at = state.word(layout.STATE, "applied")
        self._slots = int(self._control["slots"])
        self._shards = int(self._control["shards"])
        self._part = part
        self._supersteps = Supersteps(control, self._state, self._shards)
        self._resumed = False
        self._offset = 0  # clocks in the roster, which outlive servers, minus clocks of the model
        self._wanted = self.number
        self._change: Change | None = None
        self._pause: Pause | None = None
        self._requests_at = int(part[0]["board"]) + layout.offset(BOARD, "requests")
        self._requests = -1  # number of requests for which no learner asked for a pause
        self._last_paused = -1  # row of the learner that had the last pause
        self._start = start
        self._starts = False  # before the first superstep

    def follow(self) -> None:
        """Make the model that the active server uses, while another server is active."""
        if sync_change.in_force(self._segment) != self.number:
            self.number = sync_change.in_force(self._segment)
            self.sync = sync_change.model(self._segment, self.number)

    def run(self, serving: bool) -> None:
        """Make one pass over all members. serving: True if all shards serve."""
        self._wanted = sync_change.requested(self._segment)
        if not self._resumed and self._pause is None:
            self._pause = self._inherited_pause()
        if self._pause is not None and self._pause.begun:
            self._assign(self._pause)
            return
        if not self._resumed:
            self.follow()  # the previous server may have changed the model just before it died
        due = hyperparameters.requested(self._segment) != hyperparameters.in_force(self._segment)
        if due and not (self._at_barrier or self._change_numbers(serving)):
            return
        if not self._resumed:
            self._resumed = self._fail_over()
            if not self._resumed:
                return
        elif not self._frozen and self._is_to_change():
            self._change = Change(self._wanted, sync_change.model(self._segment, self._wanted))
        elif not self._frozen:
            self._pause = self._requested_pause()
        if self.sync.uses_pushes and not self._at_barrier:
            self._report_pushes()
            if self._starts:
                self._look_at_start()
            self._supersteps.carry_out(self.members)
        if self._pause is not None:
            self._reach_pause(self._pause, serving)
        if self._change is not None:
            self._reach_change(self._change, serving)
        if not self._frozen:
            self._publish_grants()

    def take_in(self, one: Mapped) -> None:
        """Begin to serve a new learner, before the shards know of its ring."""
        # Shards use `applied` only where `served` names the ring that they know;
        # and it comes last, because the next server must not do the same again.
        served = self._word(one.row, "served")
        _native.store(served, 0)
        for shard in range(layout.MAX_SHARDS):
            _native.store(self._applied_at + 8 * (layout.MAX_LEARNERS * shard + one.row), 0)
        self._roster[one.row]["member"] = 0
        self._roster[one.row]["obsolete"] = 0
        self._roster[one.row]["exclusive"] = 0
        self._state["runs"]["sequence"][one.row] = 0  # of the learner before
        free = not (self.sync.uses_pushes or self._frozen or self._roster["exclusive"].any())
        self.publish_grant(one.row, layout.UNBOUNDED if free else 0)
        _native.store(served, one.generation)  # SYNC POINT: served

    # -- operations at a barrier ------------------------------------------------------------------

    def _is_to_change(self) -> bool:
        return self._wanted != self.number

    @property
    def _frozen(self) -> bool:
        """Whether no other iterations are granted."""
        return self._change is not None or self._pause is not None

    @property
    def _at_barrier(self) -> bool:
        if self._pause is not None and self._pause.at_barrier:
            return True
        return self._change is not None and self._change.at_barrier

    def _all_hold(self, changes: int) -> bool:
        """Have the shards leave frames in the rings; return whether all do. changes: set_mode()."""
        mode = sync_change.set_mode(self._segment, changes, Mode.HOLD)
        adopted = self._control["shard"]["mode"][: self._shards]
        return bool((adopted == np.uint32(mode)).all())

    def _counts_agree(self) -> bool:
        """Return whether all shards have consumed the same of each ring."""
        used = np.flatnonzero(self._roster["generation"] != self._roster["retired"])
        counts = self._state["applied"][: self._shards, used]
        return bool((counts == counts[0]).all())

    def _change_numbers(self, serving: bool) -> bool:
        """Make one step of a due change of the hyperparameters.

        Return False until it is complete: nothing else may continue.
        """
        number = hyperparameters.requested(self._segment)
        if self.sync.on_arrival:
            if not (self._all_hold(self.number + number) and serving and self._counts_agree()):
                return False
        elif not self._supersteps.done():
            return False
        hyperparameters.apply(self._segment, number)
        sync_change.enforce(self._segment, self.number, self.sync)
        log.get().info("hyperparameters changed", version=int(self._control["version"]))
        return True

    def _reach_change(self, change: Change, serving: bool) -> None:
        """Change to the other model at the barrier, as soon as the shards hold."""
        if not change.at_barrier:
            change.at_barrier = self._all_wait(change.freeze) and self._supersteps_over
        changes = change.number + hyperparameters.in_force(self._segment)
        if change.at_barrier and serving and self._all_hold(changes) and self._counts_agree():
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
        # The grants of the old model are revoked: from here on the new one is in force.
        _native.store(self._segment.word(CONTROL, "sync_done"), self.number)
        sync_change.enforce(self._segment, self.number, self.sync)
        log.get().info("synchronization model changed", sync=str(self.sync))
        self._change = None
        _native.bell(self._segment.word(CONTROL, "manager_bell"))

    def _inherited_pause(self) -> Pause | None:
        """Return, at a failover, the pause that the previous server has begun."""
        for row in np.flatnonzero(self._roster["exclusive"]).tolist():
            if (member := self.members.get(row)) is not None:
                asked = int(self._roster[row]["exclusive"])
                return Pause(member, asked, at_barrier=True, begun=True)
            self._publish_pause(row, 0)
        return None

    def _requested_pause(self) -> Pause | None:
        """Return the next pause that a learner asks for. Learners take turns."""
        requests = _native.load(self._requests_at)
        if requests == self._requests or int(self._control["stop"]) != Stop.GO:
            return None
        asking = {
            row: (member, asked)
            for row, member in self.members.items()
            if not member.leaving and (asked := member.mapped.exclusive)
        }
        if not asking:
            self._requests = requests
            return None
        row = min(asking, key=lambda row: (row - self._last_paused - 1) % layout.MAX_LEARNERS)
        return Pause(*asking[row])

    def _is_over(self, pause: Pause) -> bool:
        """Return whether the others may continue."""
        member = pause.member
        there = self.members.get(member.row) is member and not member.leaving
        return not there or member.mapped.exclusive != pause.asked

    def _publish_pause(self, row: int, asked: int) -> None:
        """Notify the learner of this row that all others pause; asked 0: that they do not."""
        _native.store(self._word(row, "exclusive"), asked)  # SYNC POINT: exclusive
        _native.bell(self._word(row, "grant_seq"))

    def _reach_pause(self, pause: Pause, serving: bool) -> None:
        """Pause all other learners."""
        if self._is_over(pause):
            self._end_pause(pause)
            return
        asks = pause.member
        if not pause.at_barrier:
            self._control["report"] = True  # each push may be the last one that is awaited
            waits = self._all_wait(pause.freeze, asks) and self._is_applied(asks)
            if not (waits and self._supersteps_over):
                return
            pause.at_barrier = True
            self._control["pauses"] += 1  # the shards hold for this pause and no other one
        changes = self.number + hyperparameters.in_force(self._segment)
        if not (serving and self._all_hold(changes) and self._counts_agree()):
            return
        if self._is_applied(asks):
            asks.reported = self._applied(asks)
            pause.begun = True
            self._publish_pause(asks.row, pause.asked)
            log.get().debug("all others pause", learner=asks.row)
        else:  # it has pushed once more
            pause.at_barrier = False
            sync_change.enforce(self._segment, self.number, self.sync)

    def _assign(self, pause: Pause) -> None:
        """Assign while all others pause. At a failover, before anything else is done."""
        member, over = pause.member, self._is_over(pause)
        if self._supersteps_over:  # once it is over, too: what comes later than other gradients
            member.reported = self._applied(member)  # would take them out of the weights
            self._report_writes(member)
        self._supersteps.carry_out(self.members)
        if over and self._supersteps_over:
            self._end_pause(pause)

    def _end_pause(self, pause: Pause) -> None:
        """End the pause of all learners."""
        self._requests = -1  # others may have asked meanwhile
        self._last_paused = pause.member.row
        if pause.begun:
            self._publish_pause(pause.member.row, 0)
        self._pause = None
        _native.bell(self._segment.word(CONTROL, "manager_bell"))
        if not self._resumed:
            return  # the failover does the rest
        if self.sync.on_arrival:  # the model is not notified of the assignments
            pause.member.reported = self._applied(pause.member)
            if pause.member.joined:
                self._note_clock(pause.member)
        for member in self.members.values():
            before = pause.freeze.before(member.row, member.generation)
            if not self.sync.uses_pushes:
                self._roster[member.row]["member"] = False
            elif before is not None and not member.joined:
                self.publish_grant(member.row, before)
            member.granted = -1
        sync_change.enforce(self._segment, self.number, self.sync)

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
            granted = int(self._roster[member.row]["grant"])
            last = freeze.last(member.row, member.generation, granted, head)
            if asks is not None:
                if works and self.sync.uses_pushes and not member.joined:
                    works = last > head  # else it waits for its first grant
                    if works:
                        self._join(member, time.monotonic())
                # If it asks after that, it may have begun: it gets the iteration back.
                last = last if works else min(last, head)
            if last != granted:
                self.publish_grant(member.row, last)
                if asks is not None:  # it may be publishing: look again
                    all_wait = False
                    _native.bell(self._segment.word(CONTROL, "manager_bell"))
            if works:
                self._roster[member.row]["member"] = True  # it holds others up if it hangs
            if works or asks is not None:
                # What a collecting model still holds stays where it is.
                done = self._applied(member) if self.sync.on_arrival else head
                all_wait = all_wait and last <= head <= done
        return all_wait

    # -- learners ---------------------------------------------------------------------------------

    def sees_nonsense(self, member: Member) -> bool:
        """Return whether a ring's head is impossible, if the shards do not look at it."""
        pause = self._pause
        assigns = pause is not None and pause.begun and pause.member is member
        if self.sync.on_arrival and not assigns:
            return False
        before = member.mapped.head
        applied = self._applied(member)  # between the two looks: the shards move on meanwhile
        return before > applied + self._slots or member.mapped.head < applied

    def holds(self, member: Member) -> bool:
        """Return whether the model waits to decide on a gradient of this learner."""
        return not self.sync.on_arrival and self._applied(member) < member.reported

    def done_with(self, member: Member) -> bool:
        """Return whether the model no longer refers to this learner, which is gone."""
        if member.joined or (self._pause is not None and self._pause.member is member):
            return False
        if not self.sync.uses_pushes:
            return True
        # Until its reported frames are consumed, a commit may name it.
        return self._resumed and (self.sync.on_arrival or self._applied(member) >= member.reported)

    def _applied(self, member: Member) -> int:
        """Return the number of frames that every shard has consumed."""
        return int(self._state["applied"][: self._shards, member.row].min())

    def _is_applied(self, member: Member) -> bool:
        """Return whether every shard has consumed all that the learner has published."""
        return self._applied(member) == member.mapped.head

    def _has_work(self, member: Member) -> bool:
        """Return whether barriers must wait for this learner.

        They do not wait for a learner that only reads, nor for one that takes work from the server
        while it has no batch, nor, except under BSP, for one that has paused.
        """
        wants = member.mapped.wants
        if wants & layout.WANTS_PAUSE and not self.sync.awaits_paused:
            return False
        if wants & layout.WANTS_WORK and int(self._control["work"]) != Work.NONE:
            return bool((self._roster[member.row]["outstanding"] != layout.NO_BATCH).any())
        return bool(wants & layout.WANTS_TURN)

    def is_settled(self, member: Member) -> bool:
        """Return whether all shards are done with a broken ring: equal counts, no current frame.

        Even after it is drained: a shard of a dying server may have begun a frame after that.
        """
        if not member.mapped.noted:
            return False
        records = self._state["record"][: self._shards]
        # First: the current frame counts at last, and nothing is begun any more.
        if ((records["cursor"] != layout.IDLE) & (records["ring"] == member.row)).any():
            return False
        counts = self._state["applied"][: self._shards, member.row]
        return bool((counts == counts[0]).all())

    def note_broken(self, member: Member) -> None:
        """Record the broken ring for the next server, and let shard 0 release it."""
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
        """Return the address of a word of the roster."""
        at = self._segment.word(CONTROL, "roster") + row * ENTRY.itemsize
        return at + layout.offset(ENTRY, field)

    # -- failover -------------------------------------------------------------------------------

    def _fail_over(self) -> bool:
        """Make the first pass; return False while shards finish what the previous server published.

        A change of the model that was under way is made at once, without waiting for learners.
        """
        if not self._supersteps.done():
            return False
        if self._is_to_change():
            model = sync_change.model(self._segment, self._wanted)
            self._change = Change(self._wanted, model, at_barrier=True)
            return True
        sync_change.enforce(self._segment, self.number, self.sync)
        if self.sync.uses_pushes:
            self._starts = self._start.learners > 1 and sync_change.awaits_start(self._segment)
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
        """Let the first superstep end once all learners have come, or are awaited no longer."""
        there = [one for one in self.members.values() if not one.leaving]
        wants = [one.mapped.wants for one in there if not one.joined]
        if self._start.is_over(self._control, sum(one.joined for one in there), wants):
            self._starts = False
            self._supersteps.add(self.sync.start())

    def _waiting(self) -> list[Member]:
        """Return the former members with a gradient that waits for its superstep."""
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
        """Return the number of frames to report: published for a collecting model, else applied."""
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
            may_join = not member.joined and not member.leaving and not self._frozen
            if may_join and self._has_work(member):
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
        """Report new pushes to the model; return whether some of them have no grant yet."""
        published = self._published(member)
        while member.reported < published:
            found = None if self.sync.on_arrival else member.next(self._slots)
            if found and found.writes:
                if self._applied(member) < member.reported:
                    return False  # once what it has pushed before is in the weights
                self._commit_write(found)
                continue
            if not member.joined and self._frozen:
                return True  # for the next model, or after the pause
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

    def _report_writes(self, member: Member) -> None:
        """Commit each write of this learner, in a superstep of its own."""
        while member.reported < member.mapped.head and not self.sees_nonsense(member):
            found = member.next(self._slots)
            if not found.writes or self._applied(member) < member.reported:
                return
            self._commit_write(found)

    def _commit_write(self, found: Next) -> None:
        """Make a write a superstep of its own, between two of the model's."""
        member, row, reason = found.member, found.member.row, found.check(self._part)
        if reason == Reason.OK:
            self._supersteps.add([Commit((row,))])
        else:
            self._supersteps.refuse(row, member.reported, reason)
            self._supersteps.add([Commit((), (row,))])
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
            behind = self.sync.obsolete_below(member.row) - self.sync.clock(member.row)
            if behind > 0:
                self.publish_obsolete(member, member.reported + behind)
        for member in members:
            ahead = self.sync.grant(member.row) - self.sync.clock(member.row)
            grant = min(member.reported + ahead, layout.UNBOUNDED)
            if grant != member.granted:
                member.granted = grant
                self.publish_grant(member.row, grant)
