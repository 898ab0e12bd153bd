"""Expected order statistics of run times, the best cutoff for them, and two simple predictors.

After Teng and Wood 2018 (Cutoff SGD), section 3. Let x_(1) <= ... <= x_(n) be the run times of a
superstep in ascending order. A superstep that waits for the first c gradients has a throughput of
c / x_(c) gradients a second. The cutoff is the c for which that is largest.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np

from gadei_ps.sync.prediction import (
    BoolArray,
    FloatArray,
    History,
    IntArray,
    checked,
    inverse_normal,
    right_tail,
)

WINDOW: Final = 20
"""Number of past supersteps that the predictors here use: the paper's lag."""

BEYOND: Final = 1.1
"""Factor: a dropped learner's run time is its bound times this, if no better guess is known."""


def elfving(n: int, mean: float, std: float) -> FloatArray:
    """Expected order statistics of `n` independent normal run times: float64 (n,), ascending.

    Elfving 1947, in the form of Royston 1982 (the paper's equation 3, whose symbols are missing in
    its text): mean + std * Phi^-1((i - pi/8) / (n - pi/4 + 1)) for i = 1 ... n. For the largest of
    158 run times with mean 1.057 and deviation 0.393 it gives 2.1047; the paper has 2.1063.
    """
    if n < 1:
        raise ValueError(f"order statistics of {n} run times; there must be one at least")
    expected: FloatArray = mean + std * _scores(n)
    return expected


@lru_cache(maxsize=16)
def _scores(n: int) -> FloatArray:
    ranks: FloatArray = np.arange(1.0, n + 1.0)
    scores = inverse_normal((ranks - math.pi / 8) / (n - math.pi / 4 + 1))
    scores.flags.writeable = False  # all callers share it
    return scores


def sorted_mean(draws: FloatArray) -> FloatArray:
    """Expected order statistics of a joint distribution, from draws of it (section 3.1.1).

    draws: float64 (draws, n). Each row is sorted, and the sorted rows are averaged: float64 (n,),
    ascending.
    """
    mean: FloatArray = np.sort(draws, axis=1).mean(axis=0)
    # Rounding may swap neighbours that are equal in every draw.
    np.maximum.accumulate(mean, out=mean)
    return mean


def throughput(expected: FloatArray) -> FloatArray:
    """c / x_(c) for c = 1 ... n, gradients a second, from ascending run times (n,) in seconds.

    A run time of 0 gives infinity.
    """
    with np.errstate(divide="ignore"):
        rate: FloatArray = np.arange(1, len(expected) + 1) / np.asarray(expected, np.float64)
    return rate


def best_cutoff(expected: FloatArray) -> int:
    """The c, from 1, that maximises c / x_(c). Of equal ones the largest, which drops the fewest.

    expected: ascending run times (n,), seconds. Raises ValueError if there are none.
    """
    if not len(expected):
        raise ValueError("there is no cutoff without run times")
    return len(expected) - int(np.argmax(throughput(expected)[::-1]))


class _Windowed:
    """Has a history of the last WINDOW supersteps, and makes its random choices repeatably."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(0)
        self._history = History(WINDOW)


class NormalPredictor(_Windowed):
    """Run times are independent and normal, the same for all learners (the paper's 'order').

    Mean and deviation are taken from the last WINDOW supersteps. The expected order statistics
    follow Elfving's formula. None is below the shortest run time of the window, because a normal
    variable may be negative. A censored run time is replaced by a draw from the right tail of the
    normal distribution that was estimated before.
    """

    def observe(self, times: FloatArray, censored: BoolArray) -> None:
        """See Predictor."""
        row, bound = checked(times, censored)
        if bound.any():
            # In the first superstep, only its own arrivals are known.
            mean, std = self._moments() or _moments(row[~bound]) or (0.0, 0.0)
            count = int(bound.sum())
            row[bound] = right_tail(
                self._generator, np.full(count, mean), np.full(count, std), row[bound]
            )
        self._history.append(row)

    def expected(self, slots: IntArray) -> FloatArray | None:
        """See Predictor; None until WINDOW supersteps have been seen."""
        moments = self._moments()
        if len(self._history) < WINDOW or moments is None:
            return None
        found: FloatArray = np.maximum(elfving(len(slots), *moments), np.nanmin(self._history.rows))
        return found

    def _moments(self) -> tuple[float, float] | None:
        return _moments(self._history.rows)


def _moments(times: FloatArray) -> tuple[float, float] | None:
    """Mean and deviation of the times that are not NaN; None if there is none."""
    known = times[~np.isnan(times)]
    return (float(known.mean()), float(known.std())) if len(known) else None


class SampledPredictor(_Windowed):
    """The next superstep is one of the last WINDOW, each as likely: no model, no training.

    Learners are drawn jointly. This keeps slow-downs that several learners share, and which
    learners are slow. There are few rows, so the expectation is taken exactly, over all of them,
    and not over samples. If a row lacks a learner (one that joined later), its value is drawn from
    the learner's other rows, else from the row's other learners.

    A censored run time is replaced by a draw from those of the learner's own run times in the
    window that are above the bound. If there is none, it is replaced by the bound times BEYOND.
    """

    def observe(self, times: FloatArray, censored: BoolArray) -> None:
        """See Predictor."""
        row, bound = checked(times, censored)
        past = self._history.widened(len(row))
        for slot in np.flatnonzero(bound).tolist():
            longer = past[past[:, slot] > row[slot], slot]
            if len(longer):
                row[slot] = longer[self._generator.integers(len(longer))]
            else:
                row[slot] *= BEYOND
        self._history.append(row)

    def expected(self, slots: IntArray) -> FloatArray | None:
        """See Predictor; None until WINDOW supersteps have been seen."""
        if len(self._history) < WINDOW:
            return None
        rows = self._history.widened(int(slots.max()) + 1)[:, slots]
        rows = self._without_gaps(rows[~np.isnan(rows).all(axis=1)])
        return sorted_mean(rows) if len(rows) else None

    def _without_gaps(self, rows: FloatArray) -> FloatArray:
        """Fill the gaps of rows (supersteps, m). Each row has at least one value."""
        pick = self._generator.choice
        known = ~np.isnan(rows)
        filled = rows.copy()
        for row, column in np.argwhere(~known).tolist():
            own = rows[known[:, column], column]
            filled[row, column] = pick(own if len(own) else rows[row, known[row]])
        return filled
