"""Says for which machines a run waits that may be dead: only a person knows it. Without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gadei_ps.cluster.needs import Needs

AWAY_S = 20.0
"""So long the last machines of a run are away, before that is said."""

Told = dict[str, Any]


class Waits:
    """Of one run. However long a wait lasts, it is said once."""

    def __init__(self, run: str, silence_s: float, say: Callable[[str], None]) -> None:
        """say: is given a line."""
        self._run, self._say = run, say
        self._needs = Needs(silence_s)
        """What groups would need without strays."""
        self._of: dict[int, list[int]] = {}
        self._last: list[int] = []
        self._since = 0.0

    def group(self, group: int, rows: Sequence[Told], strays: list[int]) -> None:
        """Looks at the machines of a group, and at those of it that Ray does not know."""
        is_due = self._needs.due(group, rows) is not None
        if not strays:
            self._of.pop(group, None)
        elif is_due and strays != self._of.get(group):
            self._of[group] = strays
            heard = {one for row in rows for one in (row.get("agent") or {}).get("hears", ())}
            why = "which Ray does not know and which may live"
            self._tell(f"group {group} waits", strays, why, heard)

    def end(self, rows: Sequence[Told]) -> None:
        """Looks at all machines of the run: it goes on until they have ended."""
        left = [row for row in rows if row["ended"] is None]
        last = [row["machine"] for row in left if row["state"] == "away"]
        last = last if len(last) == len(left) else []
        if last != self._last:
            self._last, self._since = last, time.monotonic()
        elif last and time.monotonic() - self._since > AWAY_S:
            self._since = float("inf")
            self._tell("the run waits", last, "which Ray does not reach")

    def _tell(self, who: str, machines: list[int], why: str, heard: Collection[int] = ()) -> None:
        """heard: machines that live, so that nobody can give them up."""
        line = f"{who} for machine {', '.join(map(str, machines))}, {why}: bring back its host"
        for one in [one for one in machines if one not in heard][:1]:
            line += f", or `gadei-ps group leave {self._run} {one} --dead`"
        self._say(line)
