"""Decisions of the coordinator: members of a group, its generations, and committed rounds.

`Group` is the coordinator's part for one group, without a clock, sockets or processes. Replicas
send reports: all that they have, again and again. A reply is all that the replica has to know.
Neither depends on earlier ones, so a lost or repeated message changes nothing.

A *generation* is a list of members that work together. A death, a leave, a join or a failed
exchange ends it. A *round* of a generation has two phases:

1. Each member trains, copies its weights, and reports that it has *arrived*. When all members have,
   they exchange copies, and each computes the result of the round.
2. Each member reports that it is *ready*: it has the whole result. When all members are, the
   coordinator commits the round, and each member applies the result once.

A death before the commit starts the next generation, which repeats the round from the unchanged
copies. A death after it changes nothing: all others have the result.

Each reply contains the state of the group: members, generation, last commit, and batch ledger. A
coordinator that has lost it continues from the newest one that members report. What no member
knows, no member has applied. A member that has applied what is not in it rejoins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gadei_ps.groups import parts
from gadei_ps.groups.shares import CopyReport, Member, Shares

MOST_MEMBERS = 64
PATIENCE = 10
"""Factor for the silence that is allowed where all that have the state of a group are silent."""
NOT_FINITE = "the weights of the group hold a NaN or an infinity: lower the learning rate"

Model = tuple[int, int]
"""A model that a group has published: the group and its version."""
Store = tuple[str, int]
"""Host and port of a store, by which the members of a generation find each other."""


@dataclass(frozen=True)
class State:
    """The state of a group: all that must outlive its coordinator.

    epoch: number of coordinators so far. version: number of changes; of two states, the later one
    counts. lineage: generation in which the group has started from the weights of a replica.
    joining: members that do not have the state yet. source: the member that sends it to them.
    committed: generation and round of the last commit. taken: newest version of each other group
    that was taken. facts: settings that are equal on all members. processes: the last process of
    each replica, and how many there have been. shares: None if each job hands out all batches.
    """

    epoch: int = 1
    version: int = 0
    generation: int = 0
    rounds: int = 0
    lineage: int = 0
    members: tuple[Member, ...] = ()
    joining: tuple[Member, ...] = ()
    source: Member | None = None
    committed: tuple[int, int] | None = None
    taken: Mapping[int, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    processes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    shares: Shares | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the state for JSON, without the owners of batches."""
        return asdict(replace(self, shares=None)) | {"shares": self.shares and self.shares.facts()}


@dataclass(frozen=True)
class Report:
    """The state of a replica, as it reports it.

    process: random number of its process. number: of the report; reports of a process may arrive
    in another order.
    facts: settings that must be equal in a group, by name. generation: that it has entered. store:
    made for the generation, by its first member. rounds: that it has applied; None: it has no state
    of the group. lineage: of that state. connected: generation whose process group it has. arrived:
    the round for which it has a copy. samples: with which the copy was trained; 0: the copy is not
    finite. copied: which batches are in the copy. ready: generation and round whose result it has.
    checksum: of that result. failed: generation in which an exchange has failed. models: of other
    groups. lost: models that cannot be fetched. leaves: whether it wants to leave. state: as the
    last reply had it.
    """

    member: Member
    process: int
    number: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    generation: int = 0
    store: Store | None = None
    rounds: int | None = None
    lineage: int = 0
    connected: int = 0
    arrived: int | None = None
    samples: int = 1
    copied: CopyReport | None = None
    ready: tuple[int, int] | None = None
    checksum: int = 0
    failed: int = 0
    models: Collection[Model] = ()
    lost: Collection[Model] = ()
    leaves: bool = False
    state: State | None = None


@dataclass(frozen=True)
class Go:
    """All members have arrived: weights of their copies, and models of other groups to take."""

    round: int
    weights: tuple[float, ...]
    models: tuple[Model, ...]


@dataclass(frozen=True)
class Reply:
    """The answer of the coordinator to a report.

    is_settled: whether the state is that of the group, which the replica is to report. place: of
    the replica among the members; None: it is not one. connects: whether all members have entered
    the generation. store: of the generation. aims: models of other groups to fetch. rejoin: the
    group continues without this incarnation. replaced: without this process. mistake: why the
    replica cannot be a member, until a user changes something.
    """

    state: State
    is_settled: bool
    place: int | None = None
    connects: bool = False
    store: Store | None = None
    go: Go | None = None
    aims: tuple[Model, ...] = ()
    rejoin: bool = False
    replaced: bool = False
    left: bool = False
    mistake: str | None = None


