"""Why others cannot be reached: a line for each of them. What lasts is told on standard error."""

from __future__ import annotations

import contextlib
import sys
import time

LASTS_S = 10.0
"""Agents that begin together are not all there at once."""


class Troubles(dict[int, str]):
    """Lines by the numbers of agents, or of groups. For any thread."""

    def __init__(self, lasts_s: float = LASTS_S) -> None:
        super().__init__()
        self._lasts_s = lasts_s
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def note(self, number: int, line: str) -> None:
        """There is a trouble, again or still. Told once, until it is over."""
        self[number] = line
        now = time.monotonic()
        if now - self._since.setdefault(number, now) >= self._lasts_s and number not in self._told:
            self._told.add(number)
            with contextlib.suppress(OSError):  # nobody reads it any more
                print(f"gadei-ps: {line}", file=sys.stderr, flush=True)

    def over(self, number: int) -> None:
        """There is none any more."""
        self.pop(number, None)
        self._since.pop(number, None)
        self._told.discard(number)
