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
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from preloaded import ask, preloaded

# Errors that each kind of call may have, the likeliest first. EINTR: nothing may come of it.
ERRORS = {
    "open": ("EMFILE", "ENOMEM", "EIO", "EINTR", "EACCES"),
    "opendir": ("EMFILE", "ENOMEM", "EIO", "EACCES"),
    "mmap": ("ENOMEM",),
    "ftruncate": ("ENOSPC", "EIO", "EINTR"),
    "fallocate": ("ENOSPC", "ENOMEM", "EIO"),
    "fsync": ("EIO", "ENOSPC", "EINTR"),
    "rename": ("EACCES", "ENOSPC", "EIO"),
    "read": ("EIO", "EINTR"),
    "write": ("ENOSPC", "EIO", "EINTR"),
    "pidfd_open": ("EMFILE", "ENOMEM"),
    "clone": ("EAGAIN", "ENOMEM"),
    "sendmsg": ("ENOBUFS", "ENOMEM", "EINTR"),
    "recvmsg": ("ENOMEM", "EINTR"),
}
ROLES = ("watchdog", "server", "checkpoint-writer", "learner", "command")
LIVES = [
    *(("life", role) for role in ROLES),
    *(("adopted", "watchdog"), ("taken over", "watchdog"), ("taken over", "server")),
    ("orphaned", "command"),
    *(("forked", "fork-server"), ("replaced", "fork-server"), ("replaced", "watchdog")),
]
OFTEN = 3  # calls for the same file that fail, of those that a process makes again and again
# What a short run counts: of these calls every so many-th.
SHORT = {
    ("life", "watchdog", "mmap"): 2,
    ("life", "watchdog", "pidfd_open"): 1,
    ("life", "watchdog", "clone"): 2,
    ("life", "server", "mmap"): 4,
    ("life", "server", "clone"): 1,
    ("life", "checkpoint-writer", "fsync"): 4,
    ("life", "learner", "mmap"): 2,
    ("life", "command", "rename"): 1,
    ("adopted", "watchdog", "pidfd_open"): 1,
    ("adopted", "watchdog", "mmap"): 4,
    ("taken over", "watchdog", "pidfd_open"): 1,
    ("taken over", "server", "mmap"): 2,
    ("orphaned", "command", "rename"): 1,
    ("forked", "fork-server", "clone"): 1,
    ("replaced", "fork-server", "sendmsg"): 2,
    ("replaced", "watchdog", "recvmsg"): 2,
}
# Kinds of which each has calls; the whole run has failed some of each.
MADE = {
    ("life", "watchdog"): set(ERRORS) - {"sendmsg"},
    ("life", "server"): {"open", "mmap", "read", "clone"},
    ("life", "checkpoint-writer"): {"open", "mmap", "fsync", "rename", "read", "write", "clone"},
    ("life", "learner"): {"open", "mmap"},
    ("life", "command"): {
        "open",
        "opendir",
        "mmap",
        "fsync",
        "rename",
        "read",
        "write",
        "pidfd_open",
    },
    ("adopted", "watchdog"): {"open", "mmap", "rename", "read", "write", "pidfd_open", "clone"},
    ("taken over", "watchdog"): {"open", "read", "write", "pidfd_open", "clone"},
    ("taken over", "server"): {"open", "mmap", "read", "clone"},
    ("orphaned", "command"): {"open", "opendir", "mmap", "read", "write"},
    ("forked", "fork-server"): {"open", "read", "pidfd_open", "clone", "sendmsg", "recvmsg"},
    ("replaced", "fork-server"): {"open", "read", "pidfd_open", "clone", "sendmsg", "recvmsg"},
    ("replaced", "watchdog"): {"open", "read", "write", "clone", "sendmsg", "recvmsg"},
}
NOT_OF_PIPES = ("ENOSPC", "EIO")  # what a write to one cannot have
MISSED = 0.1  # of the calls to fail; a process may make fewer than when they were listed


