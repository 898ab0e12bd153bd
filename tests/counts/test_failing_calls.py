"""Failing calls: one call of a kind fails once, in each process of a job; see faults.c.

What follows each time: one line that says what is wrong, or another attempt. When what has failed
is done again, it succeeds. Every gradient is applied once and saved, no process hangs or dies with
a traceback, and nothing is left in memory or running.
"""

from __future__ import annotations

import errno
import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from preloaded import ask, preloaded

# Errors that each kind of call may have, the likeliest first. EINTR: nothing may come of it.
ERRORS = {
    "open": ("EMFILE", "ENOMEM", "EIO", "EINTR"),
    "mmap": ("ENOMEM",),
    "ftruncate": ("ENOSPC", "EIO", "EINTR"),
    "fallocate": ("ENOSPC", "ENOMEM", "EIO"),
    "fsync": ("EIO", "ENOSPC", "EINTR"),
    "rename": ("EACCES", "ENOSPC", "EIO"),
    "read": ("EIO", "EINTR"),
    "write": ("ENOSPC", "EIO", "EINTR"),
    "pidfd_open": ("EMFILE", "ENOMEM"),
    "clone": ("EAGAIN", "ENOMEM"),
}
ROLES = ("watchdog", "server", "saver", "learner", "command")
OFTEN = 3  # calls for the same file that fail, of those that a process makes again and again
# What a short run counts: of these calls every so many-th.
SHORT = {
    ("watchdog", "mmap"): 2,
    ("watchdog", "pidfd_open"): 1,
    ("watchdog", "clone"): 2,
    ("server", "mmap"): 4,
    ("server", "clone"): 1,
    ("saver", "fsync"): 4,
    ("learner", "mmap"): 2,
    ("command", "rename"): 1,
}


class Lives:
    """The process whose forks live with a failing call."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def live(self, role: str, kind: str, number: int, error: str) -> dict[str, Any]:
        """What became of a job in which this call fails; see lives.py."""
        asked = {"role": role, "kind": kind, "number": number, "error": getattr(errno, error)}
        told: dict[str, Any] = ask(self._process, asked)
        return told


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    with preloaded("faults.c", "lives.py") as process:
        yield Lives(process)


def numbers(calls: list[str]) -> list[int]:
    """Which calls are to fail, from 1: the first few for each file, whatever numbers it has."""
    seen: Counter[str] = Counter()
    chosen = []
    for number, path in enumerate(calls, 1):
        kind = re.sub(r"[0-9a-f]{6,}|[0-9]+", "N", path)
        seen[kind] += 1
        if seen[kind] <= OFTEN:
            chosen.append(number)
    return chosen


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("role", ROLES)
def test_calls_that_fail(lives: Lives, role: str, whole: bool, told: list[str]) -> None:
    counted: Counter[str] = Counter()
    wrong = []
    for kind, errors in ERRORS.items():
        step = 1 if whole else SHORT.get((role, kind), 0)
        if not step:
            continue
        life = lives.live(role, kind, 0, errors[0])
        assert not life["wrong"], life["wrong"]
        for error, number in itertools.product(
            errors if whole else errors[:1], numbers(life["calls"])[::step]
        ):
            life = lives.live(role, kind, number, error)
            counted[kind] += bool(life["failed"])
            if life["wrong"]:
                what = f"{role}: {kind} {number}, {error}, of {life['failed']}"
                wrong.append(f"{what}: {life['wrong']}; said: {life['said']}")
    assert not wrong, "\n".join(wrong)
    listed = ", ".join(f"{count} {kind}" for kind, count in counted.items())
    told.append(f"failing calls, {role}: {counted.total()} ({listed})")
