"""Counts whole numbers in bounded memory, for the staleness of gradients."""

from __future__ import annotations

EXACT = 4096
"""A smaller number has its own bin. For others, a bin is at most 1/64 of its numbers wide."""
_STEPS = 6  # for a number from EXACT on: bits that are kept after its highest one


class Histogram:
    """Counts of numbers from 0. Mean and maximum are exact; quantiles are within 1/64."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.max = 0
        self._bins: dict[int, int] = {}

    def add(self, value: int) -> None:
        """Count a number."""
        self.count += 1
        self.total += value
        if value > self.max:
            self.max = value
        low = value if value < EXACT else _low(value)
        self._bins[low] = self._bins.get(low, 0) + 1

    @property
    def mean(self) -> float:
        """The mean; 0 if there is no number."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, part: float) -> int:
        """The least number that at least this share of all does not exceed; 0 if there is none."""
        wanted = part * self.count
        seen = 0
        for low in sorted(self._bins):
            seen += self._bins[low]
            if seen >= wanted:
                return low
        return self.max

    def summary(self) -> dict[str, float]:
        """Mean, quantiles and maximum, as JSON values."""
        quantiles = {f"p{part}": self.quantile(part / 100) for part in (50, 90, 99)}
        return {"mean": self.mean, **quantiles, "max": self.max}

    def bins(self) -> dict[int, int]:
        """Count by number. In a wide bin, all count as its least number."""
        return dict(self._bins)

    def rows(self) -> list[tuple[int, int, int]]:
        """(lowest, highest, count): one row each for 0 to 15, then one for each power of two."""
        found: dict[int, int] = {}
        for low, times in self._bins.items():
            found[_row(low)] = found.get(_row(low), 0) + times
        last = _row(self.max)
        lows = [*range(16), *(1 << power for power in range(4, 64))]
        listed = [(low, low if low < 16 else 2 * low - 1, found.get(low, 0)) for low in lows]
        return [row for row in listed if row[0] <= last]


def _low(value: int) -> int:
    """The least number in the bin of `value`, which is EXACT or above."""
    shift = value.bit_length() - 1 - _STEPS
    return value >> shift << shift


def _row(low: int) -> int:
    return low if low < 16 else 1 << (low.bit_length() - 1)
