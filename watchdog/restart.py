"""Restart policy of dead processes: pure decisions on the history of their exits.

A process that was useful is started again at once, however often it is killed. If a process dies
repeatedly without having been useful, the pauses grow, and in the end it is not restarted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Exit:
    """A process' death. at: seconds of a monotonic clock."""

    at: float
    useful: bool
    """Whether the process got ready, and then did something or had nothing to do."""


@dataclass(frozen=True)
class Policy:
    """Limits of restarts. limit: useless deaths in a row; within_s: older deaths do not count."""

    limit: int = 10
    first_s: float = 0.1
    longest_s: float = 5.0
    within_s: float = 120.0


GIVE_UP = float("inf")
USEFUL_S = 5.0  # a process that lived this long was not started in vain


def delay(exits: Sequence[Exit], now: float, policy: Policy) -> float:
    """Return the delay (s) of the next start after the last death; GIVE_UP if none makes sense.

    exits: oldest first. After the first useless death there is no wait; then the wait doubles.
    """
    useless = 0
    for one in reversed(exits):
        if one.useful or now - one.at > policy.within_s:
            break
        useless += 1
    if useless >= policy.limit:
        return GIVE_UP
    if useless <= 1:
        return 0.0
    return float(min(policy.longest_s, policy.first_s * 2 ** (useless - 2)))


def remembered(exits: Sequence[Exit], policy: Policy) -> tuple[Exit, ...]:
    """The last deaths, as many as a decision can depend on."""
    return tuple(exits[-policy.limit :])
