"""The planner of ElasticBSP against every possible choice, and the paper's algorithms beside it."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.benchmarks.reproduce.searches import (
    full_grid_scan,
    grid_scan,
    zipline_literal,
)
from gadei_ps.sync.zipline import plan

ALL = (plan, zipline_literal, grid_scan, full_grid_scan)
Times = npt.NDArray[np.float64]


@functools.cache
def choices(learners: int, ahead: int) -> npt.NDArray[np.int64]:
    """All there are, shape (ahead**learners, learners)."""
    return np.array(list(itertools.product(range(ahead), repeat=learners)))


def brute_force(times: Times) -> tuple[list[int], float]:
    """Return the smallest window of all choices that ends first, with its latest times.

    Of equal times the lower learner's, then the earlier one of a learner, comes first.
    """
    place = np.empty(times.size, np.int64)
    place[times.ravel().argsort(kind="stable")] = range(times.size)
    chosen = choices(*times.shape)
    learners = np.arange(len(times))
    values = times[learners, chosen]
    window = values.max(1) - values.min(1)
    last = place.reshape(times.shape)[learners, chosen].max(1)
    # The most important key is the last one.
    best = np.lexsort((*-chosen.T[::-1], last, window))[0]
    return chosen[best].tolist(), window[best]


def small_case(chance: random.Random) -> Times:
    """Up to 4 learners, 4 times each; mostly whole numbers, so that many are equal."""
    learners, ahead = chance.randint(1, 4), chance.randint(1, 4)
    top = chance.choice((3, 8, 30))
    whole = chance.random() < 0.7
    rows = [
        sorted(chance.randint(0, top) if whole else chance.random() for _ in range(ahead))
        for _ in range(learners)
    ]
    return np.array(rows, np.float64)


def test_plan_is_the_first_smallest_window_of_all_there_are() -> None:
    chance = random.Random(1)
    ties = 0
    for _ in range(10_000):
        times = small_case(chance)
        chosen, window = plan(times)
        expected = brute_force(times)
        assert (chosen.tolist(), window) == expected, times
        ties += len(np.unique(times)) < times.size
    assert ties > 4000


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plan_is_what_zipline_finds(data: st.DataObject) -> None:
    learners = data.draw(st.integers(1, 40))
    ahead = data.draw(st.integers(1, 30))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    speeds = [chance.choice((0.0, 1.0, 1.5, 2.0, chance.uniform(0.1, 9))) for _ in range(learners)]
    noise = data.draw(st.sampled_from((0.0, 0.1, 1.0)))
    steps = [[v * (1 + noise * chance.random()) for _ in range(ahead)] for v in speeds]
    times = np.cumsum(np.array(steps), axis=1) + data.draw(st.sampled_from((0.0, -1e6, 1e9)))
    chosen, window = plan(times)
    literal, literal_window = zipline_literal(times)
    assert chosen.tolist() == literal.tolist()
    assert window == literal_window


def test_the_papers_figure() -> None:
    """Choose the first of two windows of one size."""
    times = np.array([[1.0, 4.0, 7.0], [2.5, 5.0, 8.0]])
    for search in (plan, zipline_literal, full_grid_scan):
        chosen, window = search(times)
        assert (chosen.tolist(), window) == ([1, 1], 1.0)


def test_grid_scans_by_hand() -> None:
    times = np.array([[1.0, 5.0], [3.0, 9.0], [2.0, 6.0]])
    # Around 1 are 3 and 2, around 5 are 3 and 6; the other rows' points find no closer ones.
    chosen, window = grid_scan(times)
    assert (chosen.tolist(), window) == ([0, 0, 0], 2.0)
    assert full_grid_scan(times)[1] == 2.0


def test_the_rotation_finds_what_one_row_misses() -> None:
    chance = np.random.default_rng(3)
    worse = 0
    for _ in range(200):
        times = np.cumsum(chance.uniform(1, 4, (4, 6)), axis=1)
        best, full, one = (search(times)[1] for search in (plan, full_grid_scan, grid_scan))
        assert best <= full <= one
        worse += full < one
    assert worse > 10


@pytest.mark.parametrize("search", ALL)
def test_what_is_returned(search: object) -> None:
    chosen, window = search(np.array([[2, 3]], np.int64))  # type: ignore[operator]
    assert chosen.dtype == np.int64
    assert chosen.shape == (1,)
    assert (chosen[0], window) == (0, 0.0)


@pytest.mark.parametrize("search", ALL)
@pytest.mark.parametrize(
    ("times", "why"),
    [
        ([], "need one row of times for each learner"),
        ([1.0, 2.0], "need one row of times for each learner"),
        ([[]], "need one row of times for each learner"),
        ([[1.0, float("nan")]], "not finite"),
        ([[1.0], [float("inf")]], "not finite"),
        ([[2.0, 1.0]], "ascend"),
        ([[-1.7e308], [1.7e308]], "too far apart"),
    ],
)
def test_bad_times(search: object, times: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        search(np.array(times))  # type: ignore[operator]