class Lives:
    """The process whose forks live with a failing call."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def live(
        self, role: str, kind: str, number: int, error: str, *, scene: str = "life"
    ) -> dict[str, Any]:
        """Return the result of a job in which this call fails; see lives.py."""
        asked = {"scene": scene, "role": role, "kind": kind, "number": number}
        asked |= {"error": getattr(errno, error), "programs": kind == "vfork"}
        answer: dict[str, Any] = ask(self._process, asked)
        return answer


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    with preloaded("faults.c", "lives.py") as process:
        yield Lives(process)


def numbers(calls: list[str]) -> list[int]:
    """Return which calls fail, from 1: the first few for each file, whatever numbers it has."""
    seen: Counter[str] = Counter()
    chosen = []
    for number, path in enumerate(calls, 1):
        kind = re.sub(r"[0-9a-f]{6,}|[0-9]+", "N", path)
        seen[kind] += 1
        if seen[kind] <= OFTEN:
            chosen.append(number)
    return chosen


class Count:
    """Calls of one role in one scene that have failed, and what came of it."""

    def __init__(self, lives: Lives, scene: str, role: str) -> None:
        self._lives = lives
        self._scene = scene
        self._role = role
        self.failed: Counter[str] = Counter()  # by kind
        self.missed: Counter[str] = Counter()  # the calls that were to fail were not made
        self.wrong: list[str] = []
        self.paths: dict[int, str] = {}  # of the calls of the last kind

    def calls(self, kind: str) -> list[int]:
        """Return numbers of those that are to fail."""
        life = self._lives.live(self._role, kind, 0, "EIO", scene=self._scene)
        assert not life["wrong"], life["wrong"]
        self.paths = dict(enumerate(life["calls"], 1))
        return numbers(life["calls"])

    def may_have(self, kind: str, number: int, error: str) -> bool:
        """Return whether this call may fail so."""
        is_pipe = self.paths[number].startswith(("pipe:", "socket:"))
        return not (kind == "write" and is_pipe and error in NOT_OF_PIPES)

    def fail(self, kind: str, number: int, error: str) -> None:
        life = self._lives.live(self._role, kind, number, error, scene=self._scene)
        (self.failed if life["failed"] else self.missed)[kind] += 1
        if error == "EACCES" and "free some memory" in str(life["said"]):
            life["wrong"].append("wrong advice")
        if life["wrong"]:
            what = f"{self._scene}: {self._role}: {kind} {number}, {error}, of {life['failed']}"
            self.wrong.append(f"{what}: {life['wrong']}; printed: {life['said']}")

    def check(self, kinds: Iterable[str]) -> None:
        """kinds: of which calls must have failed."""
        assert not self.wrong, "\n".join(self.wrong)
        assert set(kinds) <= set(self.failed), f"no call failed of {set(kinds) - set(self.failed)}"
        for kind, missed in self.missed.items():
            tried = missed + self.failed[kind]
            assert missed <= max(1, MISSED * tried), f"{kind}: {missed} of {tried} were not made"

    @property
    def figures(self) -> str:
        listed = ", ".join(f"{count} {kind}" for kind, count in self.failed.items())
        missed = f"{self.missed.total()} not made again"
        return f"{self._scene}, {self._role}: {self.failed.total()} ({listed}), {missed}"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("scene", "role"), LIVES)
def test_calls_that_fail(
    lives: Lives, scene: str, role: str, whole: bool, report: list[str]
) -> None:
    count = Count(lives, scene, role)
    short = {kind: step for (*where, kind), step in SHORT.items() if where == [scene, role]}
    for kind, errors in ERRORS.items():
        step = 1 if whole else short.get(kind, 0)
        if not step:
            continue
        for error, number in itertools.product(
            errors if whole else errors[:1], count.calls(kind)[::step]
        ):
            if count.may_have(kind, number, error):
                count.fail(kind, number, error)
    report.append(f"failing calls, {count.figures}")
    count.check(MADE[scene, role] if whole else short)


@pytest.mark.timeout(7200)
def test_programs_that_cannot_be_started(lives: Lives, whole: bool, report: list[str]) -> None:
    """The watchdog's processes are not forks here; it starts servers by vfork()."""
    count = Count(lives, "life", "watchdog")
    for error in ERRORS["clone"] if whole else ERRORS["clone"][:1]:
        for number in count.calls("vfork") if whole else [1]:
            count.fail("vfork", number, error)
    report.append(f"failing calls, {count.figures}")
    count.check({"vfork"})


def test_what_goes_wrong_is_noticed(lives: Lives) -> None:
    count = Count(lives, "life", "checkpoint-writer")
    count.fail("fsync", -1, "EIO")  # each of them fails
    with pytest.raises(AssertionError, match="no checkpoint written"):
        count.check({"fsync"})


def test_a_count_of_nothing_is_noticed(lives: Lives) -> None:
    count = Count(lives, "life", "learner")
    with pytest.raises(AssertionError, match="no call failed of"):
        count.check({"mmap"})
    count.missed["mmap"] = 2
    count.failed["mmap"] = 8
    with pytest.raises(AssertionError, match="2 of 10 were not made"):
        count.check({"mmap"})
