"""Counts of faults that must not happen when machines of a group die.

`Rounds` reads the machines' reports of their rounds. After the same round, all machines of a group
have the same weights. Each round reaches a machine's job as one frame of its process.

`batches` looks at the weights at the end (group_deaths_learner.py): which batches are in them, and
which more than once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from gadei_ps.memory.weights import FloatArray

LOST, TWICE, DIFFER = "rounds lost", "rounds applied twice", "rounds that differ"
MISSING, AGAIN = "batches that are missing", "batches counted twice"
LEFT, STOPPED = "left behind", "survivors that stopped"
FAULTS = (LOST, TWICE, DIFFER, STOPPED, MISSING, AGAIN, LEFT)
COMPARED, FINISHED = "rounds compared", "batches of finished passes"
NONE_BELOW, ONCE_BELOW, SAME_WITHIN = 1e-3, 1 + 1e-2, 1e-2


@dataclass(frozen=True)
class Sight:
    """Status of a machine that is a member.

    incarnation: of the replica in its group. frames: assignments that its job has applied, of which
    each round makes one; None if unknown. They are read after the rounds, so there may be more of
    them, but never fewer.
    """

    machine: int
    incarnation: int
    rounds: int
    checksum: int
    frames: int | None

    @classmethod
    def of(cls, machine: int, facts: Mapping[str, Any] | None, frames: int | None) -> Self | None:
        """Read a machine's status; None if it is not a member of its group."""
        if facts is None or facts["exchange"]["state"] != "member":
            return None
        incarnation, rounds, checksum = (
            int(facts["exchange"][name]) for name in ("incarnation", "rounds", "checksum")
        )
        return cls(machine, incarnation, rounds, checksum, frames)


class Rounds:
    """Observed rounds of one group."""

    def __init__(self, counts: Counter[str]) -> None:
        """Add faults to `counts`, and COMPARED: rounds that two machines have reported."""
        self._counts = counts
        self._sums: dict[int, set[int]] = {}
        self._told: dict[int, set[int]] = {}
        """The machines that have reported a round, by round."""
        self._last: dict[int, Sight] = {}
        self._surplus: dict[int, int] = {}
        """The fewest frames beyond a replica's rounds since the last `settle`, by incarnation."""
        self._before: dict[int, int] = {}

    def saw(self, sight: Sight) -> None:
        """Compare a sight with those before it."""
        before = self._last.get(sight.machine, sight)
        if before.incarnation == sight.incarnation and sight.rounds < before.rounds:
            self._counts[LOST] += before.rounds - sight.rounds
        self._last[sight.machine] = sight
        sums = self._sums.setdefault(sight.rounds, set())
        self._counts[DIFFER] += bool(sums) and sight.checksum not in sums
        sums.add(sight.checksum)
        machines = self._told.setdefault(sight.rounds, set())
        self._counts[COMPARED] += len(machines) == 1 and sight.machine not in machines
        machines.add(sight.machine)
        if sight.frames is not None:
            surplus = sight.frames - sight.rounds
            one = sight.incarnation
            self._surplus[one] = min(surplus, self._surplus.get(one, surplus))

    def settle(self) -> None:
        """Count frames beyond those of rounds.

        Call it after several sights of each machine: a round's frame is applied before the round
        is reported.
        """
        for one, surplus in self._surplus.items():
            self._counts[TWICE] += max(0, surplus - self._before.get(one, surplus))
            self._before[one] = surplus
        self._surplus.clear()


def batches(
    counted: FloatArray, weighed: FloatArray, ends: int, numbers: Mapping[int, Sequence[float]]
) -> dict[str, int]:
    """Count batches of finished passes that are not in the weights, and those that are twice.

    counted: of each batch, how much of it is in the weights: the share that its machine had in its
    round, so above 0 and at most 1. weighed: the same times the batch's number. ends: the batches
    of finished passes. numbers: by batch, those that learners have drawn for it. Where it was
    trained more than once, more than one of them is in the weights, which then have a mean of them.
    """
    missing = int((counted[:ends] <= NONE_BELOW).sum())
    twice = set(np.flatnonzero(counted > ONCE_BELOW).tolist())
    twice |= set(np.flatnonzero(counted < -NONE_BELOW).tolist())  # a round was taken off twice
    for at in np.flatnonzero(counted > NONE_BELOW).tolist():
        found = weighed[at] / counted[at]
        if not any(abs(found - one) < SAME_WITHIN * one for one in numbers.get(at, ())):
            twice.add(at)
    return {FINISHED: ends, MISSING: missing, AGAIN: len(twice)}
