"""Ownership of the training set: each replica has a subset, and a dead replica's is divided.

In a pass, every sample belongs to one replica until it is answered, which it is when a gradient of
it counts. If the replica dies, exactly what it had not answered is divided among the members of its
group, so each sample is seen once a pass (Yan and Shao, section 3: data repartition).

Samples are numbered from 0. Sets of them are ranges, so the memory grows with the number of deaths
and of batches in flight, not with that of samples. Replicas agree on an order of the samples for
each pass by its number and a seed; the numbers here are places in that order.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class Ranges:
    """A set of whole numbers, as ascending half-open ranges that do not touch."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in ranges:
            self.add(begin, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._begins, self._ends, strict=True)

    def __len__(self) -> int:
        """Return the number of members of the set, not of ranges."""
        return sum(self._ends) - sum(self._begins)

    def add(self, begin: int, end: int) -> None:
        """Add the numbers from `begin` to `end` - 1. Those that are in the set stay."""
        if begin >= end:
            return
        first = bisect.bisect_left(self._ends, begin)  # those before end below `begin`
        last = bisect.bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]

    def remove(self, begin: int, end: int) -> int:
        """Remove the numbers from `begin` to `end` - 1; return how many of them were there."""
        if begin >= end:
            return 0
        first = bisect.bisect_right(self._ends, begin)
        last = bisect.bisect_left(self._begins, end)
        if first >= last:
            return 0
        kept = [
            (low, high)
            for low, high in (
                (self._begins[first], min(begin, self._ends[first])),
                (max(end, self._begins[last - 1]), self._ends[last - 1]),
            )
            if low < high
        ]
        before = sum(self._ends[first:last]) - sum(self._begins[first:last])
        self._begins[first:last] = [low for low, _ in kept]
        self._ends[first:last] = [high for _, high in kept]
        return before - sum(high - low for low, high in kept)

    def take(self, count: int) -> list[tuple[int, int]]:
        """Remove the `count` least numbers, or all if there are fewer; return their ranges."""
        taken = []
        while count > 0 and self._begins:
            begin = self._begins[0]
            end = min(self._ends[0], begin + count)
            count -= end - begin
            self.remove(begin, end)
            taken.append((begin, end))
        return taken


class Subsets(Generic[Owner]):
    """The owners of the samples of a pass that are not answered yet."""

    def __init__(self, samples: int, owners: Sequence[Owner]) -> None:
        """Divide samples 0 to `samples` - 1 among the owners, as equally as that allows."""
        if samples < 0 or not owners or len(set(owners)) != len(owners):
            raise ValueError(f"{samples} samples cannot be divided among {len(owners)} owners")
        self._owned: dict[Owner, Ranges] = {}
        self._divide(Ranges([(0, samples)]), owners)

    @property
    def owners(self) -> tuple[Owner, ...]:
        """All owners, in the order in which they came."""
        return tuple(self._owned)

    @property
    def left(self) -> int:
        """Number of samples of this pass that are not answered."""
        return sum(map(len, self._owned.values()))

    def owned(self, owner: Owner) -> int:
        """Return the number of the owner's samples that are not answered."""
        return len(self._owned[owner])

    def ranges(self, owner: Owner) -> list[tuple[int, int]]:
        """Return the owner's samples that are not answered."""
        return list(self._owned[owner])

    def keep(self, owner: Owner, unanswered: Ranges) -> int:
        """Record that all samples of the owner but these are answered; return how many."""
        answered = Ranges(self._owned[owner])
        for begin, end in unanswered:
            answered.remove(begin, end)
        for begin, end in answered:
            self._owned[owner].remove(begin, end)
        return len(answered)

    def take(self, owner: Owner, count: int) -> list[tuple[int, int]]:
        """Record answers to the owner's next samples, at most `count`; return their ranges."""
        return self._owned[owner].take(count)

    def gone(self, owner: Owner, heirs: Sequence[Owner]) -> int:
        """Divide the unanswered samples of an owner that has died or left; return their number.

        heirs: the members of its group that remain, in their order; owners, or they become some.
        Without any, the samples stay with the dead replica.
        """
        if owner in heirs:
            raise ValueError(f"{owner} is gone and cannot be an heir")
        left = self.owned(owner)
        if heirs:
            self._divide(self._owned.pop(owner), heirs)
        return left

    def _divide(self, ranges: Ranges, heirs: Sequence[Owner]) -> None:
        """Give the numbers in these ranges to the heirs, in pieces that differ by at most one."""
        whole, more = divmod(len(ranges), len(heirs))
        for place, heir in enumerate(heirs):
            owned = self._owned.setdefault(heir, Ranges())
            for begin, end in ranges.take(whole + (place < more)):
                owned.add(begin, end)