class Group:
    """The coordinator's part for one group."""

    def __init__(
        self,
        part: tuple[int, int] | None,
        takes_all: bool,
        sources: Collection[int],
        expected: Collection[str],
        settles_at: float,
        recover_s: float = 10.0,
    ) -> None:
        """Begin without members.

        part: number of this group and of groups, where they divide batches. takes_all: as the
        rule's. sources: groups whose models this one takes. expected: replicas that begin together.
        settles_at: when the group begins at the latest, with those that are there.
        """
        self._part, self._takes_all, self._sources = part, takes_all, tuple(sources)
        self._expected, self._settles_at, self._recover_s = set(expected), settles_at, recover_s
        self.is_settled = False
        """Whether this coordinator has the state of the group."""
        self.state = State(shares=self._all_batches())
        self.mistake: str | None = None
        self.aims: dict[int, int] = {}
        self.go: Go | None = None
        self._connects = self._renews = False
        self._store: Store | None = None
        self._reports: dict[Member, Report] = {}
        self._seen: dict[Member, float] = {}
        self._fresh: dict[str, int] = {}
        """Processes that had no state of the group when they reported here first."""
        self._replaced: set[int] = set()
        self._left: set[Member] = set()
        self._gone: set[str] = set()
        """Replicas whose processes have ended."""

    def _all_batches(self) -> Shares | None:
        return Shares(*self._part) if self._part is not None else None

    def _set(self, **changes: Any) -> None:
        """Change the state. Replies have the one before, which stays as it was.

        Before it is settled, it keeps its version: a member may still report a later one.
        """
        version = self.state.version + self.is_settled
        self.state = replace(self.state, version=version, **changes)

    # -- what comes in ---------------------------------------------------------------------------

    def report(self, report: Report, now: float) -> None:
        """Take a report of a replica."""
        member = report.member
        if report.state and not self.is_settled:
            self.load(report.state)
            self._settles_at = min(self._settles_at, now + self._recover_s)
        if not self._is_last_process(report):
            return
        self._gone.discard(member.replica)
        known = [one for one in self._reports if one.replica == member.replica]
        if member in self._left or any(self._reports[one].number > report.number for one in known):
            return
        for one in known:
            if one != member:
                self._forget(one)
        self._reports[member] = report
        self._seen[member] = now

    def _last_process(self, replica: str, default: int) -> int:
        return self.state.processes.get(replica, (0, default))[1]

    def _is_last_process(self, report: Report) -> bool:
        """Return whether no later process of the replica has reported.

        No clock orders them: hosts disagree. A process that has a state of the group has its count
        there; one that has none is new.
        """
        replica, process = report.member.replica, report.process
        count, last = self.state.processes.get(replica, (0, None))
        if process == last:
            return True
        processes = report.state.processes if report.state is not None else {}
        theirs, known = processes.get(replica, (0, None))
        if known != process:
            self._fresh[replica] = process
        if process in self._replaced or (known == process and theirs <= count):
            self._replaced.add(process)
            return False
        if last is not None:
            self._replaced.add(last)
            self.lost(replica)
        number = max(theirs, count + 1)
        self._set(processes={**self.state.processes, replica: (number, process)})
        return True

    def lost(self, replica: str) -> None:
        """Forget a replica whose process has ended."""
        self._gone.add(replica)
        for member in [one for one in self._reports if one.replica == replica]:
            self._forget(member)

    def expire(self, now: float, silence_s: float) -> None:
        """Forget replicas that have been silent for too long."""
        holders = {one for one in self.state.members if self._has_state(one)}
        # If all of them are silent, the coordinator has more likely been cut off. Without them the
        # group's state would be lost.
        all_silent = all(now - self._seen.get(one, now) > silence_s for one in holders)
        for member, seen in list(self._seen.items()):
            patience = PATIENCE if all_silent and member in holders else 1
            if now - seen > patience * silence_s:
                self._forget(member)

    def refresh(self, now: float) -> None:
        """Count no silence before now: the coordinator itself could not be reached."""
        self._seen = dict.fromkeys(self._seen, now)

    def _forget(self, member: Member) -> None:
        self._reports.pop(member, None)
        self._seen.pop(member, None)

    # -- decisions -------------------------------------------------------------------------------

    def step(self, now: float, published: Mapping[int, int]) -> bool:
        """Decide what follows from all reports. published: newest model of each group, by version.

        Returns whether anything has changed. Call it again until it returns False.
        """
        if not self.is_settled:
            return self._settle(now)
        if self.mistake is not None:
            if any(one in self._reports for one in self.state.members):
                return False
            self.mistake = None
        return (
            self._renew() or self._connect() or self._admit() or self._start() or self._commit()
        ) or self._aim(published)

    def _settle(self, now: float) -> bool:
        """Wait for the members of the last state, or for all replicas that begin together."""
        there = {one.replica for one in self._reports}
        wanted = {one.replica for one in self.state.members} or self._expected
        # One that was started again knows nobody until a member of the last state reports.
        is_whole = bool(wanted) and wanted <= there | self._gone
        if not there or (not is_whole and now < self._settles_at):
            return False
        self.is_settled = True
        self._renews = bool(self.state.members)  # what another one has begun is repeated
        self._set(epoch=self.state.epoch + 1)
        for member in self.state.members:  # of one that is not there, nothing was seen
            self._seen.setdefault(member, now)
        return True

    def _renew(self) -> bool:
        """Start the next generation if this one cannot continue, or is to have other members."""
        before = self.state.members
        there = [one for one in before if one in self._reports]
        staying = [one for one in there if not self._reports[one].leaves and self._is_ours(one)]
        joining = [one for one in sorted(self._reports) if self._may_join(one, staying)]
        if (staying or joining) and not any(self._has_state(one) for one in staying):
            staying = [one for one in there if self._is_ours(one)]  # nobody else has the state
        joining = joining[: MOST_MEMBERS - len(staying)]
        failed = any(self._reports[one].failed == self.state.generation for one in staying)
        is_same = len(staying) == len(before) and not (failed or self._renews)
        if is_same and not (joining and self.go is None):
            return False
        self._renews = False
        if not (staying or joining or before):
            return False
        has_state = [one for one in staying if self._has_state(one)]
        if has_state:
            self._install((*staying, *joining), has_state[0])
            return True
        # No replica has the state: the group starts from the beginning. A replica with an older
        # state joins again.
        members = [one for one in (*staying, *joining) if self._reports[one].rounds is None]
        if not members:
            self._install((), None)
            return True
        self._set(
            rounds=0,
            committed=None,
            taken={},
            shares=self._all_batches(),
            facts=self._reports[members[0]].facts,
            lineage=self.state.generation + 1,
        )
        self._install(tuple(one for one in members if self._fits(one)), members[0])
        return True

    def _install(self, members: tuple[Member, ...], source: Member | None) -> None:
        gone = [one for one in self.state.members if one not in members]
        self._left |= {one for one in gone if one in self._reports and self._reports[one].leaves}
        for one in gone:
            self._forget(one)
        new = tuple(one for one in members if not self._has_state(one) and one != source)
        generation = self.state.generation + 1
        self._set(generation=generation, members=members, source=source, joining=new)
        self.go, self._connects = None, False

    def _is_ours(self, member: Member) -> bool:
        """Return whether this coordinator knows all rounds that a member has applied."""
        rounds, lineage = self._reports[member].rounds, self._reports[member].lineage
        return rounds is None or (rounds <= self.state.rounds and lineage == self.state.lineage)

    def _has_state(self, member: Member) -> bool:
        """Return whether a replica has the result of the last committed round, applied or not."""
        report, state = self._reports.get(member), self.state
        if report is None or report.rounds is None or report.lineage != state.lineage:
            return False
        is_ready = report.ready is not None and report.ready == state.committed
        return report.rounds == state.rounds or (report.rounds == state.rounds - 1 and is_ready)

    def _may_join(self, member: Member, staying: Sequence[Member]) -> bool:
        report = self._reports[member]
        is_new = member not in self.state.members and report.rounds is None and not report.leaves
        is_there = any(one.replica == member.replica for one in staying)
        return is_new and not is_there and (not staying or self._fits(member))

    def _fits(self, member: Member) -> bool:
        return self._unequal(self._reports[member]) is None

    def _unequal(self, report: Report) -> str | None:
        """Return the name of a setting that differs from the group's, or None."""
        facts = self.state.facts
        return next((one for one in facts if report.facts.get(one) != facts[one]), None)

    def _all(self) -> list[Report] | None:
        """Return the reports of all members, once all have entered this generation."""
        found = [one for one in map(self._reports.get, self.state.members) if one is not None]
        has_all = bool(found) and len(found) == len(self.state.members)
        return found if has_all and all(map(self._has_entered, found)) else None

    def _has_entered(self, report: Report) -> bool:
        return report.generation == self.state.generation

    def _is_current(self, report: Report) -> bool:
        """Return whether a replica has applied all rounds that are committed, and no others."""
        return (report.lineage, report.rounds) == (self.state.lineage, self.state.rounds)

    def _connect(self) -> bool:
        reports = self._all()
        if self._connects or reports is None or (reports[1:] and reports[0].store is None):
            return False
        self._connects, self._store = True, reports[0].store
        return True

    def _admit(self) -> bool:
        """Admit the joining members that have received the state."""
        left = tuple(
            one
            for one in self.state.joining
            if (report := self._reports.get(one)) is None
            or not (self._has_entered(report) and self._is_current(report))
        )
        if left == self.state.joining:
            return False
        self._set(joining=left)
        return True

    def _start(self) -> bool:
        """Start the exchange of the round once all members have arrived."""
        reports, state = self._all(), self.state
        if self.go is not None or reports is None or state.joining:
            return False
        if any(
            one.arrived != state.rounds
            or not self._is_current(one)
            or one.connected != state.generation
            for one in reports
        ):
            return False
        if not any(one.samples for one in reports):
            self.mistake = NOT_FINITE
            return True
        weights = parts.shares([one.samples for one in reports])
        models = self._common(reports) if state.rounds else []
        self.go = Go(state.rounds, tuple(float(one) for one in weights), tuple(models))
        return True

    def _common(self, reports: Sequence[Report]) -> list[Model]:
        """Return the newest model of each source that all members have, the oldest first."""
        newest: dict[int, int] = {}
        for group, version in set.intersection(*(set(one.models) for one in reports)):
            if version > self.state.taken.get(group, 0):
                newest[group] = max(version, newest.get(group, 0))
        models = sorted(newest.items(), key=lambda one: one[1])
        return models if self._takes_all else models[-1:]

    def _commit(self) -> bool:
        reports, state = self._all(), self.state
        wanted = (state.generation, state.rounds)
        if self.go is None or reports is None or any(one.ready != wanted for one in reports):
            return False
        if len({one.checksum for one in reports}) > 1:  # damaged on the way: repeat the round
            self._install(state.members, state.source)
            return True
        shares = state.shares
        if shares is not None:
            copies = {one.member: one.copied for one in reports if one.copied is not None}
            shares = shares.after(copies)
        self._set(
            taken={**state.taken, **dict(self.go.models)},
            shares=shares,
            rounds=state.rounds + 1,
            committed=wanted,
        )
        self.go = None
        return True

    def _aim(self, published: Mapping[int, int]) -> bool:
        """Name the newest model of each source once all members have the last one."""
        reports = [self._reports[one] for one in self.state.members if one in self._reports]
        has_changed = False
        for source in self._sources:
            newest, aim = published.get(source, 0), self.aims.get(source, 0)
            model = (source, aim)
            is_over = all(model in one.models for one in reports) or any(
                model in one.lost for one in reports
            )
            if newest > aim and (not aim or is_over):
                self.aims[source], has_changed = newest, True
        return has_changed

    # -- what goes out ---------------------------------------------------------------------------

    def reply(self, report: Report) -> Reply:
        """Return the answer to a report."""
        member, members = report.member, self.state.members
        is_replaced = self._last_process(member.replica, report.process) != report.process
        is_settled = self.is_settled and not is_replaced
        is_member = is_settled and member in members
        unequal = None if is_member or is_replaced or not members else self._unequal(report)
        mistake = self.mistake if is_member else None
        if unequal is not None:
            theirs, ours = report.facts.get(unequal), self.state.facts[unequal]
            mistake = f"this replica has {unequal} {theirs}, and its group has {ours}: use the same"
        has_left = member in self._left
        is_known = member in self._reports and (is_member or report.rounds is None)
        return Reply(
            state=self.state,
            is_settled=is_settled,
            place=members.index(member) if is_member else None,
            connects=self._connects,
            store=self._store,
            go=self.go if is_member else None,
            aims=tuple(self.aims.items()),
            rejoin=is_settled and not (is_known or has_left),
            replaced=is_replaced,
            left=has_left or (is_settled and report.leaves and not is_member),
            mistake=mistake,
        )

    def load(self, state: State) -> None:
        """Continue from a state, unless this one is later."""
        if (state.epoch, state.version) <= (self.state.epoch, self.state.version):
            return
        before, processes = self.state.processes, dict(state.processes)
        for name, process in self._fresh.items():  # they began after this state
            count, last = processes.get(name, (0, None))
            if last != process:
                processes[name] = count + 1, process
        self.state = replace(state, processes=processes)
        for name, (_, last) in before.items():
            if self._last_process(name, last) != last:
                self.lost(name)
