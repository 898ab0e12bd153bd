"""Finds the time of the next barrier: ElasticBSP's search over end times (Zhao et al. 2019).

The input is the end times of the next R iterations of each of n learners. The search chooses one
time of each learner, such that the chosen times lie closest together. The learner that ends first
waits for the last one, so the window, from the first to the last chosen time, is the cost of
waiting. Of equal windows the search takes the first.

`plan` gives the answer of the paper's ZipLine, which costs O(Rn^2), in O(Rn log n). The paper's own
algorithms are in `benchmarks/reproduce/searches.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EndTimes = npt.NDArray[np.float64]
Plan = tuple[npt.NDArray[np.int64], float]


def plan(end_times: EndTimes) -> Plan:
    """Find the first smallest window that holds one time of each learner.

    end_times: float64 of shape (learners, R), finite and ascending in each row, in any unit.
    Returns the chosen index of each learner, int64 of shape (learners,), and the window in the same
    unit. Raises ValueError for other times.
    """
    times = checked(end_times)
    learners, ahead = times.shape
    order = np.argsort(times, axis=None, kind="stable")
    in_order = times.ravel()[order]
    places = np.empty(times.shape, np.int64)
    places.flat[order] = np.arange(times.size)
    # The place at which a window that begins at each place has a time of every learner: the last
    # of the learners' next times. A time is the next one after the learner's time before it.
    ends = np.zeros(times.size, np.int64)
    ends[0] = places[:, 0].max()
    ends[places[:, :-1] + 1] = places[:, 1:]
    ends = np.maximum.accumulate(ends)
    begins = np.arange(places[:, -1].min() + 1)
    windows = in_order[ends[begins]] - in_order[begins]
    best = int(windows.argmin())
    before = order[: ends[best] + 1] // ahead  # the learner of each time up to the window's end
    return np.bincount(before, minlength=learners) - 1, float(windows[best])


def checked(end_times: EndTimes) -> EndTimes:
    """Return the times as float64. Raises ValueError for those that `plan` does not take."""
    times = np.asarray(end_times, np.float64)
    if times.ndim != 2 or not times.size:
        raise ValueError(
            f"end_times: need one row of times for each learner, not shape {times.shape}"
        )
    if not np.isfinite(times).all():
        raise ValueError("end_times: a time is not finite")
    if (times[:, 1:] < times[:, :-1]).any():
        raise ValueError("end_times: must ascend in each row")
    with np.errstate(over="ignore"):
        if not np.isfinite(times.max() - times.min()):
            raise ValueError("end_times: lie too far apart")
    return times
