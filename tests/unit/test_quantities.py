"""Format durations, sizes and progress of the command line as texts."""

from __future__ import annotations

import pytest

from gadei_ps.commands import quantities
from gadei_ps.errors import UsageError
from gadei_ps.show import progress


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
    [
        ("2M", 2_000_000),
        ("100m", 100_000_000),
        ("512MB", 512_000_000),
        ("64KiB", 65536),
        ("1.5G", 1_500_000_000),
        ("7", 7),
    ],
)
def test_size(text: str, count: int) -> None:
    assert quantities.size(text) == count


@pytest.mark.parametrize("text", ["", "s", "-1s", "0s", "1 week", "1e3", "nan", "1,5s"])
def test_nonsense(text: str) -> None:
    for read in (quantities.duration, quantities.size):
        with pytest.raises(UsageError, match="write it like"):
            read(text)


def test_how_far_the_making_of_memory_is() -> None:
    note = {"what": "the ring of learner 1", "done": 512 << 20, "total": 2 << 30}
    assert progress.making(note) == "the ring of learner 1 is being made: 512 of 2,048 MiB"
    assert progress.making(note | {"done": 1, "total": 9}) == "the ring of learner 1 is being made"
    assert progress.making({"text": "any"}) == "any"
