"""The setting of a simulation: learners, duration, deaths and returns, cost of the server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gadei_ps.errors import UsageError
from gadei_ps.simulate.run_times import RunTimes

MOST_LEARNERS = 100_000


@dataclass(frozen=True)
class Abandonment:
    """Time at which a straggler abandons an iteration whose gradient is no longer wanted.

    It is `seconds` plus `share` of the iteration's run time after the server's notification. If
    `seconds` is None, the straggler finishes the iteration, and its gradient is dropped.
    """

    seconds: float | None = 0.0
    share: float = 0.0


@dataclass(frozen=True)
class Faults:
    """Deaths and joins. Times are seconds of virtual time.

    deaths: probability that the learner dies during an iteration, at a random moment. die, join:
    (learner, time) of single deaths and joins. A learner that joins is new or replaces a dead one.
    A death of a dead learner and a join of a living one have no effect. return_s: time from a death
    until another learner takes the place; None: never.
    """

    deaths: float = 0.0
    die: tuple[tuple[int, float], ...] = ()
    join: tuple[tuple[int, float], ...] = ()
    return_s: float | None = None


@dataclass(frozen=True)
class Setting:
    """One experiment, the same for every model. Raises UsageError.

    The run ends at the first of these events: `iterations` times `learners` iterations have ended,
    including given-up ones; `gradients` gradients are applied; `seconds` seconds have passed.
    server_s: seconds that the server needs to apply one gradient. It applies one after the other.
    slots: number of finished gradients of a learner that may wait at the server while the learner
    computes. When all slots are taken, the learner waits.
    """

    learners: int
    times: RunTimes
    seed: int = 0
    iterations: int | None = None
    gradients: int | None = None
    seconds: float | None = None
    server_s: float = 0.0
    slots: int = 2
    give_up: Abandonment = field(default_factory=Abandonment)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        limits = (self.iterations, self.gradients, self.seconds)
        given = [one for one in limits if one is not None]
        _check(1 <= self.learners <= MOST_LEARNERS, f"learners must be from 1 to {MOST_LEARNERS:,}")
        _check(bool(given), "its length is missing: give iterations, gradients or a time")
        _check(all(one > 0 for one in given), "iterations, gradients and time must be above 0")
        _check(0 <= self.server_s < math.inf, "the server's time must be at least 0 seconds")
        _check(self.slots >= 1, "slots must be at least 1")
        _check(0 <= self.faults.deaths <= 1, "deaths must be a probability from 0 to 1")
        _check(self.capacity <= MOST_LEARNERS, f"learners' numbers must be below {MOST_LEARNERS:,}")
        for learner, time in self.faults.die + self.faults.join:
            _check(
                learner >= 0 and 0 <= time < math.inf,
                "die and join: learner and time must be at least 0",
            )
        joiners = {learner for learner, _ in self.faults.join}
        for learner, _ in self.faults.die:
            known = learner < self.learners or learner in joiners
            _check(known, f"die: there is no learner {learner} of {self.learners}")

    @property
    def capacity(self) -> int:
        """All learner numbers that may occur are below this."""
        return max(self.learners, *(learner + 1 for learner, _ in self.faults.join), 1)


def _check(holds: bool, wanted: str) -> None:
    if not holds:
        raise UsageError(f"simulation: {wanted}")
