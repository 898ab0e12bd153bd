"""Run times of the simulator: each depends on its place alone, and is distributed as it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.errors import UsageError
from gadei_ps.simulate import draws
from gadei_ps.simulate.histogram import Histogram
from gadei_ps.simulate.run_times import FORMS, RecordedTimes, RunTimes, parse

SPECS = [
    "normal",
    "lognormal:sigma=0.7",
    "heavy",
    "groups:size=3,length=4",
    "switch:slow=2,until=7",
    "speeds:1,1.5,2,4",
]


def table(times: RunTimes, learners: int, iterations: int) -> np.ndarray:
    """Run times of shape (iterations, learners)."""
    return times.draw(np.arange(learners)[None, :], np.arange(iterations)[:, None])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    spec=st.sampled_from(SPECS),
    seed=st.integers(0, 2**40),
    learners=st.integers(1, 40),
    iterations=st.integers(1, 40),
    first=st.integers(0, 10**9),
    data=st.data(),
)
def test_a_run_time_depends_on_its_place_alone(
    spec: str, seed: int, learners: int, iterations: int, first: int, data: st.DataObject
) -> None:
    """Compare to the last bit, however many others are drawn with it."""
    times = parse(spec, seed)
    numbers = first + np.arange(iterations)
    whole = times.draw(np.arange(learners)[None, :], numbers[:, None])
    assert (whole > 0).all()
    assert np.isfinite(whole).all()
    k = data.draw(st.integers(0, learners - 1))
    i = data.draw(st.integers(0, iterations - 1))
    again = parse(spec, seed)
    assert again.draw(np.array([k]), numbers[i : i + 1])[0] == whole[i, k]
    np.testing.assert_array_equal(again.draw(np.array([k]), numbers), whole[:, k])
    np.testing.assert_array_equal(
        again.draw(np.arange(learners), np.full(learners, numbers[i])), whole[i]
    )


def test_seeds_streams_learners_and_iterations_differ() -> None:
    learners, iterations = np.arange(100)[:, None], np.arange(100)[None, :]
    drawn = {
        (seed, stream): draws.words(seed, stream, learners, iterations)
        for seed in (0, 1, 2**63)
        for stream in draws.Stream
    }
    assert len(np.unique(np.concatenate([one.ravel() for one in drawn.values()]))) == sum(
        one.size for one in drawn.values()
    )


def test_uniform_numbers_are_uniform() -> None:
    found = draws.uniform(5, draws.Stream.TAIL, np.arange(300)[:, None], np.arange(1000)[None, :])
    assert found.min() > 0
    assert found.max() < 1
    counts = np.histogram(found, bins=100, range=(0, 1))[0]
    # Chi square of 99 degrees of freedom: below 150 with a probability above 0.999.
    assert ((counts - 3000) ** 2 / 3000).sum() < 150
    # Neighbours in both directions are not correlated: 0.01 is 5 deviations.
    for shifted, rest in ((found[1:], found[:-1]), (found[:, 1:], found[:, :-1])):
        assert abs(np.corrcoef(shifted.ravel(), rest.ravel())[0, 1]) < 0.01


@pytest.mark.parametrize(
    ("spec", "mean", "std"),
    [
        ("normal:mean=2,std=0.3", 2.0, 0.3),
        ("lognormal:mean=2,sigma=0.5", 2.0, 2.0 * np.sqrt(np.exp(0.25) - 1)),
        ("heavy:mean=2,alpha=6", 2.0, 2.0 / np.sqrt(6 * 4)),
    ],
)
def test_moments(spec: str, mean: float, std: float) -> None:
    drawn = table(parse(spec, 3), 400, 500)
    assert drawn.mean() == pytest.approx(mean, rel=0.005)
    assert drawn.std() == pytest.approx(std, rel=0.03)


def test_normal_times_stay_above_zero() -> None:
    assert table(parse("normal:mean=1,std=3", 0), 100, 100).min() == 0.01


def test_groups_are_slow_together() -> None:
    slow = table(parse("groups:size=5,factor=3,share=0.25,length=10,std=0", 1), 500, 400) > 2
    # The learners of a node are alike at all times, and nodes are not.
    by_node = slow.reshape(400, 100, 5)
    assert (by_node == by_node[:, :, :1]).all()
    node = by_node[:, :, 0]
    assert node.mean() == pytest.approx(0.25, abs=0.02)
    assert node.any(axis=0).mean() > 0.99
    # A node changes at one place of every ten, the same at each spell.
    changes = node[1:] != node[:-1]
    for column in changes.T:
        assert len(set(np.flatnonzero(column) % 10)) <= 1
    assert len({int(np.flatnonzero(column)[0]) % 10 for column in changes.T if column.any()}) == 10


def test_switch_ends() -> None:
    drawn = table(parse("switch:slow=3,until=4,factor=2,mean=1,std=0", 0), 5, 6)
    expected = np.ones((6, 5))
    expected[:4, :3] = 2
    np.testing.assert_array_equal(drawn, expected)


def test_speeds() -> None:
    drawn = table(parse("speeds:1,2,4,mean=8,std=0", 0), 4, 2)
    np.testing.assert_array_equal(drawn, [[8, 4, 2, 8]] * 2)


def test_a_trace_is_repeated_and_shared() -> None:
    times = np.arange(1.0, 11.0).reshape(5, 2)
    drawn = table(RecordedTimes(times), 4, 10)
    np.testing.assert_array_equal(drawn[:, :2], np.vstack([times, times]))
    # The third and the fourth learner have the columns of the first two, at another time.
    for column in (0, 1):
        assert set(drawn[:5, column + 2]) == set(times[:, column])
        assert (drawn[:, column + 2] != drawn[:, column]).all()


def test_a_trace_file(tmp_path: Path) -> None:
    file = tmp_path / "measured.csv"
    rows = ["0,0,,1.5,0", "0,1,,2.5,0", "1,1,,3.5,1", "2,0,,0,0", "2,1,,4.5,0"]
    file.write_text("iteration,learner,started,seconds,censored\n" + "\n".join(rows) + "\n")
    drawn = table(parse(str(file), 0), 2, 3)
    np.testing.assert_array_equal(drawn[:, 1], [2.5, 3.5, 4.5])
    # What is missing is the learner's last one; what took no time on the clock took a little.
    np.testing.assert_array_equal(drawn[:2, 0], [1.5, 1.5])
    assert 0 < drawn[2, 0] < 1e-4


@pytest.mark.parametrize(
    "times", [np.empty((0, 2)), -np.ones((1, 1)), np.zeros((2, 2)), [[np.inf]]]
)
def test_run_times_that_are_none(times: np.ndarray) -> None:
    with pytest.raises(ValueError, match="run times"):
        RecordedTimes(np.asarray(times))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gaussian:mean=1", "write one of normal:"),
        ("normal:mean=0", "mean must be above 0, not 0; write it like normal:"),
        ("normal:std=-1", "std must be at least 0"),
        ("normal:mean=much", "mean must be a number, not 'much'"),
        ("normal:mean=nan", "mean must be a number"),
        ("normal:1", "cannot read '1'"),
        ("normal:mean=1,mean=2", "mean is given twice"),
        ("normal:sigma=1", "there is no 'sigma'"),
        ("heavy:a=3", "there is no 'a'"),
        ("heavy:alpha=1", "alpha must be above 1"),
        ("groups:size=1.5", "size must be a whole number from 1, not 1.5"),
        ("switch:until=-1", "until must be a whole number"),
        ("speeds", "the speeds are missing"),
        ("speeds:1,0", "a speed must be above 0"),
        ("speeds:1,,2", "a speed must be a number"),
        ("gone.csv", "gone.csv: cannot be read"),
    ],
)
def test_bad_run_times_are_told_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(spec, 0)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_form_can_be_read() -> None:
    for form in FORMS[:-1]:
        parse(form, 0)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 10**12)), max_size=60))
def test_histogram_against_all_values(values: list[int]) -> None:
    found = Histogram()
    for value in values:
        found.add(value)
    assert (found.count, found.total) == (len(values), sum(values))
    assert found.max == max(values, default=0)
    ordered = sorted(values)
    for part in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = ordered[max(0, int(np.ceil(part * len(values))) - 1)] if values else 0
        assert found.quantile(part) == exact
    rows = found.rows()
    assert sum(times for _, _, times in rows) == len(values)
    for low, high, times in rows:
        assert times == sum(low <= value <= high for value in values)
