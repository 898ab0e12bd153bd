"""ElasticBSP's own algorithms (Zhao et al. 2019, section IV), as the paper writes them.

All have the arguments and results of `gadei_ps.sync.zipline.plan`. Numba compiles their loops;
ZipLine's times are sorted by NumPy, as the planner's are.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt

from gadei_ps.sync.zipline import EndTimes, Plan, checked

compiled = numba.njit(nogil=True, error_model="numpy")


def zipline_literal(end_times: EndTimes) -> Plan:
    """Algorithm 2, in O(Rn^2), because it searches the set for each new time.

    It stops if no time is left to fill the set. The paper does not describe this case.
    """
    times = checked(end_times)
    order = np.argsort(times, axis=None, kind="stable")
    owners = order // times.shape[1]
    chosen, window = _zipline_literal(len(times), times.ravel()[order], owners)
    return chosen, float(window)


def grid_scan(end_times: EndTimes) -> Plan:
    """Algorithm 1, a heuristic around each time of the learner that ends first, in O(R^2 n)."""
    return _scanned(_grid_scan, end_times)


def full_grid_scan(end_times: EndTimes) -> Plan:
    """Algorithm 1 around each time of every learner in turn, in O(R^2 n^2)."""
    return _scanned(_full_grid_scan, end_times)


def _scanned(scan: Callable[[EndTimes], Plan], end_times: EndTimes) -> Plan:
    """Return the result of a scan. Raises ValueError for times of the wrong form."""
    chosen, window = scan(np.ascontiguousarray(checked(end_times)))
    return chosen, float(window)


@compiled
def _shift(z: npt.NDArray[np.int32], gone: int, size: int) -> None:
    """Close the gap that an element leaves."""
    z[gone : size - 1] = z[gone + 1 : size]


@compiled
def _put(
    z: npt.NDArray[np.int32],
    z_owner: npt.NDArray[np.int32],
    size: int,
    at: int,
    owner: int,
) -> int:
    """Append to Z, and remove an older time of the same learner. Return the new size."""
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
def _zipline_literal(
    learners: int, omega: EndTimes, owners: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], float]:
    """omega: all times in ascending order. owners: their learners."""
    z = np.empty(learners + 1, np.int32)  # places in omega, in ascending order as those are
    z_owner = np.empty(learners + 1, np.int32)
    size = 0
    left = 0  # place of the leftmost element of omega that remains
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
    """Algorithm 1, lines 8 to 18, around the times of learner `base`; return the best window."""
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
