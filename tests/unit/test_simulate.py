"""The simulator: examples worked out by hand, and what holds for every model at all times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import Watch, simulate

from gadei_ps.errors import UsageError
from gadei_ps.simulate.draws import Stream, uniform
from gadei_ps.simulate.outcome import Outcome
from gadei_ps.simulate.run_times import RecordedTimes, RunTimes, parse
from gadei_ps.simulate.setting import Abandonment, Faults, Setting
from gadei_ps.sync import names

MODELS = [
    "asp",
    "ssp:0",
    "ssp:2",
    "bsp",
    "elastic-bsp:4",
    "cutoff:2",
    "cutoff:by=order",
    "cutoff:by=sampled",
    "wsp:1",
    "wsp:D=0,s_local=2",
]


def counts(found: Outcome) -> tuple[int, int, int, int]:
    return found.pushed, found.applied, found.dropped, found.in_flight


# -- by hand ----------------------------------------------------------------------------------


def test_bsp_on_constant_times() -> None:
    found = simulate("bsp", [[2.0] * 5], iterations=7)
    assert (found.seconds, found.updates, counts(found)) == (14.0, 7, (35, 35, 0, 0))
    assert (found.waiting_s, found.member_s, found.lost_s) == (0, 70, 0)
    assert (found.staleness.max, found.staleness.count) == (0, 35)
    assert found.throughput == 2.5


def test_bsp_waits_for_the_slowest() -> None:
    found = simulate("bsp", [[1.0, 3.0], [4.0, 2.0]], iterations=4)
    assert found.seconds == 3 + 4 + 3 + 4
    assert found.waiting_s == 2 + 2 + 2 + 2
    assert found.waiting_share == 8 / 28
    assert found.staleness.max == 0


def test_asp_never_waits_and_staleness_counts_what_others_applied() -> None:
    watch = Watch()
    found = simulate("asp", [[1.0, 2.0]], gradients=6, training=watch)
    # Ends: learner 0 at 1, 2, 3, 4; learner 1 at 2 and 4, after learner 0 at the same time.
    assert watch.staleness == [0, 0, 2, 1, 0, 2]
    assert (found.seconds, found.waiting_s, counts(found)) == (4.0, 0, (6, 6, 0, 0))
    assert (found.staleness.total, found.staleness.max) == (5, 2)


def test_ssp_waits_at_its_bound() -> None:
    found = simulate("ssp:1", [[1.0, 2.0]], seconds=8.0)
    # Learner 0 ends at 1, 2, 3, 5, 7 and waits from 3 to 4, 5 to 6 and 7 to 8.
    assert (found.pushed, found.waiting_s, found.member_s) == (9, 3.0, 16.0)


def test_cutoff_and_stragglers_that_give_up_at_once() -> None:
    found = simulate("cutoff:1", [[1.0, 3.0]], iterations=4)
    assert (found.seconds, counts(found), found.given_up) == (4.0, (8, 4, 4, 0), 4)
    assert (found.lost_s, found.waiting_s, found.updates) == (4.0, 0, 4)


def test_stragglers_that_never_give_up_are_dropped() -> None:
    found = simulate("cutoff:1", [[1.0, 2.5]], seconds=5.5, give_up=Abandonment(None))
    # Learner 1 ends its first two at 2.5 and 5, both late; learner 0 ends five supersteps.
    assert (counts(found), found.given_up, found.lost_s) == ((7, 5, 2, 0), 0, 5.0)


@pytest.mark.parametrize(
    "how", [Abandonment(0.5), Abandonment(0.0, 0.125), Abandonment(0.25, 0.0625)]
)
def test_stragglers_that_give_up_later(how: Abandonment) -> None:
    found = simulate("cutoff:1", [[1.0, 4.0]], seconds=3.75, give_up=how)
    # Notified at 1, 2 and 3; learner 1 continues until 1.5, 2.5 and 3.5 and restarts each time.
    assert (found.given_up, counts(found)) == (3, (6, 3, 3, 0))
    assert found.lost_s == 1.5 + 1.0 + 1.0


def test_one_that_finishes_before_it_would_give_up_is_dropped_as_late() -> None:
    found = simulate("cutoff:1", [[1.0, 1.25]], seconds=1.5, give_up=Abandonment(0.5))
    assert (found.given_up, found.dropped, found.lost_s) == (0, 1, 1.25)


def test_gradients_queue_for_the_server() -> None:
    watch = Watch()
    found = simulate("asp", [[1.0, 1.0]], gradients=6, server_s=0.25, training=watch, slots=1)
    # Applied at 1.25, 1.5, 2.25, ... while the next ones, begun at 1 and 2, are computed.
    assert found.seconds == 3.5
    assert (found.staleness.total, found.staleness.max) == (0 + 1 + 2 + 3 + 2 + 3, 3)
    assert found.waiting_s == 0


def test_a_learner_waits_for_a_slot() -> None:
    found = simulate("asp", [[1.0]], seconds=10.0, server_s=3.0, slots=2)
    # Pushes at 1, 2, 4, 7 and 10; blocked from 3 to 4, 5 to 7 and 8 to 10.
    assert (counts(found), found.waiting_s) == ((5, 3, 0, 2), 5.0)


def test_grants_wait_until_the_commit_is_carried_out() -> None:
    found = simulate("bsp", [[1.0, 1.0]], seconds=4.25, server_s=0.25)
    # Supersteps of 1 + 2 * 0.25 seconds; the third one's gradients are being applied at the end.
    assert (counts(found), found.updates) == ((6, 4, 0, 2), 2)
    assert found.waiting_s == pytest.approx(2 * 0.5 + 2 * 0.5 + 2 * 0.25)


def test_death_and_return() -> None:
    faults = Faults(die=((1, 1.5),), join=((1, 2.5),))
    found = simulate("bsp", [[1.0, 1.0]], seconds=5.0, faults=faults)
    # Supersteps end at 1, at 2 without learner 1, and at 3.5 and 4.5 with it again.
    assert (counts(found), found.updates, found.deaths, found.joins) == ((7, 7, 0, 0), 4, 1, 1)
    assert (found.lost_s, found.lost_iterations) == (0.5, 1)
    assert (found.waiting_s, found.member_s) == (0.5, 5.0 + 1.5 + 2.5)


def test_death_while_it_waits() -> None:
    found = simulate("bsp", [[1.0, 3.0]], seconds=3.0, faults=Faults(die=((0, 2.5),)))
    assert (found.waiting_s, found.lost_s, found.lost_iterations) == (1.5, 0, 0)
    assert (found.applied, found.member_s) == (2, 5.5)


def test_a_death_ends_no_iteration_but_the_one_it_was_drawn_for() -> None:
    """Learner 1 abandons its first iteration, in which it would have died later."""
    times = RecordedTimes(np.array([[1.0, 100.0], [1.0, 0.5]]))
    places = np.arange(2)[:, None], np.arange(4)[None, :]
    for seed in range(1000):
        dies = uniform(seed, Stream.DEATH, *places) < 0.2
        moment = uniform(seed, Stream.MOMENT, *places)
        if dies[1, 0] and moment[1, 0] > 0.02 and dies.sum() == 1:
            break
    faults = Faults(deaths=0.2)
    found = simulate("cutoff:1", times, learners=2, seed=seed, seconds=1.75, faults=faults)
    assert (found.given_up, found.deaths, found.applied) == (2, 0, 2)


def test_death_in_a_wave() -> None:
    for moment, lost in ((0.5, 0.5), (1.5, 1.5), (2.5, 0.5), (5.0, 1.0)):
        faults = Faults(die=((0, moment),))
        found = simulate("wsp:D=0,s_local=1", [[1.0, 3.0]], seconds=5.0, faults=faults)
        assert found.lost_s == lost, moment
        assert found.lost_iterations == (2 if moment == 1.5 else 1), moment


def test_return_after_a_while() -> None:
    faults = Faults(die=((0, 0.5),), return_s=1.0)
    found = simulate("asp", [[1.0, 9.0]], seconds=4.0, faults=faults)
    assert (found.joins, found.pushed) == (1, 2)  # at 2.5 and 3.5


def test_what_a_dead_learner_had_pushed_is_applied() -> None:
    for spec in ("asp", "ssp:1", "wsp:1", "elastic-bsp", "bsp", "cutoff:2"):
        faults = Faults(die=((0, 1.1),), join=((0, 1.2),))
        found = simulate(spec, [[1.0, 1.0]], seconds=2.75, server_s=0.75, faults=faults)
        assert (found.deaths, found.joins) == (1, 1), spec
        assert found.applied + found.in_flight == found.pushed, spec
        assert found.applied >= 1, spec


def test_nobody_left() -> None:
    found = simulate("bsp", [[1.0, 1.0]], iterations=9, faults=Faults(die=((0, 1.5), (1, 2.5))))
    assert (found.ended, found.seconds, found.pushed) == ("no learner is left", 2.5, 3)
    assert found.lost_iterations == 2


def test_a_wave_is_pushed_at_once_and_the_next_one_is_begun_before_its_grant() -> None:
    watch = Watch()
    found = simulate("wsp:D=0,s_local=1", [[1.0, 3.0]], seconds=12.0, training=watch)
    # Learner 1 pushes at 6 and 12. Learner 0 pushes wave 0 at 2, computes one mini-batch of wave 1
    # and waits from 3 to 6; so again from 8 to 12: its third wave has one mini-batch before it.
    assert watch.published == {0: 2, 1: 2}
    assert found.waiting_s == 3 + 4
    assert found.throughput == 4 * 2 / 12
    # Batches are numbered by their first iteration.
    assert [number for learner, number in watch.begun if learner == 0] == [0, 2, 4]


# -- always -----------------------------------------------------------------------------------


settings_of_runs = st.fixed_dictionaries(
    {
        "learners": st.integers(2, 40),
        "iterations": st.integers(1, 12),
        "server_s": st.sampled_from([0.0, 0.01, 0.3]),
        "slots": st.integers(1, 3),
        "seed": st.integers(0, 99),
        "give_up": st.sampled_from(
            [Abandonment(), Abandonment(None), Abandonment(0.1), Abandonment(0.0, 0.5)]
        ),
        "faults": st.sampled_from(
            [
                Faults(),
                Faults(deaths=0.1),
                Faults(deaths=0.2, return_s=0.7),
                Faults(die=((0, 1.5), (1, 1.5)), join=((1, 1.5), (40, 2.0), (0, 3.0))),
            ]
        ),
    }
)
sources = st.sampled_from(["normal", "heavy:alpha=1.5", "groups", "speeds:1,3", "normal:std=0"])


@settings(deadline=None, max_examples=150, derandomize=True)
@given(spec=st.sampled_from(MODELS), source=sources, how=settings_of_runs)
def test_nothing_is_lost_and_nobody_is_stuck(spec: str, source: str, how: dict[str, Any]) -> None:
    watch = Watch()
    found = simulate(spec, parse(source, how["seed"]), training=watch, **how)
    assert found.pushed == found.applied + found.dropped + found.in_flight
    assert found.given_up <= found.dropped
    assert found.staleness.count == found.applied == sum(map(len, watch.applied))
    assert (sum(watch.staleness), max(watch.staleness, default=0)) == (
        found.staleness.total,
        found.staleness.max,
    )
    assert len(watch.applied) == found.updates
    assert sum(watch.dropped.values()) == found.dropped
    assert sum(watch.published.values()) == found.pushed
    begun = Counter(learner for learner, _ in watch.begun)
    computing = sum(begun.values()) - found.pushed
    assert 0 <= computing <= how["learners"] + 1 + found.lost_iterations
    assert 0 <= found.waiting_s <= found.member_s
    assert found.lost_s <= found.member_s - found.waiting_s + 1e-9
    # It ends when it is done, unless all are dead.
    if found.ended == "done":
        assert found.pushed * found.wave >= how["iterations"] * how["learners"]
        assert watch.progress == sorted(watch.progress)
        assert watch.progress[-1] == 1.0
    else:
        assert found.deaths == how["learners"] + found.joins
    if not how["faults"].deaths and not how["faults"].die:
        assert found.ended == "done"
    # A learner's iterations are numbered one after the other, whatever becomes of them.
    for learner in begun:
        numbers = [number for one, number in watch.begun if one == learner]
        assert numbers == sorted(set(numbers))


@settings(deadline=None, max_examples=80, derandomize=True)
@given(spec=st.sampled_from(MODELS), source=sources, how=settings_of_runs)
def test_the_same_seed_gives_the_same_run(spec: str, source: str, how: dict[str, Any]) -> None:
    first, second = (simulate(spec, parse(source, how["seed"]), **how) for _ in range(2))
    report, again = first.as_dict(1.0), second.as_dict(1.0)
    del report["wall_s"], again["wall_s"]
    assert report == again


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    source=sources,
    bound=st.integers(0, 4),
    learners=st.integers(2, 20),
    seed=st.integers(0, 99),
    server_s=st.sampled_from([0.0, 0.02]),
)
def test_ssp_keeps_its_bound(
    source: str, bound: int, learners: int, seed: int, server_s: float
) -> None:
    """A learner that begins iteration i has pulled all gradients of iterations up to i - s - 1."""

    class Bound(Watch):
        def __init__(self) -> None:
            super().__init__()
            self.done: Counter[int] = Counter()
            self.most = 0

        def begin(self, learners_: Sequence[int], iterations: Sequence[int]) -> None:
            super().begin(learners_, iterations)
            slowest = min(self.done[k] for k in range(learners))
            for iteration in iterations:
                self.most = max(self.most, iteration - slowest)

        def apply(self, learners: Sequence[int], *, on_arrival: bool) -> None:
            super().apply(learners, on_arrival=on_arrival)
            self.done.update(learners)

    watch = Bound()
    found = simulate(
        f"ssp:{bound}",
        parse(source, seed),
        learners=learners,
        iterations=20,
        server_s=server_s,
        training=watch,
    )
    assert found.ended == "done"
    assert watch.most <= bound
    if source == "speeds:1,3":
        assert watch.most == bound


@settings(deadline=None, max_examples=30, derandomize=True)
@given(source=sources, seed=st.integers(0, 99), learners=st.integers(2, 50))
def test_asp_never_waits(source: str, seed: int, learners: int) -> None:
    found = simulate("asp", parse(source, seed), learners=learners, seconds=20.0)
    assert found.waiting_s == 0
    assert found.dropped == 0


def test_models_are_compared_on_the_same_run_times() -> None:
    class Noted(RunTimes):
        def __init__(self) -> None:
            self.source = parse("lognormal", 7)
            self.seen: dict[tuple[int, int], float] = {}

        def draw(self, learners: np.ndarray, iterations: np.ndarray) -> np.ndarray:
            drawn = self.source.draw(learners, iterations)
            keys = np.broadcast_arrays(learners, iterations)
            for k, i, time in zip(*(one.tolist() for one in keys), drawn.tolist(), strict=True):
                self.seen[k, i] = time
            return drawn

    noted = {}
    for spec in MODELS:
        noted[spec] = Noted()
        simulate(spec, noted[spec], learners=40, iterations=10)
    common = set.intersection(*(set(one.seen) for one in noted.values()))
    assert len(common) >= 40 * 5
    for one in noted.values():
        assert all(one.seen[key] == noted["bsp"].seen[key] for key in common)


def test_every_model_has_been_simulated() -> None:
    assert {spec.partition(":")[0] for spec in MODELS} == set(names())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "its length is missing"),
        ({"iterations": 0}, "above 0"),
        ({"seconds": -1.0}, "above 0"),
        ({"iterations": 1, "learners": 100_001}, "learners must be from 1 to 100,000"),
        ({"iterations": 1, "server_s": -0.1}, "the server's time"),
        ({"iterations": 1, "slots": 0}, "slots"),
        ({"iterations": 1, "faults": Faults(deaths=1.5)}, "deaths"),
        ({"iterations": 1, "faults": Faults(die=((5, 1.0),))}, "there is no learner 5 of 2"),
        ({"iterations": 1, "faults": Faults(join=((-1, 1.0),))}, "die and join"),
        (
            {"iterations": 1, "faults": Faults(join=((10**6, 1.0),))},
            "must be below 100,000",
        ),
    ],
)
def test_bad_settings_are_told_in_one_line(how: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Setting(how.pop("learners", 2), parse("normal", 0), **how)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
