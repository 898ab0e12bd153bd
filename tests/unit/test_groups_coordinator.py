"""The coordinator of a group: each round is applied once by all members, whatever dies."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.groups.coordinator import NOT_FINITE, Group, Reply, Report, State, Store
from gadei_ps.groups.shares import CopyReport, Member, Span, Work, without

Batch = tuple[int, int]
FACTS = {"values": 64, "rule": "mix:0.5"}
SILENCE_S = 3.0


def batches(spans: Any) -> set[Batch]:
    return {(span[0], one) for span in spans for one in range(span[1], span[2])}


@dataclass
class Replica:
    """A replica as `replicas/rounds.py` has it, without a job and without a network."""

    number: int
    clock: int
    work: Work
    reports: int = 0
    generation: int = 0
    store: Store | None = None
    connected: int = 0
    failed: int = 0
    rounds: int | None = None
    lineage: int = 0
    history: tuple[Any, ...] = ()
    """Results that are in its weights."""
    copied: frozenset[Batch] | None = None
    held: tuple[tuple[int, int], Any] | None = None
    owned: set[Batch] = field(default_factory=set)
    answered: set[Batch] = field(default_factory=set)
    reply: Reply | None = None
    leaves: bool = False
    state: State | None = None
    heard: State | None = None
    facts: dict[str, Any] = field(default_factory=lambda: dict(FACTS))
    samples: int = 1

    def __post_init__(self) -> None:
        self.process = self.incarnation = self.clock

    @property
    def member(self) -> Member:
        return Member(str(self.number), self.incarnation)

    def report(self) -> Report:
        self.reports += 1
        copied = None
        if self.copied is not None:
            left = tuple(Span(one, at, at + 1) for one, at in sorted(self.owned - self.copied))
            copied = CopyReport(self.work, left)
        return Report(
            member=self.member,
            process=self.process,
            number=self.reports,
            facts=self.facts,
            generation=self.generation,
            store=self.store,
            rounds=self.rounds,
            lineage=self.lineage,
            connected=self.connected,
            arrived=None if self.copied is None else self.rounds,
            samples=self.samples,
            copied=copied,
            ready=None if self.held is None else self.held[0],
            checksum=0 if self.held is None else hash(self.held[1]),
            failed=self.failed,
            leaves=self.leaves,
            state=self.state,
        )

    def hear(self, reply: Reply) -> None:
        self.reply = reply
        if reply.is_settled and reply.state is not self.heard:
            self.heard, self.state = reply.state, pickle.loads(pickle.dumps(reply.state))
        if reply.rejoin:
            self.clock += 1000
            self.incarnation = self.clock
            self.generation = self.connected = self.failed = 0
            self.rounds, self.history, self.copied, self.held = None, (), None, None
            self.owned, self.answered = set(), set()

    def act(self, chance: random.Random, all_: list[Replica]) -> None:
        """Do one step of its orders."""
        reply = self.reply
        if reply is None or reply.place is None or reply.rejoin:
            return
        is_committed = self.held is not None and self.held[0] == reply.state.committed
        if self.held is not None and is_committed and self.rounds == reply.state.rounds - 1:
            self.history += (self.held[1],)
            self.rounds += 1
            self.held = self.copied = None
            self.own(reply)
            return
        if self.held is not None and self.held[0][0] != reply.state.generation:
            self.held = None
        if self.generation != reply.state.generation:
            self.generation, self.connected = reply.state.generation, 0
            self.store = (str(self.number), self.generation) if reply.place == 0 else None
            return
        if not reply.connects or self.failed == reply.state.generation:
            return
        if self.connected != reply.state.generation:
            self.connect(reply, all_)
        elif reply.go is not None and reply.go.round == self.rounds and self.held is None:
            if self.copied is not None:
                self.exchange(reply, chance, all_)
        elif self.copied is None and self.rounds == reply.state.rounds:
            left = sorted(self.owned - self.answered)
            self.answered |= set(left[: chance.randrange(1, 9)])
            self.copied = frozenset(self.answered)

    def own(self, reply: Reply) -> None:
        if reply.state.rounds == self.rounds and reply.state.shares is not None:
            self.owned |= batches(reply.state.shares.of(self.member))

    def connect(self, reply: Reply, all_: list[Replica]) -> None:
        first = reply.state.members[0].replica
        if len(reply.state.members) > 1:
            assert reply.store == (first, reply.state.generation)
        if self.member == reply.state.source and self.rounds is None:
            self.rounds, self.history, self.lineage = 0, (self.member,), reply.state.lineage
        if self.member in reply.state.joining and self.rounds is None:
            source = next((one for one in all_ if one.member == reply.state.source), None)
            if source is None or source.generation != self.generation or source.rounds is None:
                self.failed = self.generation
                return
            assert source.rounds == reply.state.rounds
            self.rounds, self.history = source.rounds, source.history
            self.lineage = reply.state.lineage
        self.connected = reply.state.generation

    def exchange(self, reply: Reply, chance: random.Random, all_: list[Replica]) -> None:
        """All members must be there, with their copies; else it fails."""
        there = {one.member: one for one in all_}
        others = [there.get(one) for one in reply.state.members]
        key = reply.state.generation, reply.go.round if reply.go else -1
        parts = []
        for one in others:
            if one is None or one.generation != reply.state.generation or chance.random() < 0.03:
                self.failed = reply.state.generation
                return
            copied = one.copied
            if copied is None or one.rounds != self.rounds:
                self.failed = reply.state.generation
                return
            parts.append((one.member, copied))
        self.held = key, tuple(parts)


class World:
    def __init__(self, seed: int, work: Work) -> None:
        self.chance, self.work = random.Random(seed), work
        self.now, self.clock = 0.0, 0
        self.group = self.coordinator(["0", "1", "2"])
        self.replicas = [self.replica(number) for number in range(3)]
        self.weights: Counter[Batch] = Counter()
        self.reported: dict[Member, tuple[int, int | None]] = {}
        """Lineage and rounds that each replica has reported last."""
        self.last = 0, 0
        """Lineage and rounds of the group."""

    @property
    def state(self) -> State:
        """The state of the group."""
        return self.group.state

    def coordinator(self, expected: list[str], patience_s: float = 20.0) -> Group:
        return Group((0, 1), True, (), expected, self.now + patience_s, 2.0)

    def replica(self, number: int) -> Replica:
        self.clock += 1
        return Replica(number, self.clock, self.work)

    def settle(self) -> None:
        while self.group.step(self.now, {}):
            pass

    def note_applied(self) -> None:
        """Note what replicas have, from whose reports another coordinator continues."""
        applied = [one.rounds or 0 for one in self.replicas if one.lineage == self.last[0]]
        self.last = self.last[0], max(applied, default=0)

    def step(self, disturbs: bool) -> None:
        chance, group = self.chance, self.group
        self.now += 0.1
        what = chance.random() if disturbs else 1.0
        if what < 0.02 and len(self.replicas) > 1:
            dead = self.replicas.pop(chance.randrange(len(self.replicas)))
            if chance.random() < 0.7:
                group.lost(str(dead.number))
            if not group.is_settled:
                self.note_applied()
        elif what < 0.04 and len(self.replicas) < 5:
            free = set(range(5)) - {one.number for one in self.replicas}
            self.replicas.append(self.replica(chance.choice(sorted(free))))
        elif what < 0.05:
            self.group = group = self.coordinator([], 5.0)  # the one before has died
            self.note_applied()
            for one in self.replicas:
                one.reply = None
        for one in self.replicas:
            if chance.random() < (0.2 if disturbs else 0.0):
                continue  # is slow, or its report is lost
            report = one.report()
            group.report(report, self.now)
            self.reported[one.member] = one.lineage, one.rounds
            self.settle()
            reply = group.reply(report)
            if chance.random() < (0.9 if disturbs else 1.0):
                one.hear(reply)
        for one in self.replicas:
            if chance.random() < 0.7:
                one.act(chance, self.replicas)
        group.expire(self.now, SILENCE_S)
        self.settle()
        self.check()

    def is_done(self, epochs: int) -> bool:
        """Return whether all passes are in the weights of all replicas that live."""
        shares, members = self.state.shares, set(self.state.members)
        all_there = members == {one.member for one in self.replicas} and not self.state.joining
        return (
            all_there and shares is not None and shares.work is not None and shares.done == epochs
        )

    def check(self) -> None:
        """Check that members of a generation with equally many rounds have the same weights."""
        known: dict[tuple[int, int], Any] = {}
        if self.group.is_settled:
            lineage, rounds = self.state.lineage, self.state.rounds
            if lineage != self.last[0] and self.last[1]:  # it starts again if nobody has its state
                assert all(self.reported.get(one.member) != self.last for one in self.replicas)
            elif lineage == self.last[0]:
                assert rounds >= self.last[1]
            self.last = lineage, rounds
        for one in self.replicas:
            if one.rounds is None or one.reply is None or one.reply.place is None:
                continue
            if one.member in self.state.members and one.generation == self.state.generation:
                key = one.generation, one.rounds
                assert known.setdefault(key, one.history) == one.history


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(1, 3))
def test_rounds_are_applied_once_by_all(seed: int, count: int, epochs: int) -> None:
    world = World(seed, Work(count, epochs, 7))
    for _ in range(250):
        world.step(disturbs=True)
    for _ in range(400):
        world.step(disturbs=False)
        if world.is_done(epochs):
            break
    else:
        pytest.fail(f"stands: {world.state}")
    for _ in range(30):  # all have applied these rounds
        world.step(disturbs=False)
    longest = max((one.history for one in world.replicas), key=len)
    for one in world.replicas:  # another round may be in flight
        assert one.history in (longest, longest[:-1])
    _, *results = longest
    in_weights: Counter[Batch] = Counter()
    summed: dict[Member, frozenset[Batch]] = {}
    for result in results:
        for member, copied in result:
            in_weights.update(copied - summed.get(member, frozenset()))
            summed[member] = copied
    assert in_weights == Counter({(e, b): 1 for e in range(epochs) for b in range(count)})


def begun(count: int = 2, **facts: Any) -> tuple[World, list[Replica]]:
    """A group without batches, whose replicas are members."""
    world = World(0, Work(0, 1, 0))
    world.replicas = [world.replica(number) for number in range(count)]
    world.group = world.coordinator([str(number) for number in range(count)])
    return world, world.replicas


def test_a_group_begins_when_all_are_there() -> None:
    world, (first, second) = begun()
    world.group.report(first.report(), 0)
    world.settle()
    assert not world.group.is_settled
    world.group.report(second.report(), 0)
    world.settle()
    assert world.state.members == (first.member, second.member)
    assert world.state.joining == (second.member,)


def test_a_group_does_not_wait_for_a_replica_whose_process_has_ended() -> None:
    world, (first, _) = begun()
    world.group.report(first.report(), 0)
    world.group.lost("1")
    world.settle()
    assert world.state.members == (first.member,)


def trained(rounds: int) -> tuple[World, list[Replica]]:
    """A group of two that has done so many rounds."""
    world, replicas = begun()
    while world.state.rounds < rounds:
        world.step(disturbs=False)
    return world, replicas


def test_a_coordinator_that_is_started_again_waits_for_who_has_the_state() -> None:
    """The other replica has died with it, and was started again sooner."""
    world, (first, _) = trained(3)
    world.group = world.coordinator([], 5.0)
    third = world.replica(1)
    world.group.report(third.report(), world.now)
    world.settle()
    assert not world.group.is_settled
    rounds = first.rounds or 0
    world.last = world.last[0], rounds
    world.replicas = [first, third]
    for _ in range(60):
        world.step(disturbs=False)
    assert world.state.rounds > rounds
    assert third.history == first.history or third.history == first.history[:-1]


def test_silence_of_all_loses_no_state() -> None:
    """The coordinator was cut off; both have trained on."""
    world, (first, second) = trained(3)
    before = world.state.rounds, world.state.lineage, world.state.members
    world.now += 2 * SILENCE_S
    world.group.expire(world.now, SILENCE_S)
    world.settle()
    assert (world.state.rounds, world.state.lineage, world.state.members) == before
    for _ in range(60):
        world.step(disturbs=False)
    assert world.state.lineage == before[1] and world.state.rounds > before[0]
    assert {first.member, second.member} == set(world.state.members)


def test_a_group_whose_members_never_come_back_begins_anew() -> None:
    world, _ = trained(3)
    world.replicas = [world.replica(5)]
    for _ in range(400):
        world.step(disturbs=False)
    assert world.state.members == (world.replicas[0].member,)


def test_another_model_is_a_mistake_of_one_replica() -> None:
    world, (first, second) = begun()
    second.facts = FACTS | {"values": 128}
    for one in (first, second):
        world.group.report(one.report(), 0)
    world.settle()
    assert world.state.members == (first.member,)
    mistake = world.group.reply(second.report()).mistake
    assert mistake == "this replica has values 128, and its group has 64: use the same"
    assert world.group.reply(first.report()).mistake is None


def test_copies_that_are_not_finite_do_not_count() -> None:
    world, (first, second) = begun()
    for _ in range(40):
        world.step(disturbs=False)
    second.samples = 0
    while world.group.go is None or world.group.go.weights[1]:
        world.step(disturbs=False)
    assert world.group.go.weights == (1.0, 0.0)
    first.samples = 0
    while world.group.mistake is None:
        world.step(disturbs=False)
    assert world.group.reply(first.report()).mistake == NOT_FINITE


def test_the_last_replica_may_leave() -> None:
    world, replicas = begun()
    for _ in range(40):
        world.step(disturbs=False)
    for one in list(replicas):
        one.leaves = True
        for _ in range(20):
            world.step(disturbs=False)
        assert one.reply is not None and one.reply.left
        replicas.remove(one)
    assert world.state.members == ()


def test_a_replica_that_was_silent_joins_again() -> None:
    world, (first, second) = begun()
    for _ in range(40):
        world.step(disturbs=False)
    world.replicas = [first]
    rounds = world.state.rounds
    for _ in range(60):
        world.step(disturbs=False)
    assert world.state.members == (first.member,) and world.state.rounds > rounds
    before = second.member
    world.replicas = [first, second]
    for _ in range(60):
        world.step(disturbs=False)
    assert second.member in world.state.members and second.member != before
    assert second.history == first.history


def test_of_two_processes_with_one_number_the_later_one_stays() -> None:
    world, (first, second) = begun()
    for _ in range(40):
        world.step(disturbs=False)
    third = world.replica(1)
    world.group.report(third.report(), world.now)
    assert world.group.reply(second.report()).replaced
    world.replicas = [first, third]
    for _ in range(60):
        world.step(disturbs=False)
    assert world.state.members == (first.member, third.member)


def test_clocks_of_hosts_order_no_processes() -> None:
    """The host of the later process is behind; and a coordinator has been started again."""
    world, (first, second) = begun()
    for _ in range(40):
        world.step(disturbs=False)
    third = Replica(1, -(10**6), world.work)
    world.replicas = [first, third]
    for _ in range(60):
        world.step(disturbs=False)
    assert world.state.members == (first.member, third.member)
    before = world.state.generation
    for order in ((second, third, first), (third, second, first), (first, second, third)):
        world.group = world.coordinator([], 5.0)
        for one in order:
            world.group.report(one.report(), world.now)
        assert world.group.reply(second.report()).replaced
        world.settle()
        assert world.state.members == (first.member, third.member)
        assert world.state.generation > before


def test_a_process_that_began_while_there_was_no_coordinator() -> None:
    """The state that others have names the one before it."""
    world, (first, second) = begun()
    for _ in range(40):
        world.step(disturbs=False)
    third = Replica(1, -(10**6), world.work)
    for order in ((third, first, second), (first, third, second), (second, first, third)):
        world.group = world.coordinator([], 5.0)
        for one in order:
            world.group.report(one.report(), world.now)
        assert world.group.reply(second.report()).replaced
        assert not world.group.reply(third.report()).replaced
        assert not world.group.reply(first.report()).replaced


def test_models_of_other_groups() -> None:
    """All members get one, then the next; a round takes what all have, once."""
    group = Group(None, False, (1, 2), ["0", "1"], 0.0)
    members = Member("0", 0), Member("1", 0)
    group.is_settled, group.state = True, replace(group.state, members=members)
    reports = [Report(one, 0, facts=FACTS) for one in members]
    for one in reports:
        group.report(one, 0)
    group._aim({1: 5, 2: 6})
    assert group.aims == {1: 5, 2: 6}
    group._aim({1: 8, 2: 9})
    assert group.aims == {1: 5, 2: 6}
    has = [(1, 5)], [(1, 5), (2, 6)]
    reports = [
        Report(one, 0, number=1, facts=FACTS, models=models)
        for one, models in zip(members, has, strict=True)
    ]
    for one in reports:
        group.report(one, 0)
    assert group._common(reports) == [(1, 5)]
    group._aim({1: 8, 2: 9})
    assert group.aims == {1: 8, 2: 6}
    group.state = replace(group.state, taken={1: 5})
    assert group._common(reports) == []


def test_spans_that_are_left() -> None:
    assert without([Span(0, 0, 5)], [Span(0, 1, 3)]) == [Span(0, 0, 1), Span(0, 3, 5)]


def test_a_process_that_has_just_begun_hides_no_later_state() -> None:
    """A coordinator has died after a commit, which only one member has received."""
    world, (first, second) = trained(3)
    before, world.group = world.state, world.coordinator([], 5.0)
    second.state = replace(before, version=before.version + 1, rounds=before.rounds + 1)
    first.state, third = before, world.replica(2)
    for one in (first, third, second):
        world.group.report(one.report(), world.now)
    assert world.state.rounds == before.rounds + 1
