"""Expected order statistics, the best cutoff, and the predictors that need no training."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadei_ps.sync import order_statistics
from gadei_ps.sync.order_statistics import (
    NormalPredictor,
    SampledPredictor,
    best_cutoff,
    elfving,
    sorted_mean,
    throughput,
)
from gadei_ps.sync.prediction import FloatArray, History, Predictor, right_tail, survival

PREDICTORS = (NormalPredictor, SampledPredictor)
NONE = np.zeros(0, bool)


def feed(predictor: Predictor, rows: FloatArray, censored: FloatArray | None = None) -> None:
    for index, row in enumerate(rows):
        bound = np.zeros(len(row), bool) if censored is None else censored[index].astype(bool)
        predictor.observe(row, bound)


def test_elfving_at_the_papers_cluster() -> None:
    expected = elfving(158, 1.057, 0.393)
    assert expected[-1] == pytest.approx(2.1047, abs=5e-5)
    assert (np.diff(expected) > 0).all()
    np.testing.assert_allclose(expected + expected[::-1], 2 * 1.057)  # symmetry
    assert elfving(1, 3.0, 5.0).tolist() == [3.0]
    with pytest.raises(ValueError, match="of 0 run times"):
        elfving(0, 1.0, 1.0)


def test_elfving_agrees_with_sampling() -> None:
    draws = np.random.default_rng(1).normal(1.057, 0.393, (4000, 158))
    sampled = sorted_mean(draws)
    assert np.abs(sampled - elfving(158, 1.057, 0.393)).max() < 0.02


def test_sampling_a_joint_distribution() -> None:
    together = np.random.default_rng(3).choice([1.0, 3.0], (2000, 1))
    expected = sorted_mean(np.tile(np.arange(4, 0, -1.0), (2000, 1)) * together)
    np.testing.assert_allclose(expected / expected[0], [1, 2, 3, 4])
    assert expected[0] == pytest.approx(2.0, abs=0.1)
    assert (np.diff(expected) >= 0).all()


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40).map(sorted))
def test_best_cutoff_is_the_best(times: list[float]) -> None:
    expected = np.array(times)
    cutoff = best_cutoff(expected)
    rate = throughput(expected)
    assert rate[cutoff - 1] == rate.max()
    assert (rate[cutoff:] < rate.max()).all()


def test_best_cutoff_by_hand() -> None:
    assert best_cutoff(np.array([8.0, 10.0])) == 2
    assert best_cutoff(np.array([1.0, 1.0, 1.0, 5.0])) == 3
    assert best_cutoff(np.array([1.0, 2.0, 3.0])) == 3  # equals: the larger
    assert best_cutoff(np.array([0.0, 0.0, 1.0])) == 2
    with pytest.raises(ValueError, match="no cutoff"):
        best_cutoff(np.array([]))


@given(
    st.lists(
        st.tuples(st.floats(-5, 5), st.floats(0, 3), st.floats(-50, 200)), min_size=1, max_size=30
    ),
    st.integers(0, 99),
)
def test_right_tail_respects_its_bound(cases: list[tuple[float, float, float]], seed: int) -> None:
    mean, std, bound = (np.array(column) for column in zip(*cases, strict=True))
    drawn = right_tail(np.random.default_rng(seed), mean, std, bound)
    assert np.isfinite(drawn).all()
    assert (drawn >= bound).all()


@pytest.mark.parametrize("bound", [-9.0, 0.0, 1.0, 3.0])
def test_right_tail_has_the_truncated_normals_mean(bound: float) -> None:
    count = 40_000
    full = np.ones(count)
    drawn = right_tail(np.random.default_rng(5), full * 2, full * 3, full * (2 + 3 * bound))
    tail = survival(np.array([bound]))[0]
    inverse_mills = np.exp(-bound * bound / 2) / np.sqrt(2 * np.pi) / tail
    assert drawn.mean() == pytest.approx(2 + 3 * inverse_mills, abs=0.05)


@pytest.mark.parametrize("make", PREDICTORS)
def test_predictors_keep_the_protocol(make: type[Predictor]) -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(1.0, 0.1, (20, 6))
    predictor, again = make(), make()
    slots = np.array([4, 0, 2])
    feed(predictor, rows[:19])
    assert predictor.expected(slots) is None
    feed(predictor, rows[19:])
    feed(again, rows)
    expected = predictor.expected(slots)
    assert expected is not None
    assert expected.dtype == np.float64
    assert expected.shape == (3,)
    assert (np.diff(expected) >= 0).all()
    assert (expected > 0).all()
    np.testing.assert_array_equal(expected, again.expected(slots))
    with pytest.raises(ValueError, match="two equal rows"):
        predictor.observe(rows[0], NONE)


@pytest.mark.parametrize("make", PREDICTORS)
def test_learners_come_and_go_and_clocks_break(make: type[Predictor]) -> None:
    predictor = make()
    generator = np.random.default_rng(0)
    for step in range(60):
        row = generator.normal(1.0, 0.1, 3 + step // 10)
        row[generator.random(len(row)) < 0.3] = np.nan
        row[generator.random(len(row)) < 0.05] = np.inf
        row[generator.random(len(row)) < 0.05] = -1.0
        predictor.observe(row, generator.random(len(row)) < 0.2)
        expected = predictor.expected(np.arange(len(row) + 4))  # some were never seen
        if step >= 20:
            assert expected is not None
            assert np.isfinite(expected).all()
            assert (np.diff(expected) >= 0).all()
            assert 0.3 < expected.min() < expected.max() < 10
    empty = make()
    feed(empty, np.full((25, 2), np.nan))
    assert empty.expected(np.arange(2)) is None


def test_normal_predictor_is_elfving_of_the_window() -> None:
    predictor = NormalPredictor()
    rows = np.random.default_rng(2).normal(1.0, 0.01, (50, 10))
    feed(predictor, rows)
    window = rows[-20:]
    expected = np.maximum(elfving(5, window.mean(), window.std()), window.min())
    np.testing.assert_allclose(predictor.expected(np.arange(5)), expected)


def test_normal_predictor_never_says_less_than_it_saw() -> None:
    predictor = NormalPredictor()
    feed(predictor, np.tile([0.1] * 9 + [100.0], (20, 1)))
    expected = predictor.expected(np.arange(10))
    assert expected is not None
    assert expected[0] == 0.1  # Elfving alone: below zero


def test_normal_predictor_imputes_from_the_right_tail() -> None:
    generator = np.random.default_rng(4)
    rows = generator.normal(1.0, 0.2, (200, 50))
    bound = np.quantile(rows, 0.7, axis=1, keepdims=True)
    plain, imputing, naive = NormalPredictor(), NormalPredictor(), NormalPredictor()
    feed(plain, rows)
    feed(imputing, np.minimum(rows, bound), rows > bound)
    feed(naive, np.minimum(rows, bound))
    largest = []
    for predictor in (plain, imputing, naive):
        expected = predictor.expected(np.arange(50))
        assert expected is not None
        largest.append(expected[-1])
    assert largest[1] == pytest.approx(largest[0], rel=0.1)
    assert largest[2] < 0.9 * largest[0]


def test_sampled_predictor_keeps_what_slows_learners_together() -> None:
    predictor = SampledPredictor()
    slow = np.arange(20) % 2 == 0
    feed(predictor, np.where(slow[:, None], 3.0, 1.0) * np.ones((20, 4)))
    expected = predictor.expected(np.arange(4))
    np.testing.assert_allclose(expected, 2.0)  # independent draws would spread from 1 to 3


def test_sampled_predictor_imputes_from_its_own_past() -> None:
    predictor = SampledPredictor()
    feed(predictor, np.tile([1.0, 5.0], (20, 1)))
    feed(predictor, np.tile([1.0, 1.0], (19, 1)), np.tile([0, 1], (19, 1)))
    expected = predictor.expected(np.arange(2))
    np.testing.assert_allclose(expected, [1.0, 5.0])
    fresh = SampledPredictor()
    feed(fresh, np.tile([1.0, 2.0], (20, 1)), np.tile([0, 1], (20, 1)))
    expected = fresh.expected(np.arange(2))
    assert expected is not None
    assert expected[1] == pytest.approx(2.0 * order_statistics.BEYOND)


def test_history_forgets_and_widens() -> None:
    history = History(2)
    for width in (1, 3, 2):
        history.append(np.full(width, float(width)))
    assert len(history) == 2
    np.testing.assert_array_equal(history.rows, [[3, 3, 3], [2, 2, np.nan]])
