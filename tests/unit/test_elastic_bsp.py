"""ElasticBSP: lengths of supersteps, failing predictions, deaths and joining members, by hand."""

from __future__ import annotations

import random

import pytest

from gadei_ps.sync.elastic_bsp import ElasticBSP


def started(speeds: dict[int, float], R: int = 15) -> tuple[ElasticBSP, float]:
    """A model after its first superstep, of one iteration each; the time then."""
    model = ElasticBSP(R)
    for learner in speeds:
        model.join(learner, 0.0)
    for learner, seconds in sorted(speeds.items(), key=lambda item: item[1]):
        model.push(learner, seconds)
    return model, max(speeds.values())


def lengths(model: ElasticBSP) -> dict[int, int]:
    return {learner: model.grant(learner) - model.clock(learner) for learner in model.learners}


def test_first_superstep_has_one_iteration() -> None:
    model = ElasticBSP(15)
    for learner in range(3):
        model.join(learner, 0.0)
    assert lengths(model) == {0: 1, 1: 1, 2: 1}
    model.push(0, 1.0)
    model.push(1, 2.0)
    assert lengths(model) == {0: 0, 1: 0, 2: 1}
    assert model.releases == 0
    model.push(2, 5.0)
    assert model.releases == 1


def test_lengths_are_those_that_end_together() -> None:
    model, _ = started({0: 1.0, 1: 2.0, 2: 4.0})
    assert lengths(model) == {0: 4, 1: 2, 2: 1}
    model, _ = started({0: 2.0, 1: 3.0})
    assert lengths(model) == {0: 3, 1: 2}


def test_lookahead_bounds_a_length() -> None:
    model, _ = started({0: 1.0, 1: 100.0}, R=15)
    assert lengths(model) == {0: 15, 1: 1}
    model, _ = started({0: 1.0, 1: 100.0}, R=1)
    assert lengths(model) == {0: 1, 1: 1}


def test_barrier_when_the_last_arrives() -> None:
    model, now = started({0: 1.0, 1: 2.0})
    before = model.releases
    model.push(0, now + 1)
    model.push(0, now + 2)
    assert model.releases == before
    model.push(1, now + 2)
    assert model.releases == before + 1
    assert lengths(model) == {0: 2, 1: 1}


def test_one_slow_iteration_moves_no_prediction() -> None:
    model, now = started({0: 1.0, 1: 1.0})
    for seconds in (1.0, 1.0, 1.0, 9.0):
        model.push(0, now + 1.0)
        model.push(1, now + seconds)
        now += seconds
    assert lengths(model) == {0: 1, 1: 1}


def test_late_learner_has_arrived_with_its_next_push() -> None:
    """Predicted were 2 iterations of 3 s; from now on each takes 30 s."""
    model, now = started({0: 2.0, 1: 3.0})
    for i in range(3):
        model.push(0, now + 2.0 * (i + 1))
    releases = model.releases
    model.push(1, now + 30.0)  # the barrier was due at now + 6
    assert model.releases == releases + 1, "the other would wait for a second slow iteration"
    assert lengths(model)[1] >= 1, "what was granted stays so"
    assert lengths(model)[0] >= 1
    # It continues at once; the iteration in flight is a part of the new superstep.
    model.push(1, now + 60.0)


def test_several_late_ones_each_arrive_once() -> None:
    model, now = started({0: 1.0, 1: 4.0, 2: 4.0})
    assert lengths(model) == {0: 4, 1: 1, 2: 1}
    for i in range(4):
        model.push(0, now + 1.0 + i)
    model.push(1, now + 50.0)
    assert lengths(model)[0] == 0
    model.push(2, now + 51.0)
    assert lengths(model)[0] > 0


def test_the_dead_are_not_waited_for() -> None:
    model, now = started({0: 1.0, 1: 4.0, 2: 1.0})
    for i in range(4):
        for learner in (0, 2):
            model.push(learner, now + i + 1)
    assert lengths(model) == {0: 0, 1: 1, 2: 0}
    model.leave(1, now + 5)
    assert lengths(model) == {0: 1, 2: 1}


def test_newcomer_takes_part_until_the_barrier_is_due() -> None:
    model, now = started({0: 1.0, 1: 4.0})
    model.join(2, now)
    assert lengths(model)[2] == 1
    model.push(2, now + 1.5)
    assert lengths(model)[2] == 1, "another one ends before the barrier"
    model.push(2, now + 3.0)
    assert lengths(model)[2] == 0, "a third one would not"


def test_newcomer_waits_once_somebody_waits() -> None:
    model, now = started({0: 1.0, 1: 4.0})
    for i in range(4):
        model.push(0, now + 1.0 + i)
    model.join(2, now + 4)
    assert lengths(model)[2] == 0
    model.push(1, now + 4)
    assert lengths(model)[2] == 1


@pytest.mark.parametrize("seed", range(20))
def test_one_to_R_iterations_between_barriers(seed: int) -> None:
    chance = random.Random(seed)
    model = ElasticBSP(7)
    speeds = {learner: chance.uniform(0.5, 5) for learner in range(5)}
    ends: dict[int, float] = {}
    for learner, seconds in speeds.items():
        model.join(learner, 0.0)
        ends[learner] = seconds
    pushed = dict.fromkeys(speeds, 0)
    supersteps = 0
    for _ in range(2000):
        learner = min((k for k in speeds if k in ends), key=lambda k: ends[k])
        now = ends.pop(learner)
        releases = model.releases
        model.push(learner, now)
        pushed[learner] += 1
        if model.releases > releases:
            supersteps += 1
            assert all(1 <= count <= 7 for count in pushed.values()), pushed
            pushed = dict.fromkeys(speeds, 0)
        for k, seconds in speeds.items():
            if k not in ends and model.clock(k) < model.grant(k):
                hiccup = 10 if chance.random() < 0.02 else 1
                ends[k] = now + seconds * chance.uniform(0.8, 1.2) * hiccup
    assert supersteps > 50
