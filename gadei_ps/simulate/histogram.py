"""Counts whole numbers, for the staleness of gradients."""

from __future__ import annotations

from collections import Counter


class Histogram:
    """Counts of numbers from 0."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, value: int) -> None:
        """Count a number."""
        self._counts[value] += 1

    @property
    def count(self) -> int:
        """Number of the numbers."""
        return self._counts.total()

    @property
    def total(self) -> int:
        """Sum of the numbers."""
        return sum(value * times for value, times in self._counts.items())

    @property
    def max(self) -> int:
        """The largest number; 0 if there is none."""
        return max(self._counts, default=0)

    @property
    def mean(self) -> float:
        """The mean; 0 if there is no number."""
        return self.total / self.count if self._counts else 0.0

    def quantile(self, part: float) -> int:
        """The least number that at least this share of all does not exceed; 0 if there is none."""
        wanted = part * self.count
        seen = 0
        for value in sorted(self._counts):
            seen += self._counts[value]
            if seen >= wanted:
                return value
        return self.max

    def summary(self) -> dict[str, float]:
        """Mean, quantiles and maximum, as JSON values."""
        quantiles = {f"p{part}": self.quantile(part / 100) for part in (50, 90, 99)}
        return {"mean": self.mean, **quantiles, "max": self.max}

    def counts(self) -> dict[int, int]:
        """Count by number, ascending."""
        return dict(sorted(self._counts.items()))

    def rows(self) -> list[tuple[int, int, int]]:
        """(lowest, highest, count): one row each for 0 to 15, then one for each power of two."""
        found: Counter[int] = Counter()
        for value, times in self._counts.items():
            found[_row(value)] += times
        last = _row(self.max)
        lows = [*range(16), *(1 << power for power in range(4, 64))]
        return [(low, low if low < 16 else 2 * low - 1, found[low]) for low in lows if low <= last]


def _row(value: int) -> int:
    return value if value < 16 else 1 << (value.bit_length() - 1)
