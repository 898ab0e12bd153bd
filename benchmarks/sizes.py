"""Sizes and rounds of all benchmarks: the full ones, and the quick ones that only try them out."""

from __future__ import annotations

from typing import Any

MB = 1_000_000

FULL: dict[str, dict[str, Any]] = {
    "apply": {"bytes": [2 * MB, 25 * MB, 100 * MB, 250 * MB], "rounds": 15, "call_s": 0.03},
    "undo": {"bytes": [2 * MB, 25 * MB, 100 * MB], "rounds": 20, "call_s": 0.005},
    "start": {"rounds": 8},
}
QUICK: dict[str, dict[str, Any]] = {
    "apply": {"bytes": [2 * MB], "rounds": 2, "call_s": 0.003},
    "undo": {"bytes": [2 * MB], "rounds": 2, "call_s": 0.002},
    "start": {"rounds": 1},
}


def sizes(name: str, quick: bool) -> dict[str, Any]:
    """Those of one benchmark."""
    return (QUICK if quick else FULL)[name]
