"""The interface of a predictor of run times for Cutoff, and functions that several predictors use.

In a superstep every learner computes one gradient, and the first c that arrive are applied. To
choose c, Cutoff needs the run times of the next superstep in ascending order, for given learners.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

# Beyond this number of deviations the tail probability of the normal distribution underflows.
_FAR: Final = 36.0
_FLAT: Final = 1e-9  # deviation over mean; anything smaller is rounding


class Predictor(Protocol):
    """Learns from each superstep, and predicts the next one.

    Slots are small integers that the caller assigns to learners. Learners may come and go at any
    time. The caller calls `observe` once a superstep, and `expected` at most once in between.
    """

    def observe(self, times: FloatArray, censored: BoolArray) -> None:
        """Run times of one superstep, seconds, float64 (slots,).

        NaN: no learner has that slot, or its time is unknown. If `censored`, bool (slots,), is set,
        the time is a lower bound: the learner was dropped then.
        """
        ...

    def expected(self, slots: IntArray) -> FloatArray | None:
        """Expected order statistics of the next superstep for the learners in these slots.

        slots: int64 (m,), m > 0. Returns float64 (m,), ascending, seconds. Returns None while too
        little is known; the caller then waits for all learners.
        """
        ...


class History:
    """The last supersteps as rows, float64 (supersteps, slots), oldest first, NaN where unknown.

    A new slot adds columns.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.rows: FloatArray = np.empty((0, 0))

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, row: FloatArray) -> None:
        """Add a superstep. Forgets the oldest if there are more than `window`."""
        rows = self.widened(len(row))
        padded = np.full(rows.shape[1], np.nan)
        padded[: len(row)] = row
        self.rows = np.vstack((rows[-self.window + 1 :] if self.window > 1 else rows[:0], padded))

    def widened(self, slots: int) -> FloatArray:
        """The rows, with at least `slots` columns."""
        missing = slots - self.rows.shape[1]
        if missing > 0:
            self.rows = np.pad(self.rows, ((0, 0), (0, missing)), constant_values=np.nan)
        return self.rows


def checked(times: FloatArray, censored: BoolArray) -> tuple[FloatArray, BoolArray]:
    """Copy the arguments of `observe`. Raises ValueError for other shapes.

    An invalid time (negative or infinite) becomes NaN: one broken clock must not end a job.
    """
    known = np.array(times, dtype=np.float64)
    bound = np.array(censored, dtype=np.bool_)
    if known.ndim != 1 or bound.shape != known.shape:
        raise ValueError(f"times {known.shape} and censored {bound.shape} are not two equal rows")
    known[~(np.isfinite(known) & (known >= 0))] = np.nan
    return known, bound & ~np.isnan(known)


def inverse_normal(probabilities: FloatArray) -> FloatArray:
    """Return quantiles of the standard normal, of any shape. Each probability must be in (0, 1)."""
    quantile = NormalDist().inv_cdf
    flat = [quantile(p) for p in probabilities.ravel().tolist()]
    return np.array(flat, np.float64).reshape(probabilities.shape)


def survival(deviations: FloatArray) -> FloatArray:
    """P(Z > d) for a standard normal Z and each d, of any shape."""
    scaled = deviations.ravel() * math.sqrt(0.5)
    flat = [0.5 * math.erfc(d) for d in scaled.tolist()]
    return np.array(flat, np.float64).reshape(deviations.shape)


def right_tail(
    generator: np.random.Generator, mean: FloatArray, std: FloatArray, bound: FloatArray
) -> FloatArray:
    """One draw from each of m normal variables, given that it is above `bound`. All shapes (m,).

    Cutoff, section 4.2, imputes the run time of a dropped learner in this way. If the deviation is
    negligible, the result is the larger of mean and bound.
    """
    spreads = std > _FLAT * (np.abs(mean) + np.abs(bound))
    spread = np.where(spreads, std, 1.0)
    low = np.clip((bound - mean) / spread, -_FAR, None)
    # 1 - random() is in (0, 1]: its product with the tail is a probability that inverts.
    share = 1.0 - generator.random(len(mean))
    far = low > _FAR
    probability = np.where(far, 0.5, share * survival(np.minimum(low, _FAR)))
    drawn = -inverse_normal(np.clip(probability, 5e-324, 1 - 2**-53))
    # This far out, the tail is nearly exponential, with this rate.
    drawn = np.where(far, low - np.log(share) / np.maximum(low, 1.0), drawn)
    found = np.where(spreads, mean + spread * drawn, mean)
    imputed: FloatArray = np.maximum(found, bound)
    return imputed
