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
