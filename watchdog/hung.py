"""Learners that hold up others: who hangs, and who is only slow.

A learner that others wait for hangs if it does nothing for the time limit: it neither pushes nor
computes. One that computes but does not push is given MOST times the limit, one that has paused as
long as it computes at least now and then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gadei_ps.machine import process
from gadei_ps.watchdog.liveness import progress

MOST = 10  # limits: that a learner may compute without a push, and rest while it has paused
WARN_AT = 0.5  # of the time that it has


def cpu_s(pid: int) -> float:
    """Processor time of a process and of the children that it has now, s."""
    total, left = 0.0, [pid]
    while left:
        one = left.pop()
        total += process.cpu_s(one)
        for thread in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                left += map(int, thread.read_text().split())
    return total


class Sign(NamedTuple):
    """Heartbeat of an awaited learner. moves: changes while it takes part in the job."""

    moves: Hashable
    pid: int
    paused: bool


class Standing(NamedTuple):
    """A learner that others wait for: since when, and the time until it is killed, s."""

    stands_s: float
    left_s: float
    paused: bool


@dataclass
class _Seen:
    moves: Hashable
    since: float
    computed: float  # when it was last seen to have computed
    cpu_s: float | None = None  # when it had stood for a while
    steps: int = 0
    warned: bool = False


@dataclass
class Hung:
    """limit_s: 0: no learner hangs. late_s: see Watch. cpu_s: of a process and its children."""

    limit_s: float
    late_s: float
    cpu_s: Callable[[int], float]
    standing: dict[int, Standing] = field(default_factory=dict)
    """Learners that others wait for, by row, as of the last look."""
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _looked: float = float("-inf")

    def check(self, now: float, signs: Mapping[int, Sign]) -> tuple[list[int], list[int]]:
        """Return the learners that hang, and those to warn of; forget the others."""
        rested, self._looked = now - self._looked > self.late_s, now
        seen: dict[int, _Seen] = {}
        self.standing = {}
        for key, sign in signs.items():
            one = self._seen.get(key)
            if one is None or one.moves != sign.moves or rested:
                one = _Seen(sign.moves, now, now)
            seen[key] = one
            self._look_at(one, now, sign)
            self.standing[key] = self._standing(one, now, sign)
        self._seen = seen
        if not self.limit_s:
            return [], []
        hang = [key for key, one in self.standing.items() if one.left_s < 0]
        late = [key for key in self.standing if key not in hang and self._is_late(key)]
        for key in late:
            seen[key].warned = True
        return hang, late

    def _look_at(self, one: _Seen, now: float, sign: Sign) -> None:
        if now - one.since < self.limit_s / 4 or not self.limit_s:
            return
        used_s = self.cpu_s(sign.pid)
        if one.cpu_s is None:
            one.cpu_s = used_s
        steps = progress(used_s - one.cpu_s, self.limit_s)
        if steps > one.steps:
            one.steps, one.computed = steps, now

    def _standing(self, one: _Seen, now: float, sign: Sign) -> Standing:
        stands_s, rests_s = now - one.since, now - one.computed
        if sign.paused:
            left_s = MOST * self.limit_s - rests_s
        else:
            left_s = min(self.limit_s - rests_s, MOST * self.limit_s - stands_s)
        return Standing(stands_s, left_s, sign.paused)

    def _is_late(self, key: int) -> bool:
        """Return whether half of its time is over, and that was not reported yet."""
        one = self.standing[key]
        return not (self._seen[key].warned or one.paused or one.stands_s < WARN_AT * self.limit_s)
