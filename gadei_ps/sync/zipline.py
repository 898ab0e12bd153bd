"""Finds the time of the next barrier: ElasticBSP's search over end times (Zhao et al. 2019).

The input is the end times of the next R iterations of each of n learners. The search chooses one
time of each learner, such that the chosen times lie closest together. The learner that ends first
waits for the last one, so the window, from the first to the last chosen time, is the cost of
waiting. Of equal windows the search takes the first.

`plan` gives the answer of the paper's ZipLine, which costs O(Rn^2), in O(Rn log n). The compiled
search is in search.py. The paper's own algorithms are in `benchmarks/reproduce/searches.py`.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from gadei_ps.kernels import loaded

EndTimes = npt.NDArray[np.float64]
Plan = tuple[npt.NDArray[np.int64], float]

UNIT = loaded.unit("zipline", "gadei_ps.sync.search")
_SEARCH = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 2, *[ctypes.c_uint64] * 6)
WRONG = ("", "a time is not finite", "must ascend in each row", "lie too far apart")


def plan(end_times: EndTimes) -> Plan:
    """Find the first smallest window that holds one time of each learner.

    end_times: float64 of shape (learners, R), finite and ascending in each row, in any unit.
    Returns the chosen index of each learner, int64 of shape (learners,), and the window in the same
    unit. Raises ValueError for other times.
    """
    times = rows(end_times)
    learners, ahead = times.shape
    # The search makes no arrays: this is its memory, see search.SIGNATURE.
    keys, owners = np.empty((2, times.size)), np.empty((2, times.size), np.int32)
    counts = np.empty(times.size + 1 + learners, np.int32)
    chosen, window = np.empty(learners, np.int64), np.empty(1)
    UNIT.load()
    at = (one.ctypes.data for one in (times, keys, owners, counts, chosen, window))
    check(_SEARCH(loaded.address(UNIT.name))(learners, ahead, *at))
    return chosen, float(window[0])


def rows(end_times: EndTimes) -> EndTimes:
    """The times, one after the other in memory. Raises ValueError for those of another shape."""
    times = np.ascontiguousarray(end_times, np.float64)
    if times.ndim != 2 or not times.size:
        raise ValueError(
            f"end_times: need one row of times for each learner, not shape {times.shape}"
        )
    return times


def check(wrong: int) -> None:
    """Raise ValueError for times that are wrong. wrong: an index of WRONG, 0 if they are right."""
    if wrong:
        raise ValueError(f"end_times: {WRONG[wrong]}")
