"""Predictors of run times at work on a trace: which cutoff they choose, and what it is worth.

Each superstep all learners begin together. The c-th to finish ends it, the others are dropped and
their run times known only to be longer (Teng and Wood 2018, Algorithm 1 and section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gadei_ps.sync.order_statistics import best_cutoff, sorted_mean, throughput
from gadei_ps.sync.prediction import FloatArray, Predictor
from gadei_ps.sync.run_time_model import RunTimeModel

COLOURS = {
    "oracle": "black",
    "learned": "tab:red",
    "order": "tab:blue",
    "sampled": "tab:purple",
    "best fixed": "tab:orange",
    "full": "tab:green",
}


@dataclass
class Driven:
    """What came of each superstep, (iterations,) each.

    share: throughput against the oracle's, which knows the run times beforehand. seconds: until the
    cutoff, in the trace's unit.
    """

    cutoffs: npt.NDArray[np.int64]
    throughput: FloatArray
    share: FloatArray
    seconds: FloatArray


def oracle(times: FloatArray) -> FloatArray:
    """The greatest c / x_(c) of each superstep: (iterations, learners) gives (iterations,)."""
    return np.array([throughput(np.sort(row)).max() for row in times])


def fixed(times: FloatArray, cutoff: int) -> Driven:
    """The same cutoff each superstep."""
    return _driven(times, np.full(len(times), cutoff))


def best_fixed(times: FloatArray) -> int:
    """The cutoff with the best mean throughput over the whole trace: with hindsight."""
    ordered = np.sort(times, axis=1)
    return int((np.arange(1, ordered.shape[1] + 1) / ordered).mean(axis=0).argmax()) + 1


def drive(predictor: Predictor, times: FloatArray) -> Driven:
    """The predictor's own cutoffs; where it has none, all are awaited. It sees the first c only."""
    learners = np.arange(times.shape[1])
    cutoffs = []
    for row in times:
        expected = predictor.expected(learners)
        cutoff = len(learners) if expected is None else best_cutoff(expected)
        cutoffs.append(cutoff)
        bound = np.partition(row, cutoff - 1)[cutoff - 1]
        predictor.observe(np.minimum(row, bound), row > bound)
    return _driven(times, np.array(cutoffs))


def _driven(times: FloatArray, cutoffs: npt.NDArray[np.int64]) -> Driven:
    seconds = np.sort(times, axis=1)[np.arange(len(times)), cutoffs - 1]
    rate = cutoffs / seconds
    return Driven(cutoffs, rate, rate / oracle(times), seconds)


@dataclass
class Calibration:
    """Predicted and observed order statistics of the iterations with a prediction.

    All run times are known. error: mean of |predicted - observed| / observed for each order
    statistic, (learners,). covered: share of the observed ones within two predicted deviations,
    (learners,); NaN where no deviations are predicted.
    """

    error: FloatArray
    covered: FloatArray


def calibrate(predictor: Predictor, times: FloatArray) -> Calibration:
    """Over all supersteps of a trace: (iterations, learners)."""
    learners = np.arange(times.shape[1])
    nobody = np.zeros(len(learners), np.bool_)
    errors, covered = [], []
    for row in times:
        found = predicted(predictor, learners)
        if found is not None:
            away = np.abs(found[0] - np.sort(row))
            errors.append(away / np.sort(row))
            covered.append(np.where(np.isnan(found[1]), np.nan, away <= 2 * found[1]))
        predictor.observe(row, nobody)
    return Calibration(np.mean(errors, axis=0), np.mean(covered, axis=0))


def predicted(
    predictor: Predictor, learners: npt.NDArray[np.int64]
) -> tuple[FloatArray, FloatArray] | None:
    """Expected order statistics and their deviations, NaN where it has none; None at first."""
    if isinstance(predictor, RunTimeModel):
        draws = predictor.sampled(learners)
        if draws is None:
            return None
        return sorted_mean(draws), np.sort(draws, axis=1).std(axis=0)
    expected = predictor.expected(learners)
    return None if expected is None else (expected, np.full(len(expected), np.nan))


def percent(values: FloatArray) -> str:
    """The mean of shares."""
    return f"{100 * float(np.mean(values)):.1f} %"


def over(runs: Sequence[Driven], of: Callable[[Driven], FloatArray], begin: int, end: int) -> str:
    """The mean share of some iterations, and its range over the runs if there are several."""
    means = [100 * float(np.mean(of(run)[begin:end])) for run in runs]
    text = f"{np.mean(means):.1f} %"
    return text if len(means) == 1 else f"{text} ({min(means):.1f} to {max(means):.1f})"
