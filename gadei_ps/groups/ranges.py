"""Sets of whole numbers, whose memory grows with the number of their pieces."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator


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
