"""Ownership of the training set: each replica has a subset, and a dead replica's is divided.

In a pass, every sample belongs to one replica until it is answered. A replica answers a sample when
a gradient of it counts; what was handed out, and not answered, is still the replica's. If the
replica dies, exactly what it had not answered is divided among the members of its group, so each
sample is seen once a pass (Yan and Shao, section 3: data repartition).

Samples are numbered from 0. Sets of them are ranges, so the memory grows with the number of deaths
and of batches in flight, not with that of samples. Replicas agree on an order of the samples for
each pass by its number and a seed; the numbers here are places in that order.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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

    def holds(self, begin: int, end: int) -> bool:
        """Return whether all numbers from `begin` to `end` - 1 are in the set."""
        first = bisect.bisect_right(self._begins, begin) - 1
        return begin >= end or (first >= 0 and end <= self._ends[first])


class Subsets(Generic[Owner]):
    """The owners of the samples of the present pass, and the samples still to be answered."""

    def __init__(self, samples: int, owners: Sequence[Owner]) -> None:
        """Divide samples 0 to `samples` - 1 among the owners, as equally as that allows."""
        if samples < 0 or not owners or len(set(owners)) != len(owners):
            raise ValueError(f"{samples} samples cannot be divided among {len(owners)} owners")
        self.samples = samples
        self._waiting: dict[Owner, Ranges] = {owner: Ranges() for owner in owners}
        self._handed: dict[Owner, Ranges] = {owner: Ranges() for owner in owners}
        self._divide([(0, samples)] if samples else [], owners)

    @classmethod
    def owned_by(
        cls, samples: int, owned: Mapping[Owner, Iterable[tuple[int, int]]]
    ) -> Subsets[Owner]:
        """Make a pass of which each owner has these samples left, and nothing is handed out."""
        made = cls(0, list(owned))
        made.samples = samples
        made._waiting = {owner: Ranges(ranges) for owner, ranges in owned.items()}
        return made

    @property
    def owners(self) -> tuple[Owner, ...]:
        """All owners, in the order in which they came."""
        return tuple(self._waiting)

    @property
    def left(self) -> int:
        """Number of samples of this pass that are not answered."""
        return sum(map(self.owned, self._waiting))

    def owned(self, owner: Owner) -> int:
        """Return the number of the owner's samples that are not answered."""
        return len(self._waiting[owner]) + len(self._handed[owner])

    def ranges(self, owner: Owner) -> list[tuple[int, int]]:
        """Return the owner's samples that are not answered."""
        return list(Ranges([*self._waiting[owner], *self._handed[owner]]))

    def keep(self, owner: Owner, unanswered: Ranges) -> int:
        """Record that all samples of the owner but these are answered; return how many."""
        answered = Ranges(self.ranges(owner))
        before = len(answered)
        for begin, end in unanswered:
            answered.remove(begin, end)
        left = Ranges(self.ranges(owner))
        for begin, end in answered:
            left.remove(begin, end)
        self._waiting[owner], self._handed[owner] = left, Ranges()
        return before - len(left)

    def hand_out(self, owner: Owner, count: int) -> list[tuple[int, int]]:
        """Hand out the owner's next samples, at most `count`, as ranges. Empty: it has no more."""
        ranges = self._waiting[owner].take(count)
        for begin, end in ranges:
            self._handed[owner].add(begin, end)
        return ranges

    def answer(self, owner: Owner, ranges: Iterable[tuple[int, int]]) -> None:
        """Record answers to samples that were handed out to the owner. Raises ValueError if not."""
        listed = list(ranges)
        handed = self._handed[owner]
        for begin, end in listed:
            if not handed.holds(begin, end):
                raise ValueError(f"samples {begin} to {end - 1} are not with {owner}")
            handed.remove(begin, end)

    def gone(self, owner: Owner, heirs: Sequence[Owner]) -> int:
        """Divide the unanswered samples of an owner that has died or left; return their number.

        heirs: the members of its group that remain, in their order; owners, or they become some.
        If there are none, the samples stay with the dead replica until another one takes its
        place or the pass is abandoned: see `replace`.
        """
        left = Ranges([*self._waiting[owner], *self._handed[owner]])
        self._waiting[owner], self._handed[owner] = left, Ranges()
        if not heirs:
            return len(left)
        if owner in heirs:
            raise ValueError(f"{owner} is gone and cannot be an heir")
        del self._waiting[owner], self._handed[owner]
        self._divide(left, heirs)
        return len(left)

    def replace(self, owner: Owner, by: Owner) -> None:
        """Give a joining replica all samples that a dead replica still owned."""
        if by in self._waiting:
            raise ValueError(f"{by} owns samples already")
        self._waiting[by] = Ranges([*self._waiting.pop(owner), *self._handed.pop(owner)])
        self._handed[by] = Ranges()

    def next_pass(self, owners: Sequence[Owner]) -> None:
        """Divide all samples for the next pass. Raises ValueError if some are not answered yet."""
        if self.left:
            raise ValueError(f"{self.left} samples of this pass are not answered")
        self.__init__(self.samples, owners)  # type: ignore[misc]

    def _divide(self, ranges: Iterable[tuple[int, int]], heirs: Sequence[Owner]) -> None:
        """Give the numbers in these ranges to the heirs, in pieces that differ by at most one."""
        rest = Ranges(ranges)
        whole, more = divmod(len(rest), len(heirs))
        for place, heir in enumerate(heirs):
            self._handed.setdefault(heir, Ranges())
            waiting = self._waiting.setdefault(heir, Ranges())
            for begin, end in rest.take(whole + (place < more)):
                waiting.add(begin, end)
