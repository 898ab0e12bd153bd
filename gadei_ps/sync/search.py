"""ElasticBSP's search over end times, compiled; `zipline.plan` says what it finds.

The times are sorted, as in ZipLine, in O(Rn log n) at most. The place of each learner's time in the
set Z is known, so an older time is replaced in O(1). The place of the earliest time in Z only moves
forward, so it is found in O(1) amortized.

The arrays that it works with are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, types

from gadei_ps.kernels.compiled import inner

Times = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int32]

CROWDED = 16
"""Number of times in a part of the timeline, on average, above which merging is faster."""


@inner
def wrong(times: Times) -> int:
    """Return an index of zipline.WRONG, 0 for times of the right form."""
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


@inner
def merge(times: Times, all_keys: Times, all_owners: Numbers) -> None:
    """Merge all times in ascending order, and their learners, into the first row of each.

    Of equal times, that of the lower learner comes first. Each row is sorted; neighbouring rows are
    merged in pairs until one is left, in O(Rn log n).

    all_keys, all_owners: of shape (2, Rn); all of both is written over.
    """
    learners, ahead = times.shape
    total = learners * ahead
    for learner in range(learners):
        for i in range(ahead):
            all_keys[0, learner * ahead + i] = times[learner, i]
            all_owners[0, learner * ahead + i] = learner
    here = 0  # the row that holds them
    width = ahead
    while width < total:
        keys, other_keys = all_keys[here], all_keys[1 - here]
        owners, other_owners = all_owners[here], all_owners[1 - here]
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
            for i in range(high - at):
                other_keys[at + i] = keys[rest + i]
                other_owners[at + i] = owners[rest + i]
        here = 1 - here
        width *= 2
    if here:
        for i in range(total):
            all_keys[0, i] = all_keys[1, i]
            all_owners[0, i] = all_owners[1, i]


@inner
def in_order(times: Times, all_keys: Times, all_owners: Numbers, ends: Numbers) -> None:
    """Do the same as `merge`, in O(Rn) if the times spread over the timeline.

    Counting puts each time into one of Rn equal parts of the timeline; insertion sorts the times of
    a part. If many times share few parts, as with learners of exactly equal speed, all are merged
    instead.

    ends: of shape (Rn + 1,), written over.
    """
    learners, ahead = times.shape
    total = learners * ahead
    keys, owners = all_keys[0], all_owners[0]
    low = times[0, 0]
    high = times[0, ahead - 1]
    for learner in range(learners):
        low = min(low, times[learner, 0])
        high = max(high, times[learner, ahead - 1])
    scale = (total - 1) / (high - low)
    if not np.isfinite(scale):  # all times are equal, or nearly
        merge(times, all_keys, all_owners)
        return
    for part in range(total + 1):
        ends[part] = 0
    for learner in range(learners):
        for i in range(ahead):
            ends[int((times[learner, i] - low) * scale) + 1] += np.int32(1)
    crowd = 0
    for part in range(total):
        crowd += np.int64(ends[part + 1]) * ends[part + 1]
        ends[part + 1] += ends[part]
    if crowd > CROWDED * total:
        merge(times, all_keys, all_owners)
        return
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


@inner
def _choose(keys: Times, owners: Numbers, latest: Numbers, chosen: npt.NDArray[np.int64]) -> float:
    """Set the chosen index of each learner; return the window. The keys ascend.

    latest: of shape (learners,), written over: the place in the order of each learner's time in Z.
    """
    for learner in range(latest.size):
        latest[learner] = -1
        chosen[learner] = -1
    missing = latest.size
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
    for at in range(best_at + 1):  # a learner's times come in the order of its row
        chosen[owners[at]] += 1
    return best


@inner
def _row(at: Any, size: int) -> Any:
    """Memory as an array."""
    return carray(at, (size,))


@inner
def _table(at: Any, rows: int, columns: int) -> Any:
    return carray(at, (rows, columns))


def _search(
    learners: int,
    ahead: int,
    times_at: Any,
    keys_at: Any,
    owners_at: Any,
    counts_at: Any,
    chosen_at: Any,
    window_at: Any,
) -> int:
    """Return what `wrong` does; if that is 0, set what is chosen and the window.

    A C function of pointers. times: of shape (learners, ahead). keys, owners: see merge().
    counts: for in_order() and _choose(), one after the other. chosen: of shape (learners,).
    """
    times = _table(times_at, learners, ahead)
    told = wrong(times)
    if told:
        return told
    total = times.size
    keys, owners = _table(keys_at, 2, total), _table(owners_at, 2, total)
    counts = _row(counts_at, total + 1 + learners)
    in_order(times, keys, owners, counts)
    chosen = _row(chosen_at, learners)
    window_at[0] = _choose(keys[0], owners[0], counts[total + 1 :], chosen)
    return 0


_doubles, _numbers = types.CPointer(types.float64), types.CPointer(types.int32)
SIGNATURE = types.int64(
    *(types.int64, types.int64, _doubles, _doubles, _numbers, _numbers),
    *(types.CPointer(types.int64), _doubles),
)


def source(name: str) -> tuple[Any, Callable[..., int]]:
    """Return the source that the unit is compiled from."""
    return SIGNATURE, _search
