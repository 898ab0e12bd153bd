"""Whether something still makes progress: decisions on what was seen of it.

A learner that others wait for hangs if it does nothing for the time limit: it neither pushes nor
computes. One that computes but does not push is given MOST times the limit, one that has paused as
long as it computes at least now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Watch:
    """Several signs that must each change within limit_s seconds while they are looked at.

    late_s: if a look comes later than this after the last one, all times start again. The observer
    itself did not run, so perhaps no process did (a suspended machine).
    """

    limit_s: float
    late_s: float = 1.0
    _seen: dict[Hashable, tuple[Hashable, float]] = field(default_factory=dict)
    _looked: float = float("-inf")

    def check(self, now: float, signs: dict[Hashable, Hashable]) -> list[Hashable]:
        """Return keys whose sign has not changed for too long; forget keys missing from `signs`."""
        rested = now - self._looked > self.late_s
        self._looked = now
        seen = {}
        for key, sign in signs.items():
            before = self._seen.get(key)
            same = before is not None and before[0] == sign and not rested
            seen[key] = before if same and before is not None else (sign, now)
        self._seen = seen
        return [key for key, (_, since) in seen.items() if now - since > self.limit_s]


START_LATE_S = 5.0  # of a look at a start: its caller may wait for an answer in between
MOST_CPU_S = 900.0  # ten times what it takes to compile the kernels
LEAST_SHARE = 0.005  # of a core


def progress(cpu_s: float, silent_s: float, most_cpu_s: float = MOST_CPU_S) -> int:
    """Count the steps of a start's progress: the processor time that it has used, coarsely.

    A step is LEAST_SHARE of a core for silent_s. A process that sleeps in a loop and wakes ten
    times a second needs less, so it makes no progress. A process that compiles gets more even where
    a hundred others want the same core. Beyond most_cpu_s, computing is not progress either.
    """
    return int(min(cpu_s, most_cpu_s) / (LEAST_SHARE * silent_s))


@dataclass
class Start:
    """A start may take long while it computes, as on a busy machine; it hangs once it does not.

    silent_s: how long it may go without progress(), which most_cpu_s limits.
    """

    silent_s: float
    most_cpu_s: float = MOST_CPU_S
    cpu_s: float = 0.0
    """The most that one process has used."""
    _watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.silent_s, START_LATE_S)

    def hangs(self, now: float, cpu_s: Iterable[float]) -> bool:
        """cpu_s: processor time that each process which takes part has used for its start.

        A process that is started again makes progress only where it gets further than the last.
        """
        self.cpu_s = max(self.cpu_s, *cpu_s, 0.0)
        got = progress(self.cpu_s, self.silent_s, self.most_cpu_s)
        return bool(self._watch.check(now, {"start": got}))


MOST = 10  # limits: that a learner may compute without a push, and rest while it has paused
WARN_AT = 0.5  # of the time that it has


class Sign(NamedTuple):
    """Heartbeat of an awaited learner. moves: changes while it takes part in the job."""

    moves: Hashable
    pid: int
    paused: bool


@dataclass
class Awaited:
    """A learner that others wait for."""

    moves: Hashable
    since: float
    computed: float
    """Time at which it was last seen to have computed."""
    cpu_s: float | None = None
    """Processor time when others had waited for a while."""
    steps: int = 0
    waited_s: float = 0.0
    left_s: float = 0.0
    """Time until it is killed (s)."""
    warned: bool = False


@dataclass
class HangDetector:
    """limit_s: 0: no learner hangs. late_s: see Watch. cpu_s: of a process and its children."""

    limit_s: float
    late_s: float
    cpu_s: Callable[[int], float]
    awaited: dict[int, Awaited] = field(default_factory=dict)
    """Learners that others wait for, by row, as of the last look."""
    _looked: float = float("-inf")

    def check(self, now: float, signs: Mapping[int, Sign]) -> tuple[list[int], list[int]]:
        """Return the learners that hang, and those to warn of; forget the others."""
        rested, self._looked = now - self._looked > self.late_s, now
        before, self.awaited = self.awaited, {}
        for key, sign in signs.items():
            one = before.get(key)
            if one is None or one.moves != sign.moves or rested:
                one = Awaited(sign.moves, now, now)
            self.awaited[key] = one
            self._update(one, now, sign)
        if not self.limit_s:
            return [], []
        hung = [key for key, one in self.awaited.items() if one.left_s < 0]
        late = [
            key
            for key, one in self.awaited.items()
            if one.left_s >= 0
            and one.waited_s >= WARN_AT * self.limit_s
            and not (one.warned or signs[key].paused)
        ]
        for key in late:
            self.awaited[key].warned = True
        return hung, late

    def _update(self, one: Awaited, now: float, sign: Sign) -> None:
        if self.limit_s and now - one.since >= self.limit_s / 4:
            used_s = self.cpu_s(sign.pid)
            if one.cpu_s is None:
                one.cpu_s = used_s
            steps = progress(used_s - one.cpu_s, self.limit_s)
            if steps > one.steps:
                one.steps, one.computed = steps, now
        one.waited_s, most_s = now - one.since, MOST * self.limit_s
        limit_s = most_s if sign.paused else self.limit_s
        one.left_s = limit_s - (now - one.computed)
        if not sign.paused:
            one.left_s = min(one.left_s, most_s - one.waited_s)
