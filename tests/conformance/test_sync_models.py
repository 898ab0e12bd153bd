"""One suite for every synchronization model: a new one joins by a line in CASES.

A fake driver plays the server and the learners. It looks at a model from outside only, through
what the server calls, and checks the promises of `gadei_ps/sync/base.py` after every event.
"""

from __future__ import annotations

import builtins
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gadei_ps.sync import (
    UNBOUNDED,
    Commit,
    NotGranted,
    SyncModel,
    names,
    parse,
)


@dataclass(frozen=True)
class Case:
    """A model and what holds for it alone."""

    spec: str
    spread: int | None
    """Bound of the difference between the clocks of members (iterations); None: no bound."""
    drops_good: bool = False
    """Permission to drop gradients that are not refused."""

    def __str__(self) -> str:
        return self.spec


CASES = [
    Case("asp", spread=None),
    # A learner starts an iteration at most s above the slowest clock, and finishing it adds one.
    Case("ssp:s=0", spread=1),
    Case("ssp:s=1", spread=2),
    Case("ssp:s=4", spread=5),
    Case("bsp", spread=1),
    Case("elastic-bsp:R=1", spread=None),
    Case("elastic-bsp:R=15", spread=None),
    Case("cutoff:c=1", spread=None, drops_good=True),
    Case("cutoff:c=3", spread=None, drops_good=True),
    Case("cutoff:by=order", spread=None, drops_good=True),
    Case("cutoff:by=sampled", spread=None, drops_good=True),
    Case("wsp:D=0,s_local=3", spread=1),
    Case("wsp:D=2", spread=3),
]

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@dataclass
class Gradient:
    refused: bool


