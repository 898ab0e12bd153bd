"""Counts in messages."""

from __future__ import annotations

from collections.abc import Mapping

SMALL_SHARE = 0.1  # of gradients that were applied: a run with fewer has failed


def counted(number: int, one: str, several: str = "") -> str:
    """`1 shard`, `2,000 shards`. several: the plural, if it is not the singular with an s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def rate(per_second: float) -> str:
    """`2,310`, or with a decimal below 10: `1.5`."""
    return f"{per_second:,.0f}" if per_second >= 9.95 else f"{per_second:.1f}"


def mostly_refused(counts: Mapping[str, int]) -> str:
    """A line of advice if less than SMALL_SHARE of a run's gradients were applied; else empty."""
    applied, refused = counts["gradients_applied"], counts["gradients_refused"]
    if not refused or applied >= SMALL_SHARE * (applied + refused):
        return ""
    return (
        f"{refused:,} of {counted(applied + refused, 'gradient')} were refused: most likely the "
        "model has diverged, with NaN or infinities in its gradients; lower the learning rate, or "
        "set clip_norm in the job file"
    )
