"""Both clients behind one interface, and what is asked of both."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import support
from clients.drivers import Job, Learner

Start = Callable[[], Learner]


class Makers(NamedTuple):
    """Start learners of one client each: as they are, and such that lose patience sooner."""

    plain: Start
    hurried: Start


def with_seconds(answer: tuple[int, str]) -> tuple[int, str]:
    """An answer with its time limit in seconds, whichever unit the client has."""

    def in_seconds(match: re.Match[str]) -> str:
        return f"within {float(match[1]) / (1000 if match[2] == 'ms' else 1):g} s"

    return answer[0], re.sub(r"within ([\d.]+) (ms|s)\b", in_seconds, answer[1])


def row_of(job: Job, one: Learner) -> dict[str, Any]:
    rows = job.status()["learners"]
    return next(row for row in rows if row["pid"] == one.process.pid)


def answers_of(both: dict[str, Makers], *command: object) -> tuple[int, str]:
    """Return the answer of fresh learners of both kinds, which must be the same."""
    first, second = (with_seconds(make.plain().ask(*command)) for make in both.values())
    assert first == second
    return first


def fill(job: Job, mine: Learner) -> None:
    """Attach and fill the ring while no shard empties it."""
    mine.do("attach", job.socket)
    job.pause(True)
    for _ in range(int(job.control["slots"])):
        mine.do("push", 1, 10_000)


def asleep(job: Job, mine: Learner) -> None:
    """Wait until it sleeps until a slot comes free."""
    ring = job.ring(row_of(job, mine)["row"])
    support.eventually(lambda: int(ring["waits_slot"]))
