"""When the next barrier is to be: ElasticBSP's search over predicted end times (Zhao et al. 2019).

Given are the end times of the next R iterations of each of n learners. Sought is one of each, such
that they lie closest together: whoever comes first waits for the last, so the window, from the
first to the last of the chosen times, is what waiting costs. Of windows alike the first is taken.

- `plan` is what the server uses: the same answer as `zipline_literal`, in O(Rn log n).
- `zipline_literal`, `full_grid_scan` and `grid_scan` are section IV's algorithms, word by word.

All take `end_times`, float64 of shape (learners, R), finite and ascending in each row, in any unit,
and return the chosen index of each learner, int64 of shape (learners,), and the window in the same
unit. They raise ValueError for anything else. All are compiled alike, so that comparing their times
compares the algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gadei_ps.kernels.compiled import compiled

EndTimes = npt.NDArray[np.float64]
Plan = tuple[npt.NDArray[np.int64], float]

CROWDED = 16
"""Times beside a time on its part of the timeline, in the mean, from which on merging is faster."""


def plan(end_times: EndTimes) -> Plan:
    """The first smallest window that holds one time of each learner.

    The times are brought in order, as in ZipLine, in O(Rn log n) at most. For each learner is known
    where in that order its time in Z stands, so an older one is replaced in O(1); and the place of
    the earliest one in Z only moves on, so it is found in O(1) amortized.
    """
    return _checked(_plan, end_times)


def zipline_literal(end_times: EndTimes) -> Plan:
    """Algorithm 2: O(Rn^2), because the set is searched for each time that comes.

    It stops when no time is left to fill the set with, on which the text is silent.
    """
    return _checked(_zipline_literal, end_times)


def grid_scan(end_times: EndTimes) -> Plan:
    """Algorithm 1, a heuristic: around each time of the learner that is first to end, O(R^2 n)."""
    return _checked(_grid_scan, end_times)


def full_grid_scan(end_times: EndTimes) -> Plan:
    """Algorithm 1 around each time of every learner in turn, O(R^2 n^2)."""
    return _checked(_full_grid_scan, end_times)


def _checked(search: Callable[[EndTimes], Any], end_times: EndTimes) -> Plan:
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


WRONG = ("", "a time is not finite", "must ascend in each row", "lie too far apart")


@compiled
def _wrong(times: EndTimes) -> int:
    """Which of WRONG, 0 for none."""
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


@compiled
def _merged(times: EndTimes) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """All times in ascending order, and whose they are; of equal times the lower learner's first.

    Neighbouring rows, each in order already, are merged in pairs until one is left: O(Rn log n).
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
                # Without a branch, which a processor could not foretell.
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


@compiled
def _sorted(times: EndTimes) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """The same as `_merged`, in O(Rn) where the times spread over the timeline.

    Each goes to one of Rn equal parts of the timeline, by counting; what lies in one part is then
    put in order by insertion. Where they lie in heaps, as those of learners that are exactly alike,
    they are merged instead.
    """
    learners, ahead = times.shape
    total = learners * ahead
    low = times[0, 0]
    high = times[0, ahead - 1]
    for learner in range(learners):
        low = min(low, times[learner, 0])
        high = max(high, times[learner, ahead - 1])
    scale = (total - 1) / (high - low)
    if not np.isfinite(scale):  # all at one time, or as good as that
        return _merged(times)
    ends = np.zeros(total + 1, np.int32)
    for learner in range(learners):
        for i in range(ahead):
            ends[int((times[learner, i] - low) * scale) + 1] += np.int32(1)
    crowd = 0
    for part in range(total):
        crowd += np.int64(ends[part + 1]) * ends[part + 1]
        ends[part + 1] += ends[part]
    if crowd > CROWDED * total:
        return _merged(times)
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


