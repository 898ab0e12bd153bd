"""Finds the time of the next barrier: ElasticBSP's search over end times (Zhao et al. 2019).

The input is the end times of the next R iterations of each of n learners. The search chooses one
time of each learner, such that the chosen times lie closest together. The learner that ends first
waits for the last one, so the window, from the first to the last chosen time, is the cost of
waiting. Of equal windows the search takes the first.

`plan` gives the answer of the paper's ZipLine, which costs O(Rn^2), in O(Rn log n). The paper's own
algorithms are in `benchmarks/reproduce/searches.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import types

from gadei_ps.kernels.compiled import compiled, is_kept
from gadei_ps.kernels.unit import Unit

F = TypeVar("F", bound=Callable[..., Any])
EndTimes = npt.NDArray[np.float64]
Plan = tuple[npt.NDArray[np.int64], float]

CROWDED = 16
"""If more times than this share a part of the timeline on average, merging is faster."""


def plan(end_times: EndTimes) -> Plan:
    """Find the first smallest window that holds one time of each learner.

    end_times: float64 of shape (learners, R), finite and ascending in each row, in any unit.
    Returns the chosen index of each learner, int64 of shape (learners,), and the window in the same
    unit. Raises ValueError for other times.

    The times are sorted, as in ZipLine, in O(Rn log n) at most. The place of each learner's time in
    the set Z is known, so an older time is replaced in O(1). The place of the earliest time in Z
    only moves forward, so it is found in O(1) amortized.
    """
    return checked(_plan, end_times)


def checked(search: Callable[[EndTimes], Any], end_times: EndTimes) -> Plan:
    """The result of `search`, as `plan` says. Raises ValueError for times of the wrong form."""
    times = np.ascontiguousarray(end_times, np.float64)
    if times.ndim != 2 or not times.size:
        raise ValueError(
            f"end_times: need one row of times for each learner, not shape {times.shape}"
        )
    wrong = _wrong(times)
    if wrong:
        raise ValueError(f"end_times: {WRONG[wrong]}")
    chosen, window = search(times)
    return chosen, float(window)


def _search(function: F) -> F:
    """Compiled; makes arrays, so it counts their references."""
    return compiled(function, _nrt=True)


WRONG = ("", "a time is not finite", "must ascend in each row", "lie too far apart")


@_search
def _wrong(times: EndTimes) -> int:
    """Return an index of WRONG, 0 for times of the right form."""
    low, high = np.inf, -np.inf
    for learner in range(times.shape[0]):
        row = times[learner]
        descends = False
        finite = np.isfinite(row[0])
        for i in range(1, row.size):
            finite &= np.isfinite(row[i])
            descends |= row[i] < row[i - 1]
        if not finite:
            return 1
        if descends:
            return 2
        low = min(low, row[0])
        high = max(high, row[-1])
    return 0 if np.isfinite(high - low) else 3


@_search
def merged(times: EndTimes) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """Merge all times in ascending order; return them and their learners.

    Of equal times, that of the lower learner comes first. Each row is sorted; neighbouring rows are
    merged in pairs until one is left, in O(Rn log n).
    """
    learners, ahead = times.shape
    total = learners * ahead
    keys = times.copy().reshape(total)
    owners = np.empty(total, np.int32)
    for learner in range(learners):
        owners[learner * ahead : (learner + 1) * ahead] = learner
    other_keys = np.empty(total)
    other_owners = np.empty(total, np.int32)
    width = ahead
    while width < total:
        for low in range(0, total, 2 * width):
            middle = min(low + width, total)
            high = min(low + 2 * width, total)
            i, k, at = low, middle, low
            while i < middle and k < high:
                # No branch, because a processor could not predict it.
                right = keys[k] < keys[i]
                source = k if right else i
                other_keys[at] = keys[source]
                other_owners[at] = owners[source]
                k += right
                i += not right
                at += 1
            rest = i if i < middle else k
            other_keys[at:high] = keys[rest : rest + high - at]
            other_owners[at:high] = owners[rest : rest + high - at]
        keys, other_keys = other_keys, keys
        owners, other_owners = other_owners, owners
        width *= 2
    return keys, owners


@_search
def in_order(times: EndTimes) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """Do the same as `merged`, in O(Rn) if the times spread over the timeline.

    Counting puts each time into one of Rn equal parts of the timeline; insertion sorts the times of
    a part. If many times share few parts, as with learners of exactly equal speed, all are merged
    instead.
    """
    learners, ahead = times.shape
    total = learners * ahead
    low = times[0, 0]
    high = times[0, ahead - 1]
    for learner in range(learners):
        low = min(low, times[learner, 0])
        high = max(high, times[learner, ahead - 1])
    scale = (total - 1) / (high - low)
    if not np.isfinite(scale):  # all times are equal, or nearly
        return merged(times)
    ends = np.zeros(total + 1, np.int32)
    for learner in range(learners):
        for i in range(ahead):
            ends[int((times[learner, i] - low) * scale) + 1] += np.int32(1)
    crowd = 0
    for part in range(total):
        crowd += np.int64(ends[part + 1]) * ends[part + 1]
        ends[part + 1] += ends[part]
    if crowd > CROWDED * total:
        return merged(times)
    keys = np.empty(total)
    owners = np.empty(total, np.int32)
    for learner in range(learners):
        for i in range(ahead):
            part = int((times[learner, i] - low) * scale)
            keys[ends[part]] = times[learner, i]
            owners[ends[part]] = learner
            ends[part] += np.int32(1)
    for at in range(1, total):
        key = keys[at]
        if keys[at - 1] <= key:
            continue
        owner = owners[at]
        k = at
        while k > 0 and keys[k - 1] > key:
            keys[k] = keys[k - 1]
            owners[k] = owners[k - 1]
            k -= 1
        keys[k] = key
        owners[k] = owner
    return keys, owners


@_search
def _plan(times: EndTimes) -> tuple[npt.NDArray[np.int64], float]:
    learners = times.shape[0]
    keys, owners = in_order(times)
    latest = np.full(learners, -1, np.int32)  # place in the order of each learner's time in Z
    missing = learners
    at = 0
    while missing:
        missing -= latest[owners[at]] < 0
        latest[owners[at]] = at
        at += 1
    first = 0  # place of the earliest time in Z
    best = np.inf
    best_at = 0
    while True:
        # A time that a later one of the same learner has replaced is no longer in Z.
        while latest[owners[first]] != first:
            first += 1
        if keys[at - 1] - keys[first] < best:
            best = keys[at - 1] - keys[first]
            best_at = at - 1
        # The window only grows until the earliest member is replaced.
        earliest = owners[first]
        while at < keys.size and owners[at] != earliest:
            latest[owners[at]] = at
            at += 1
        if at == keys.size:
            break
        latest[earliest] = at
        at += 1
    chosen = np.full(learners, -1)
    for at in range(best_at + 1):  # a learner's times come in the order of its row
        chosen[owners[at]] += 1
    return chosen, best


SIGNATURE = (types.float64[:, ::1],)


def load() -> None:
    """Load `plan` from Numba's cache, or compile it (a few seconds, once)."""
    searches: tuple[Any, ...] = (_wrong, _plan)
    for search in searches:
        search.compile(SIGNATURE)


def _is_kept() -> bool:
    return is_kept(SIGNATURE, _wrong) and is_kept(SIGNATURE, _plan)


UNIT = Unit("zipline", lambda: load(), _is_kept)
