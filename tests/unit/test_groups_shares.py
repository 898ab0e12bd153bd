"""Shares of the batches: each is in the group's weights once a pass, whoever dies or joins."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.groups.shares import MOST_OPEN, CopyReport, Member, Shares, Span, Work, without

Batch = tuple[int, int]


def batches(spans: list[Span] | tuple[Span, ...]) -> set[Batch]:
    return {(span.epoch, one) for span in spans for one in range(span.begin, span.end)}


def spans(found: set[Batch]) -> tuple[Span, ...]:
    return tuple(Span(epoch, one, one + 1) for epoch, one in sorted(found))


def owners(shares: Shares) -> Any:
    """All that the shares hold."""
    opened = {
        epoch: {one: list(ranges) for one, ranges in owned.items()}
        for epoch, owned in shares._open.items()
    }
    return shares.work, shares.done, opened


class Machine:
    """A job: what it was given, what it has answered, and what of that a round has."""

    def __init__(self, member: Member, work: Work) -> None:
        self.member, self.work = member, work
        self.given: set[Batch] = set()
        self.answered: set[Batch] = set()
        self.summed: set[Batch] = set()
        self.state: Shares | None = None

    def train(self, chance: random.Random) -> None:
        left = sorted(self.given - self.answered)
        self.answered |= set(left[: chance.randrange(8)])
        self.answered |= set(chance.sample(left, min(len(left), chance.randrange(3))))

    def says(self, counts: bool) -> CopyReport:
        left = spans(self.given - self.answered)
        return CopyReport(self.work, left, counts=counts)

    def forget(self) -> None:
        self.given, self.answered, self.summed = set(), set(), set()

    def take(self, shares: Shares) -> None:
        new = batches(shares.of(self.member)) - self.given
        assert new == batches(without(shares.of(self.member), spans(self.given)))
        self.given |= new
        self.state = shares


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 70),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_each_batch_is_in_the_weights_once(
    seed: int, count: int, epochs: int, groups: int, group: int
) -> None:
    chance = random.Random(seed)
    work = Work(count, epochs, seed)
    group %= groups
    part = count * group // groups, count * (group + 1) // groups
    lives = iter(range(1, 10_000))
    machines = [Machine(Member(str(number), 0), work) for number in range(chance.randint(1, 4))]
    in_weights: Counter[Batch] = Counter()
    rounds = 0
    shares = Shares(group, groups)
    while shares.done < epochs:
        rounds += 1
        assert rounds < 5000
        for one in machines:
            one.train(chance)
        bad = [one for one in machines if chance.random() < 0.05]
        reports = {one.member: one.says(one not in bad) for one in machines}
        copies = [(one, set(one.answered)) for one in machines if one not in bad]
        for one in machines:  # who trains on while others sum
            if chance.random() < 0.3:
                one.train(chance)
        what = chance.random()
        if what < 0.1 and len(machines) > 1:  # dies, and its copy was summed, or was not
            dead = machines.pop(chance.randrange(len(machines)))
            if what < 0.05:
                del reports[dead.member]
                copies = [(one, has) for one, has in copies if one is not dead]
        for one, has in copies:
            for batch in has - one.summed:
                in_weights[batch] += 1
            one.summed = has
        # Each member makes the same of it, even one that has fetched its state.
        before, heard = shares, pickle.loads(pickle.dumps(shares))
        shares = before.after(reports)
        assert owners(heard.after(reports)) == owners(shares)
        assert owners(heard) == owners(before), "it has changed"
        assert 0 <= len(shares.facts()["left"]) <= MOST_OPEN
        if what > 0.9 and len(machines) < 5:
            machines.append(Machine(Member(str(chance.randrange(5)), next(lives)), work))
        owned = [batch for one in machines for batch in batches(shares.of(one.member))]
        assert len(owned) == len(set(owned)), "two machines own a batch"
        for one in bad:
            one.forget()
        for one in machines:
            one.take(shares)
    wanted = {(epoch, one) for epoch in range(epochs) for one in range(*part)}
    assert in_weights == Counter(wanted)


def test_a_machine_with_other_work_gets_nothing() -> None:
    shares, work = Shares(), Work(10, 1, 0)
    ours, theirs = Member("0", 0), Member("1", 0)
    shares = shares.after({ours: CopyReport(work, ()), theirs: CopyReport(Work(11, 1, 0), ())})
    assert shares.of(ours) == [Span(0, 0, 10)]
    assert shares.of(theirs) == []


def test_a_group_that_begins_anew_goes_on_with_the_pass() -> None:
    shares, work = Shares(), Work(10, 3, 0)
    first, second = Member("0", 9), Member("1", 9)
    shares = shares.after(
        {first: CopyReport(work, (), done=2), second: CopyReport(work, (), done=1)}
    )
    assert shares.of(first) == [Span(2, 0, 5)] and shares.of(second) == [Span(2, 5, 10)]
    shares = shares.after({first: CopyReport(work, ()), second: CopyReport(work, ())})
    assert shares.done == 3


def test_a_newcomer_gets_its_share_of_the_next_pass() -> None:
    shares, work = Shares(), Work(10, 3, 0)
    first, second = Member("0", 0), Member("1", 7)
    shares = shares.after({first: CopyReport(work, ())})
    assert shares.of(first) == [Span(0, 0, 10)]
    shares = shares.after(
        {first: CopyReport(work, (Span(0, 1, 10),)), second: CopyReport(work, ())}
    )
    assert shares.of(first) == [Span(0, 1, 10), Span(1, 0, 5)]
    assert shares.of(second) == [Span(1, 5, 10)]


def test_a_group_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="group 2 is not one of 2"):
        Shares(2, 2)
