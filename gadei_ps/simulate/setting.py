"""What is simulated: number of learners, duration, deaths and returns, cost of the server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gadei_ps.errors import UsageError
from gadei_ps.simulate.run_times import RunTimes

MOST_LEARNERS = 100_000


@dataclass(frozen=True)
class GiveUp:
    """When a straggler gives up an iteration whose gradient is not wanted any more.

    So many seconds after it was told, and so large a share of the iteration's run time. seconds:
    None if it never does: then it finishes, and its gradient is dropped.
    """

    seconds: float | None = 0.0
    share: float = 0.0


@dataclass(frozen=True)
class Faults:
    """Deaths and joins. Times are seconds of virtual time.

    deaths: chance that an iteration ends by its learner's death, at any moment of it. die and join:
    (learner, time) of single ones; a learner that joins is a new one or takes a dead one's place.
    To die while dead and to join while alive are no events. return_s: after how long a dead
    learner's place is taken again, None if never.
    """

    deaths: float = 0.0
    die: tuple[tuple[int, float], ...] = ()
    join: tuple[tuple[int, float], ...] = ()
    return_s: float | None = None


@dataclass(frozen=True)
class Setting:
    """One experiment; the same for every model. Raises UsageError.

    It ends with the first of: iterations times learners iterations ended, given-up ones included;
    so many gradients applied; so many seconds passed. server_s: what the server needs to apply one
    gradient; it applies one after the other. slots: finished gradients that a learner may have
    with the server while it computes; it waits for a slot when they are taken.
    """

    learners: int
    times: RunTimes
    seed: int = 0
    iterations: int | None = None
    gradients: int | None = None
    seconds: float | None = None
    server_s: float = 0.0
    slots: int = 2
    give_up: GiveUp = field(default_factory=GiveUp)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        limits = (self.iterations, self.gradients, self.seconds)
        given = [one for one in limits if one is not None]
        _check(1 <= self.learners <= MOST_LEARNERS, f"learners: from 1 to {MOST_LEARNERS:,}")
        _check(bool(given), "how long? give iterations, gradients or a time")
        _check(all(one > 0 for one in given), "iterations, gradients and time: above 0")
        _check(0 <= self.server_s < math.inf, "server time: at least 0 seconds")
        _check(self.slots >= 1, "slots: at least 1")
        _check(0 <= self.faults.deaths <= 1, "deaths: a probability from 0 to 1")
        _check(self.capacity <= MOST_LEARNERS, f"learners: numbers below {MOST_LEARNERS:,}")
        for learner, time in self.faults.die + self.faults.join:
            _check(learner >= 0 and 0 <= time < math.inf, "die and join: learner and time from 0")
        joiners = {learner for learner, _ in self.faults.join}
        for learner, _ in self.faults.die:
            known = learner < self.learners or learner in joiners
            _check(known, f"die: there is no learner {learner} of {self.learners}")

    @property
    def capacity(self) -> int:
        """Learner numbers that may occur are below this."""
        return max(self.learners, *(learner + 1 for learner, _ in self.faults.join), 1)


def _check(holds: bool, wanted: str) -> None:
    if not holds:
        raise UsageError(f"simulation: {wanted}")
