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
from dataclasses import dataclass, field
from typing import Any

from gadei_ps.groups import parts
from gadei_ps.groups.member import Member
from gadei_ps.groups.shares import CopyReport, Shares

MOST_MEMBERS = 64
PATIENCE = 10
"""Factor for the silence that is allowed where all that have the state of a group are silent."""
NOT_FINITE = "the weights of the group hold a NaN or an infinity: lower the learning rate"

State = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """The state of a replica, as it reports it.

    process: random number of its process. number: of the report; reports of a process may arrive
    in another order.
    facts: settings that must be equal in a group, by name. generation: that it has entered.
    rounds: that it has applied; None: it has no state of the group. lineage: of that state, see
    Group. connected: generation whose
    process group it has. arrived: the round for which it has a copy. samples: with which the copy
    was trained; 0: the copy is not finite. copied: which batches are in the copy. ready: generation
    and round whose result it has. checksum: of that result. failed: generation in which an exchange
    has failed. models: of other groups, as group and version. lost: models that cannot be fetched.
    leaves: whether it wants to leave. state: as the last reply had it.
    """

    member: Member
    process: int
    number: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    generation: int = 0
    rounds: int | None = None
    lineage: int = 0
    connected: int = 0
    arrived: int | None = None
    samples: int = 1
    copied: CopyReport | None = None
    ready: tuple[int, int] | None = None
    checksum: int = 0
    failed: int = 0
    models: Collection[tuple[int, int]] = ()
    lost: Collection[tuple[int, int]] = ()
    leaves: bool = False
    state: State | None = None


