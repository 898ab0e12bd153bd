"""Durations and sizes as people write them on a command line."""

from __future__ import annotations

import re

from gadei_ps.errors import UsageError

NUMBER = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
BYTES = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9}
BYTES |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}
BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}


def duration(text: str, *, zero: bool = False) -> float:
    """`500ms`, `60s`, `2m`, `1h` or `60` in seconds, above 0. Raises UsageError.

    zero: 0 may be given, too.
    """
    match = NUMBER.fullmatch(text.strip())
    if not match or match["unit"] not in SECONDS or not (zero or float(match["number"])):
        raise UsageError(f"duration {text!r}: write it like 500ms, 60s, 2m or 1h")
    return float(match["number"]) * SECONDS[match["unit"]]


def size(text: str) -> int:
    """`2M`, `512MB`, `1.5G` or `64KiB` in bytes, above 0. Raises UsageError."""
    match = NUMBER.fullmatch(text.strip())
    if not match or match["unit"].lower() not in BYTES or not float(match["number"]):
        raise UsageError(f"size {text!r}: write it like 64K, 2M, 512MB or 16MiB")
    return int(float(match["number"]) * BYTES[match["unit"].lower()])