class Driver:
    """The server's and the learners' side of a model, with a record of every gradient."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = parse(case.spec)
        self.now = 0.0
        self.clocks: dict[int, int] = {}
        self.grants: dict[int, int] = {}
        self.wanteds: dict[int, int] = {}
        self.releases = self.model.releases
        self.rings: dict[int, deque[Gradient]] = {}
        self.pushed = self.applied = self.dropped = 0
        self.log: list[object] = []

    def join(self, learner: int) -> None:
        self.now += 0.25
        start = self.model.join(learner, self.now)
        assert start >= 0
        self.clocks[learner] = start
        self.rings.setdefault(learner, deque())
        self._settle([], learner)

    def leave(self, learner: int) -> None:
        self.now += 0.25
        commits = self.model.leave(learner, self.now)
        for table in (self.clocks, self.grants, self.wanteds):
            del table[learner]
        self._settle(commits, learner)

    def push(self, learner: int, *, refused: bool = False, timed: bool = True) -> None:
        started, self.now = self.now, self.now + 0.25
        self.rings[learner].append(Gradient(refused))
        self.pushed += 1
        self.clocks[learner] += 1
        commits = self.model.push(
            learner, self.now, started=started if timed else None, refused=refused
        )
        if self.model.on_arrival:
            self._consume(learner, apply=not refused)
        self._settle(commits, learner)

    def able(self) -> list[int]:
        """Return the members that may continue."""
        return [learner for learner, clock in self.clocks.items() if clock < self.grants[learner]]

    def round(self) -> None:
        """Let each learner push once that may continue at the beginning of the round."""
        for learner in self.able():
            if self.clocks[learner] < self.model.grant(learner):
                self.push(learner)

    def unconsumed(self) -> int:
        return sum(map(len, self.rings.values()))

    def _settle(self, commits: list[Commit], mover: int) -> None:
        """Execute the answer to an event of `mover` and check it."""
        if self.model.on_arrival:
            assert commits == []
        for commit in commits:
            named = commit.apply + commit.drop
            assert named, "an empty commit"
            assert len(set(named)) == len(named), f"named twice: {commit}"
            for learner in commit.apply:
                self._consume(learner, apply=True)
            for learner in commit.drop:
                self._consume(learner, apply=False)
        self._check_members(mover)
        self.log.append((commits, dict(self.grants), dict(self.wanteds)))

    def _consume(self, learner: int, *, apply: bool) -> None:
        assert self.rings.get(learner), f"learner {learner} has no gradient published"
        gradient = self.rings[learner].popleft()
        if apply:
            assert not gradient.refused, f"a refused gradient of learner {learner} is applied"
            self.applied += 1
        else:
            assert gradient.refused or self.case.drops_good, f"learner {learner}'s is dropped"
            self.dropped += 1

    def _check_members(self, mover: int) -> None:
        model = self.model
        assert list(model.learners) == list(self.clocks)
        assert model.releases >= self.releases
        for learner, clock in self.clocks.items():
            grant, wanted = model.grant(learner), model.obsolete_below(learner)
            assert model.clock(learner) == clock
            assert clock <= grant <= UNBOUNDED
            assert 0 <= wanted <= grant
            before = (self.grants.get(learner, 0), self.wanteds.get(learner, 0))
            assert (grant, wanted) >= before
            assert wanted >= before[1]
            if learner != mover and (grant, wanted) != before:
                assert model.releases > self.releases, "a grant was raised unannounced"
            self.grants[learner], self.wanteds[learner] = grant, wanted
        self.releases = model.releases
        assert self.pushed == self.applied + self.dropped + self.unconsumed()
        if self.clocks:
            # No commit is outstanding here, so without an able member all would wait for ever.
            assert self.able(), f"deadlock: clocks {self.clocks}, grants {self.grants}"
            spread = max(self.clocks.values()) - min(self.clocks.values())
            assert self.case.spread is None or spread <= self.case.spread
        else:
            assert not self.unconsumed(), "a gradient is left behind in an empty job"

    def check_everybody_goes_on(self) -> None:
        """No learner starves if all that may continue do so."""
        before = dict(self.clocks)
        for _ in range(100):
            self.round()
            if all(self.clocks[learner] > before[learner] for learner in before):
                return
        raise AssertionError(f"starved: {before} after 100 rounds is {self.clocks}")

    def finish(self) -> None:
        """Everybody leaves; then every gradient was consumed exactly once."""
        self.check_everybody_goes_on()
        for learner in list(self.clocks):
            self.leave(learner)
        assert self.pushed == self.applied + self.dropped
        assert not self.unconsumed()


class Schedule(RuleBasedStateMachine):
    """Any order of joining, pushing and leaving, ids of former members included."""

    case: Case

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(self.case)

    @rule(learner=st.integers(0, 5))
    def join(self, learner: int) -> None:
        if learner not in self.driver.clocks:
            self.driver.join(learner)

    @precondition(lambda self: self.driver.clocks)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.driver.leave(data.draw(st.sampled_from(sorted(self.driver.clocks))))

    @precondition(lambda self: self.driver.clocks)
    @rule(data=st.data(), refused=st.booleans(), timed=st.booleans())
    def push(self, data: st.DataObject, refused: bool, timed: bool) -> None:
        learner = data.draw(st.sampled_from(self.driver.able()))
        self.driver.push(learner, refused=refused, timed=timed)

    @precondition(lambda self: self.driver.clocks)
    @rule()
    def fastest_goes_on(self) -> None:
        able = self.driver.able()
        self.driver.push(max(able, key=lambda learner: (self.driver.clocks[learner], learner)))

    @precondition(lambda self: self.driver.clocks)
    @rule()
    def round(self) -> None:
        self.driver.round()

    @precondition(lambda self: len(self.driver.able()) < len(self.driver.clocks))
    @rule()
    def push_without_a_grant_changes_nothing(self) -> None:
        waiting = next(k for k in self.driver.clocks if k not in self.driver.able())
        with pytest.raises(NotGranted):
            self.driver.model.push(waiting, self.driver.now)

    @invariant()
    def unknown_learners_are_no_members(self) -> None:
        assert 6 not in self.driver.model.learners

    def teardown(self) -> None:
        self.driver.finish()


@every_case
def test_any_schedule(case: Case) -> None:
    machine = type("Schedule", (Schedule,), {"case": case})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def random_schedule(case: Case, seed: int, events: int) -> Driver:
    """A long schedule of 1 to 12 learners of very different speeds."""
    chance = random.Random(seed)
    driver = Driver(case)
    for _ in range(events):
        absent = [learner for learner in range(12) if learner not in driver.clocks]
        dice = chance.random()
        if not driver.clocks or (dice < 0.06 and absent):
            driver.join(chance.choice(absent))
        elif dice < 0.1:
            driver.leave(chance.choice(list(driver.clocks)))
        else:
            able = driver.able()
            weights = [2.0 ** (learner % 4) for learner in able]
            (learner,) = chance.choices(able, weights)
            driver.push(learner, refused=chance.random() < 0.05, timed=chance.random() < 0.9)
    return driver


@every_case
@pytest.mark.parametrize("seed", range(5))
def test_long_schedules_end_with_everything_consumed(case: Case, seed: int) -> None:
    driver = random_schedule(case, seed, events=2000)
    driver.finish()
    assert driver.pushed > 1000


@every_case
def test_same_schedule_same_answers(case: Case) -> None:
    first, second = (random_schedule(case, 42, events=1000) for _ in range(2))
    assert first.log == second.log


@every_case
@pytest.mark.parametrize("seed", range(5))
def test_deaths_never_block(case: Case, seed: int) -> None:
    """Check that after each death, in any order and at any moment, all others continue."""
    chance = random.Random(seed)
    driver = Driver(case)
    for learner in range(20):
        driver.join(learner)
    while len(driver.clocks) > 1:
        for _ in range(chance.randrange(15)):
            driver.push(chance.choice(driver.able()))
        driver.leave(chance.choice(list(driver.clocks)))
        driver.check_everybody_goes_on()
    driver.finish()


@every_case
def test_learner_that_always_dies_before_its_first_push(case: Case) -> None:
    driver = Driver(case)
    for learner in range(3):
        driver.join(learner)
    for _ in range(100):
        driver.join(3)
        for _ in range(3):
            for learner in driver.able():
                if learner != 3 and driver.clocks[learner] < driver.grants[learner]:
                    driver.push(learner)
        driver.leave(3)
    assert min(driver.clocks[learner] for learner in range(3)) >= 100
    driver.finish()


@every_case
def test_job_that_runs_empty_starts_again(case: Case) -> None:
    driver = Driver(case)
    for times in range(1, 6):
        for learner in range(times):
            driver.join(learner)
        driver.round()
        driver.round()
        for learner in range(times):
            driver.leave(learner)
    driver.finish()
    assert driver.pushed >= 15
    assert driver.applied >= 5


def supersteps(model: SyncModel, learners: int, steps: int) -> Iterator[list[Commit]]:
    """`learners` join, each pushes `steps` times in an order of no pattern, and all leave."""
    chance = random.Random(learners)
    for learner in range(learners):
        model.join(learner, 0.0)
    order = list(range(learners))
    for step in range(steps):
        chance.shuffle(order)
        for learner in order:
            if model.clock(learner) < model.grant(learner):
                yield model.push(learner, step + 1.0, started=float(step))
    for learner in order:
        yield model.leave(learner, steps + 1.0)


@every_case
def test_twenty_thousand_learners(case: Case) -> None:
    model = parse(case.spec)
    applied = dropped = 0
    for commits in supersteps(model, 20_000, 3):
        applied += sum(len(commit.apply) for commit in commits)
        dropped += sum(len(commit.drop) for commit in commits)
    if not model.on_arrival and not case.drops_good:
        assert applied == 60_000
        assert dropped == 0
    assert not model.learners


def work_per_event(case: Case, learners: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return bytecodes run in the models, and elements read by built-in scans, per event."""
    work = events = 0

    def counting(scan: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal work
            if len(arguments) == 1 and isinstance(arguments[0], Iterable):
                arguments = (list(arguments[0]),)
                work += len(arguments[0])
            return scan(*arguments, **options)

        return counted

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal work
        if not frame.f_globals.get("__name__", "").startswith("gadei_ps.sync"):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        work += event == "opcode"
        return trace

    with monkeypatch.context() as patched:
        for name, module in list(sys.modules.items()):
            if name.startswith("gadei_ps.sync"):
                for scan in ("min", "max", "sum", "sorted", "any", "all"):
                    patched.setattr(module, scan, counting(getattr(builtins, scan)), raising=False)
        model = parse(case.spec)
        former = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in supersteps(model, learners, 3):
                events += 1
        finally:
            sys.settrace(former)
    return work / events


@every_case
def test_work_per_event_grows_at_most_with_the_logarithm(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = 125, 1000
    growth = work_per_event(case, many, monkeypatch) / work_per_event(case, few, monkeypatch)
    assert growth < 1.2 * math.log(many) / math.log(few)


def test_every_registered_model_has_a_case() -> None:
    assert {parse(case.spec).name for case in CASES} == set(names())