@dataclass(frozen=True)
class Go:
    """All members have arrived: weights of their copies, and models of other groups to take."""

    round: int
    weights: tuple[float, ...]
    models: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Reply:
    """The answer of the coordinator to a report.

    state: see Group.state. place: of the replica among the members; None: it is not one. source:
    place of the member that sends the group's state to joining members. connects: whether all
    members have entered the generation. owned: batches of this replica. aims: models of other
    groups to fetch. rejoin: the group continues without this incarnation. replaced: without this
    process. mistake: why the replica cannot be a member, until a user changes something.
    """

    state: State
    generation: int
    members: tuple[Member, ...]
    newcomers: frozenset[Member]
    rounds: int
    lineage: int
    committed: tuple[int, int] | None
    place: int | None = None
    source: int | None = None
    connects: bool = False
    go: Go | None = None
    owned: tuple[tuple[int, int, int], ...] = ()
    done: int = 0
    aims: tuple[tuple[int, int], ...] = ()
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
        self.epoch, self.version = 1, 0
        """Version of the state; of two states, the later one counts."""
        self.generation, self.rounds = 0, 0
        self.lineage = 0
        """Generation that began with the weights of a replica, for nobody had a state."""
        self.members: tuple[Member, ...] = ()
        self.newcomers: frozenset[Member] = frozenset()
        """Members that do not have the state yet."""
        self.source: Member | None = None
        self.committed: tuple[int, int] | None = None
        """Generation and round of the last commit."""
        self.taken: dict[int, int] = {}
        """Newest version of each other group that was taken."""
        self.shares: Shares | None = Shares(*part) if part is not None else None
        self.facts: Mapping[str, Any] = {}
        self.mistake: str | None = None
        self.aims: dict[int, int] = {}
        self.go: Go | None = None
        self._connects = self._renews = False
        self._reports: dict[Member, Report] = {}
        self._seen: dict[Member, float] = {}
        self._processes: dict[str, tuple[int, int]] = {}
        """The last process of each replica, and how many there have been."""
        self._fresh: dict[str, int] = {}
        """Processes that had no state of the group when they reported here first."""
        self._replaced: set[int] = set()
        self._left: set[Member] = set()
        self._gone: set[str] = set()
        """Replicas whose processes have ended."""

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
        return self._processes.get(replica, (0, default))[1]

    def _is_last_process(self, report: Report) -> bool:
        """Return whether no later process of the replica has reported.

        No clock orders them: hosts disagree. A process that has a state of the group has its count
        there; one that has none is new.
        """
        replica, process = report.member.replica, report.process
        count, last = self._processes.get(replica, (0, None))
        if process == last:
            return True
        theirs, known = (report.state or {}).get("processes", {}).get(replica, (0, None))
        if known != process:
            self._fresh[replica] = process
        if process in self._replaced or (known == process and theirs <= count):
            self._replaced.add(process)
            return False
        if last is not None:
            self._replaced.add(last)
            self.lost(replica)
        self._processes[replica] = max(theirs, count + 1), process
        self._changed()
        return True

    def lost(self, replica: str) -> None:
        """Forget a replica whose process has ended."""
        self._gone.add(replica)
        for member in [one for one in self._reports if one.replica == replica]:
            self._forget(member)

    def expire(self, now: float, silence_s: float) -> None:
        """Forget replicas that have been silent for too long."""
        holders = {one for one in self.members if self._has_state(one)}
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
            if any(one in self._reports for one in self.members):
                return False
            self.mistake = None
        return (
            self._renew() or self._connect() or self._admit() or self._start() or self._commit()
        ) or self._aim(published)

    def _settle(self, now: float) -> bool:
        """Wait for the members of the last state, or for all replicas that begin together."""
        there = {one.replica for one in self._reports}
        wanted = {one.replica for one in self.members} or self._expected
        # One that was started again knows nobody until a member of the last state reports.
        is_whole = bool(wanted) and wanted <= there | self._gone
        if not there or (not is_whole and now < self._settles_at):
            return False
        self.is_settled = True
        self._renews = bool(self.members)  # what another coordinator has begun is repeated
        self.epoch += 1
        self._changed()
        for member in self.members:  # of one that is not there, nothing was seen
            self._seen.setdefault(member, now)
        return True

    def _renew(self) -> bool:
        """Start the next generation if this one cannot continue, or is to have other members."""
        there = [one for one in self.members if one in self._reports]
        staying = [one for one in there if not self._reports[one].leaves and self._is_ours(one)]
        joining = [one for one in sorted(self._reports) if self._may_join(one, staying)]
        if (staying or joining) and not any(self._has_state(one) for one in staying):
            staying = [one for one in there if self._is_ours(one)]  # nobody else has the state
        joining = joining[: MOST_MEMBERS - len(staying)]
        failed = any(self._reports[one].failed == self.generation for one in staying)
        is_same = len(staying) == len(self.members) and not (failed or self._renews)
        if is_same and not (joining and self.go is None):
            return False
        self._renews = False
        if not staying and not joining:
            if not self.members:
                return False
            self._install((), None)
            return True
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
        self.rounds, self.committed, self.taken = 0, None, {}
        self.shares = Shares(*self._part) if self._part is not None else None
        self.facts = self._reports[members[0]].facts
        self.lineage = self.generation + 1
        self._install(tuple(one for one in members if self._fits(one)), members[0])
        return True

    def _install(self, members: tuple[Member, ...], source: Member | None) -> None:
        gone = [one for one in self.members if one not in members]
        self._left |= {one for one in gone if one in self._reports and self._reports[one].leaves}
        for one in gone:
            self._forget(one)
        self.generation += 1
        self.members, self.source = members, source
        self.newcomers = frozenset(
            one for one in members if not self._has_state(one) and one != source
        )
        self.go, self._connects = None, False
        self._changed()

    def _changed(self) -> None:
        self.version += 1

    def _is_ours(self, member: Member) -> bool:
        """Return whether this coordinator knows all rounds that a member has applied."""
        report = self._reports[member]
        is_known = report.rounds is not None and report.rounds <= self.rounds
        return report.rounds is None or (is_known and report.lineage == self.lineage)

    def _has_state(self, member: Member) -> bool:
        """Return whether a replica has the result of the last committed round, applied or not."""
        report = self._reports.get(member)
        if report is None or report.rounds is None or report.lineage != self.lineage:
            return False
        is_ready = report.ready is not None and report.ready == self.committed
        return report.rounds == self.rounds or (report.rounds == self.rounds - 1 and is_ready)

    def _may_join(self, member: Member, staying: Sequence[Member]) -> bool:
        report = self._reports[member]
        is_new = member not in self.members and report.rounds is None and not report.leaves
        is_there = any(one.replica == member.replica for one in staying)
        return is_new and not is_there and (not staying or self._fits(member))

    def _fits(self, member: Member) -> bool:
        return self._unequal(self._reports[member]) is None

    def _unequal(self, report: Report) -> str | None:
        """Return the name of a setting that differs from the group's, or None."""
        if not self.facts:
            return None
        return next((one for one in self.facts if report.facts.get(one) != self.facts[one]), None)

    def _all(self) -> list[Report] | None:
        """Return the reports of all members, once all have entered this generation."""
        found = [self._reports.get(one) for one in self.members]
        entered = [one for one in found if one is not None and one.generation == self.generation]
        return entered if found and len(entered) == len(found) else None

    def _connect(self) -> bool:
        if self._connects or self._all() is None:
            return False
        self._connects = True
        return True

    def _admit(self) -> bool:
        """Admit the joining members that have received the state."""
        done = {
            one
            for one in self.newcomers
            if (report := self._reports.get(one)) is not None
            and report.generation == self.generation
            and (report.lineage, report.rounds) == (self.lineage, self.rounds)
        }
        if not done:
            return False
        self.newcomers -= done
        self._changed()
        return True

    def _start(self) -> bool:
        """Start the exchange of the round once all members have arrived."""
        reports = self._all()
        if self.go is not None or reports is None or self.newcomers:
            return False
        if any(
            one.arrived != self.rounds
            or (one.lineage, one.rounds) != (self.lineage, self.rounds)
            or one.connected != self.generation
            for one in reports
        ):
            return False
        if not any(one.samples for one in reports):
            self.mistake = NOT_FINITE
            return True
        weights = parts.shares([one.samples for one in reports])
        models = self._common(reports) if self.rounds else []
        self.go = Go(self.rounds, tuple(float(one) for one in weights), tuple(models))
        return True

    def _common(self, reports: Sequence[Report]) -> list[tuple[int, int]]:
        """Return the newest model of each source that all members have, the oldest first."""
        have = set.intersection(*({(one[0], one[1]) for one in it.models} for it in reports))
        newest: dict[int, int] = {}
        for group, version in have:
            if version > self.taken.get(group, 0):
                newest[group] = max(version, newest.get(group, 0))
        models = sorted(newest.items(), key=lambda one: one[1])
        return models if self._takes_all else models[-1:]

    def _commit(self) -> bool:
        reports = self._all()
        wanted = (self.generation, self.rounds)
        if self.go is None or reports is None or any(one.ready != wanted for one in reports):
            return False
        if len({one.checksum for one in reports}) > 1:  # damaged on the way: repeat the round
            self._install(self.members, self.source)
            return True
        self.taken |= dict(self.go.models)
        if self.shares is not None:
            self.shares.after([one.copied for one in reports if one.copied is not None])
        self.rounds += 1
        self.committed, self.go = wanted, None
        self._changed()
        return True

    def _aim(self, published: Mapping[int, int]) -> bool:
        """Name the newest model of each source once all members have the last one."""
        reports = [one for one in map(self._reports.get, self.members) if one is not None]
        has_changed = False
        for source in self._sources:
            newest, aim = published.get(source, 0), self.aims.get(source, 0)
            key = (source, aim)
            is_over = all(key in {*map(tuple, one.models)} for one in reports) or any(
                key in {*map(tuple, one.lost)} for one in reports
            )
            if newest > aim and (not aim or is_over):
                self.aims[source], has_changed = newest, True
        return has_changed

    # -- what goes out ---------------------------------------------------------------------------

    def reply(self, report: Report) -> Reply:
        """Return the answer to a report."""
        member = report.member
        is_member = self.is_settled and member in self.members
        unequal = None if is_member else self._unequal(report)
        mistake = self.mistake if is_member else None
        is_replaced = self._last_process(member.replica, report.process) != report.process
        if unequal is not None and self.members and not is_replaced:
            theirs, ours = report.facts.get(unequal), self.facts[unequal]
            mistake = f"this replica has {unequal} {theirs}, and its group has {ours}: use the same"
        has_left = member in self._left
        is_known = member in self._reports and (is_member or report.rounds is None)
        spans: tuple[tuple[int, int, int], ...] = ()
        if is_member and self.shares is not None:
            spans = tuple((one.epoch, one.begin, one.end) for one in self.shares.of(member))
        return Reply(
            state=self.state() if self.is_settled and not is_replaced else {},
            generation=self.generation,
            members=self.members,
            newcomers=self.newcomers,
            rounds=self.rounds,
            lineage=self.lineage,
            committed=self.committed,
            place=self.members.index(member) if is_member else None,
            source=self.members.index(self.source) if is_member and self.source else None,
            connects=self._connects,
            go=self.go if is_member else None,
            owned=spans,
            done=self.shares.done if self.shares is not None else 0,
            aims=tuple(self.aims.items()),
            rejoin=self.is_settled and not (is_known or is_replaced or has_left),
            replaced=is_replaced,
            left=has_left or (self.is_settled and report.leaves and not is_member),
            mistake=mistake,
        )

    def state(self) -> State:
        """Return all that must outlive the coordinator, for JSON."""
        return {
            "epoch": self.epoch,
            "version": self.version,
            "generation": self.generation,
            "rounds": self.rounds,
            "lineage": self.lineage,
            "members": [list(one) for one in self.members],
            "newcomers": [list(one) for one in sorted(self.newcomers)],
            "source": None if self.source is None else list(self.source),
            "committed": None if self.committed is None else list(self.committed),
            "taken": [list(one) for one in self.taken.items()],
            "facts": dict(self.facts),
            "processes": {name: list(one) for name, one in self._processes.items()},
            "shares": None if self.shares is None else self.shares.as_dict(),
        }

    def load(self, state: State) -> None:
        """Continue from a state, unless this one is later."""
        if (state["epoch"], state["version"]) <= (self.epoch, self.version):
            return
        self.epoch, self.version = state["epoch"], state["version"]
        self.generation, self.rounds = state["generation"], state["rounds"]
        self.lineage = state["lineage"]
        self.members = tuple(_member(one) for one in state["members"])
        self.newcomers = frozenset(_member(one) for one in state["newcomers"])
        self.source = None if state["source"] is None else _member(state["source"])
        committed = state["committed"]
        self.committed = None if committed is None else (committed[0], committed[1])
        self.taken = {int(group): int(version) for group, version in state["taken"]}
        self.facts = state["facts"]
        before = self._processes
        self._processes = {name: (one[0], one[1]) for name, one in state["processes"].items()}
        for name, process in self._fresh.items():  # they began after this state
            count, last = self._processes.get(name, (0, None))
            if last != process:
                self._processes[name] = count + 1, process
        for name, (_, last) in before.items():
            if self._last_process(name, last) != last:
                self.lost(name)
        self.shares = None if state["shares"] is None else Shares.from_dict(state["shares"])


def _member(parts: Sequence[Any]) -> Member:
    return Member(str(parts[0]), int(parts[1]))
