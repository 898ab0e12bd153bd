"""Runs predictors on a trace: which cutoffs they choose, and the throughput of these.

All learners begin each superstep together. The c-th learner to finish ends it. The others are
dropped, and their run times are known only to be longer (Teng and Wood 2018, Algorithm 1 and
section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gadei_ps.show.colours import SYNC
from gadei_ps.sync.order_statistics import best_cutoff, sorted_mean, throughput
from gadei_ps.sync.prediction import FloatArray, Predictor
from gadei_ps.sync.run_time_model import RunTimeModel

COLOURS = {
    "oracle": "black",
    "learned": SYNC["cutoff"],
    "order": SYNC["cutoff:by=order"],
    "sampled": SYNC["cutoff:by=sampled"],
    "best fixed": "tab:gray",
    "full": SYNC["bsp"],
}


@dataclass
class Driven:
    """The results of all supersteps, each of shape (iterations,).

    share: throughput over that of the oracle, which knows the run times in advance. seconds: time
    until the cutoff, in the trace's unit.
    """

    cutoffs: npt.NDArray[np.int64]
    throughput: FloatArray
    share: FloatArray
    seconds: FloatArray


def oracle(times: FloatArray) -> FloatArray:
    """The largest c / x_(c) of each superstep, (iterations,). times: (iterations, learners)."""
    return np.array([throughput(np.sort(row)).max() for row in times])


def fixed(times: FloatArray, cutoff: int) -> Driven:
    """The results with the same cutoff in each superstep."""
    return _driven(times, np.full(len(times), cutoff))


def best_fixed(times: FloatArray) -> int:
    """The cutoff with the best mean throughput over the whole trace, chosen with hindsight."""
    ordered = np.sort(times, axis=1)
    return int((np.arange(1, ordered.shape[1] + 1) / ordered).mean(axis=0).argmax()) + 1


def drive(predictor: Predictor, times: FloatArray) -> Driven:
    """The results of the predictor, which sees the first c. Without a cutoff, all are awaited."""
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
    """Predicted and observed order statistics of the iterations that have a prediction.

    All run times are known. error: mean of |predicted - observed| / observed for each order
    statistic, (learners,). covered: share of the observed values within two predicted deviations,
    (learners,); NaN if no deviations are predicted.
    """

    error: FloatArray
    covered: FloatArray


def calibrate(predictor: Predictor, times: FloatArray) -> Calibration:
    """The calibration over all supersteps of a trace. times: (iterations, learners)."""
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
    """Expected order statistics, and deviations or NaN. None while there is no prediction."""
    if isinstance(predictor, RunTimeModel):
        draws = predictor.sampled(learners)
        if draws is None:
            return None
        return sorted_mean(draws), np.sort(draws, axis=1).std(axis=0)
    expected = predictor.expected(learners)
    return None if expected is None else (expected, np.full(len(expected), np.nan))


def percent(values: FloatArray) -> str:
    """The mean of shares, as text."""
    return f"{100 * float(np.mean(values)):.1f}%"


def over(runs: Sequence[Driven], of: Callable[[Driven], FloatArray], begin: int, end: int) -> str:
    """The mean share of some iterations, with its range if there are several runs."""
    means = [100 * float(np.mean(of(run)[begin:end])) for run in runs]
    text = f"{np.mean(means):.1f}%"
    return text if len(means) == 1 else f"{text} ({min(means):.1f} to {max(means):.1f})"