@compiled
def _plan(times: EndTimes) -> tuple[npt.NDArray[np.int64], float]:
    learners = times.shape[0]
    keys, owners = _sorted(times)
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
        # What a later time of the same learner has replaced is no member any more.
        while latest[owners[first]] != first:
            first += 1
        if keys[at - 1] - keys[first] < best:
            best = keys[at - 1] - keys[first]
            best_at = at - 1
        # Until the earliest member is replaced, the window only grows.
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


@compiled
def _shift(z: npt.NDArray[np.int32], gone: int, size: int) -> None:
    """Closes the gap of the element that is gone."""
    z[gone : size - 1] = z[gone + 1 : size]


@compiled
def _put(
    z: npt.NDArray[np.int32],
    z_owner: npt.NDArray[np.int32],
    size: int,
    at: int,
    owner: int,
) -> int:
    """Appends to Z; takes out the older time of the same learner, if there is one."""
    for i in range(size):
        if z_owner[i] == owner:
            _shift(z, i, size)
            _shift(z_owner, i, size)
            size -= 1
            break
    z[size] = at
    z_owner[size] = owner
    return size + 1


@compiled
def _zipline_literal(times: EndTimes) -> tuple[npt.NDArray[np.int64], float]:
    learners = times.shape[0]
    omega, owners = _sorted(times)
    z = np.empty(learners + 1, np.int32)  # places in omega, in ascending order as those are
    z_owner = np.empty(learners + 1, np.int32)
    size = 0
    left = 0  # the very left element of omega that is still there
    while size < learners:
        size = _put(z, z_owner, size, left, owners[left])
        left += 1
    best = omega[z[size - 1]] - omega[z[0]]
    best_z = z[:learners].copy()
    while left < omega.size:
        _shift(z, 0, size)  # Z <- Z - min(Z)
        _shift(z_owner, 0, size)
        size -= 1
        while size < learners and left < omega.size:
            size = _put(z, z_owner, size, left, owners[left])
            left += 1
        if size < learners:
            break
        window = omega[z[size - 1]] - omega[z[0]]
        if window < best:
            best = window
            best_z[:] = z[:learners]
    chosen = np.full(learners, -1)
    member = np.zeros(omega.size, np.bool_)
    for at in best_z:
        member[at] = True
    index = np.zeros(learners, np.int64)
    for at in range(omega.size):
        if member[at]:
            chosen[owners[at]] = index[owners[at]]
        index[owners[at]] += 1
    return chosen, best


@compiled
def _scan_row(times: EndTimes, base: int, chosen: npt.NDArray[np.int64], best: float) -> float:
    """Algorithm 1, lines 8 to 18, around the times of learner `base`; the best window so far."""
    learners, ahead = times.shape
    z = np.empty(learners, np.int64)
    for point in range(ahead):
        e = times[base, point]
        z[base] = point
        low = e
        high = e
        for learner in range(learners):
            if learner == base:
                continue
            nearest = 0
            distance = np.inf
            for i in range(ahead):
                if abs(times[learner, i] - e) < distance:
                    distance = abs(times[learner, i] - e)
                    nearest = i
            z[learner] = nearest
            low = min(low, times[learner, nearest])
            high = max(high, times[learner, nearest])
        if high - low < best:
            best = high - low
            chosen[:] = z
    return best


@compiled
def _grid_scan(times: EndTimes) -> tuple[npt.NDArray[np.int64], float]:
    chosen = np.zeros(times.shape[0], np.int64)
    base = 0
    for learner in range(times.shape[0]):
        if times[learner, 0] < times[base, 0]:
            base = learner
    best = _scan_row(times, base, chosen, np.inf)
    return chosen, best


@compiled
def _full_grid_scan(times: EndTimes) -> tuple[npt.NDArray[np.int64], float]:
    chosen = np.zeros(times.shape[0], np.int64)
    best = np.inf
    for base in range(times.shape[0]):
        best = _scan_row(times, base, chosen, best)
    return chosen, best


def load() -> None:
    """Loads `plan` from Numba's cache, or compiles it (a few seconds, once)."""
    plan(np.ones((1, 1)))
