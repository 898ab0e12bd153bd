"""Whether something still makes progress: pure decisions on what was seen of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


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
