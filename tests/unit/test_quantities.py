"""Durations and sizes of the command line."""

from __future__ import annotations

import pytest

from gadei_ps.commands import quantities
from gadei_ps.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60),
        ("2m", 120),
        ("1.5min", 90),
        ("500ms", 0.5),
        ("1h", 3600),
        ("7", 7),
        (" 1 s ", 1),
    ],
)
def test_duration(text: str, seconds: float) -> None:
    assert quantities.duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "count"),
    [("2M", 2_000_000), ("100m", 100_000_000), ("64KiB", 65536), ("1.5G", 1_500_000_000), ("7", 7)],
)
def test_size(text: str, count: int) -> None:
    assert quantities.size(text) == count


@pytest.mark.parametrize("text", ["", "s", "-1s", "0s", "1 week", "1e3", "nan", "1,5s"])
def test_nonsense(text: str) -> None:
    for read in (quantities.duration, quantities.size):
        with pytest.raises(UsageError, match="write it like"):
            read(text)
