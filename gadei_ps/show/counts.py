"""Counts in messages."""

from __future__ import annotations


def counted(number: int, one: str, several: str = "") -> str:
    """`1 shard`, `2,000 shards`. several: the plural, if it is not the singular with an s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"
