"""Waiting for a condition, and for a random time."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

# For what takes seconds on an idle machine, and this long at a load of 30.
PATIENCE_S = float(os.environ.get("PATIENCE_S", "150"))
SHORTEST_S, LONGEST_S = 0.001, 0.05  # between two looks


def eventually(
    condition: Callable[[], Any],
    timeout_s: float = PATIENCE_S,
    what: Callable[[], object] | str = "",
) -> Any:
    """Wait until the condition holds and return its value; fail when it does not.

    It looks less often as time goes by: looking takes the cores from what it waits for.
    """
    begin = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - begin
        if waited_s > timeout_s:
            described = what() if callable(what) else what
            raise AssertionError(f"not within {timeout_s} s: {described or condition}")
        time.sleep(min(max(SHORTEST_S, waited_s / 10), LONGEST_S))
    return value


def spin(chance: random.Random, most_s: float) -> None:
    """A random time, without giving the core away: until anywhere in what another is doing."""
    end = time.perf_counter() + chance.random() * most_s
    while time.perf_counter() < end:
        pass
