"""Cutoff SGD by hand: what is applied, dropped and reported, and what is predicted from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from gadei_ps.sync import Commit, SpecError, parse
from gadei_ps.sync.cutoff import Cutoff


def joined(model: Cutoff, *learners: int) -> Cutoff:
    for learner in learners:
        model.join(learner, 0.0)
    return model


class Told:
    """Predictor that returns what it is set to, and keeps what it observes."""

    learners = None

    def __init__(self, *answers: list[float] | None) -> None:
        self.answers = list(answers)
        self.heard: list[tuple[list[float], list[bool]]] = []

    def observe(self, times: npt.NDArray[np.float64], censored: npt.NDArray[np.bool_]) -> None:
        self.heard.append((times.tolist(), censored.tolist()))

    def expected(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
        answer = self.answers.pop(0) if self.answers else None
        return None if answer is None else np.array(answer)


def predicted_by(predictor: Told) -> Cutoff:
    model = Cutoff(by="order")
    model._predictor = predictor
    return model


def test_mean_of_the_first_c() -> None:
    model = joined(Cutoff(c=2), 0, 1, 2)
    assert model.push(2, 1.0) == []
    assert model.push(0, 2.0) == [Commit((0, 2))]
    assert [model.grant(k) - model.clock(k) for k in range(3)] == [1, 1, 1]


def test_straggler_is_told_and_dropped_and_goes_on_at_once() -> None:
    model = joined(Cutoff(c=2), 0, 1, 2)
    assert model.obsolete_below(1) == 0
    model.push(0, 1.0)
    releases = model.releases
    model.push(2, 2.0)
    assert model.releases > releases
    assert model.obsolete_below(1) == 1, "its iteration 0 is not wanted any more"
    assert [model.obsolete_below(0), model.obsolete_below(2)] == [1, 1]
    assert model.push(1, 3.0, refused=True) == [Commit((), (1,))]
    assert (model.clock(1), model.grant(1), model.obsolete_below(1)) == (1, 2, 1)
    # And counts for the superstep that runs.
    model.push(1, 4.0)
    assert model.push(0, 5.0) == [Commit((0, 1))]
    assert model.obsolete_below(2) == 2


def test_c_is_at_most_who_is_there() -> None:
    model = joined(Cutoff(c=3), 0, 1, 2)
    model.push(0, 1.0)
    model.leave(1, 1.5)
    assert model.push(2, 2.0) == [Commit((0, 2))]


def test_gradient_of_the_dead_counts() -> None:
    model = joined(Cutoff(c=2), 0, 1, 2)
    model.push(0, 1.0)
    assert model.leave(0, 1.1) == []
    assert model.push(1, 2.0) == [Commit((0, 1))]


def test_refused_does_not_count_and_waits() -> None:
    model = joined(Cutoff(c=2), 0, 1, 2)
    assert model.push(0, 1.0, refused=True) == [Commit((), (0,))]
    assert model.grant(0) == model.clock(0)
    model.push(1, 2.0)
    assert model.push(2, 3.0) == [Commit((1, 2))]


def test_all_refused_ends_the_superstep() -> None:
    model = joined(Cutoff(c=2), 0, 1)
    model.push(0, 1.0, refused=True)
    assert model.push(1, 2.0, refused=True) == [Commit((), (1,))]
    assert all(model.grant(k) > model.clock(k) for k in (0, 1))


def test_run_times_from_grant_to_push_and_censored_at_the_cutoff() -> None:
    predictor = Told([1.0, 1.1, 9.0], [1.0, 2.0, 3.0])
    model = joined(predicted_by(predictor), 0, 1, 2)
    assert model.cutoff is None
    for learner, now in ((1, 1.0), (0, 2.0), (2, 4.0)):
        model.push(learner, now)
    assert predictor.heard == [([2.0, 1.0, 4.0], [False, False, False])]
    assert model.cutoff == 2
    model.push(1, 5.0)
    model.push(0, 6.5)
    assert predictor.heard[1] == ([2.5, 1.0, 2.5], [False, False, True])
    # The straggler starts again at 7.0: of that iteration only 1 s has passed at the next cutoff.
    model.push(2, 7.0)
    assert model.cutoff == 3
    model.push(0, 7.5)
    model.push(1, 8.0)
    model.push(2, 9.0)
    assert predictor.heard[2] == ([1.0, 1.5, 2.0], [False, False, False])


def test_slot_of_the_dead_is_empty_until_somebody_joins() -> None:
    predictor = Told(None, None, None)
    model = joined(predicted_by(predictor), 0, 1, 2)
    model.leave(0, 0.5)
    model.push(1, 1.0)
    model.push(2, 2.0)
    assert str(predictor.heard[0][0]) == "[nan, 1.0, 2.0]"
    model.join(4, 2.0)
    for learner in (1, 2, 4):
        model.push(learner, 3.0)
    assert str(predictor.heard[1][0]) == "[nan, 1.0, 1.0, nan, 1.0]"


@pytest.mark.parametrize(("by", "least"), [("order", 6), ("sampled", 9)])
def test_one_slow_learner_is_left_out(by: str, least: int) -> None:
    """Nine take about 1 s, one takes 5 s: after a while nobody waits for it.

    Times that are far from normal mislead Elfving's formula into cutting off more than that one.
    """
    model = joined(Cutoff(by=by), *range(10))
    chance = np.random.default_rng(0)
    now = 0.0
    ends = dict.fromkeys(range(10), 0.0)

    def begin(learner: int) -> None:
        ends[learner] = now + (5.0 if learner == 9 else 1.0) * chance.uniform(0.95, 1.05)

    for learner in range(10):
        begin(learner)
    cutoffs = []
    for _ in range(600):
        learner = min(ends, key=lambda k: ends[k])
        now = ends.pop(learner)
        commits = model.push(learner, now)
        if any(commit.apply for commit in commits):
            cutoffs.append(model.cutoff)
        for other in range(10):
            if other not in ends and model.clock(other) < model.grant(other):
                begin(other)
    late = cutoffs[len(cutoffs) // 2 :]
    assert all(least <= (cutoff or 10) <= 9 for cutoff in late), late


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("cutoff", "cutoff: give one of c, by and file; allowed: cutoff:c=6 or"),
        ("cutoff:c=2,by=order", "give one of c, by and file"),
        ("cutoff:c=0", "c must be a whole number from 1"),
        ("cutoff:by=luck", "by must be order or sampled, not 'luck'"),
        ("cutoff:file=", "file must be the path of a file"),
    ],
)
def test_bad_parameters(spec: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        parse(spec)


def test_cutoff_above_the_number_of_learners() -> None:
    with pytest.raises(SpecError, match="c = 5 is above the number of learners, 4"):
        parse("cutoff:c=5").check(4)
    parse("cutoff:c=5").check(5)
    parse("cutoff:c=5").check(None)


def test_file_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cutoff: .*none\.safetensors"):
        parse(f"cutoff:file={tmp_path}/none.safetensors").check(None)
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(SpecError, match=r"cutoff: .*text\.safetensors"):
        parse(f"cutoff:file={tmp_path}/text.safetensors").check(4)
