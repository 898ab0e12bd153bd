"""Why others cannot be reached: a line for each of them. What lasts is told on standard error."""

from __future__ import annotations

import contextlib
import math
import sys
import time

LASTS_S = 10.0
"""Agents that begin together are not all there at once."""


class Troubles(dict[int, str]):
    """Lines by the numbers of agents, or of groups. For any thread."""

    def __init__(self, lasts_s: float = LASTS_S, pause_s: float = math.inf) -> None:
        """pause_s: where a trouble is not noted for so long, nobody has tried: it begins anew."""
        super().__init__()
        self._lasts_s, self._pause_s = lasts_s, pause_s
        self._since: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._told: set[int] = set()

    def note(self, number: int, line: str) -> None:
        """There is a trouble, again or still. Told once, until it is over."""
        now = time.monotonic()
        if now - self._last.get(number, now) > self._pause_s:
            self.over(number)
        self[number], self._last[number] = line, now
        if now - self._since.setdefault(number, now) >= self._lasts_s and number not in self._told:
            self._told.add(number)
            with contextlib.suppress(OSError):  # nobody reads it any more
                print(f"gadei-ps: {line}", file=sys.stderr, flush=True)

    def over(self, number: int) -> None:
        """There is none any more."""
        self.pop(number, None)
        self._since.pop(number, None)
        self._last.pop(number, None)
        self._told.discard(number)
