"""Learners that cannot be started, that end again and again, and their process groups."""

from __future__ import annotations

import os
import resource

import pytest
from support import eventually

from gadei_ps.errors import UsageError
from gadei_ps.machine import process
from gadei_ps.machine.launch import MAX_QUICK_FAILURES, Learners


def test_no_descriptor_is_free() -> None:
    """One line, with what to do."""
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(UsageError) as raised:
            Learners(["/bin/true"], 2, "none")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert str(raised.value) == (
        "cannot start '/bin/true': Too many open files; raise the limit of open files (ulimit -n)"
    )


@pytest.mark.parametrize("end", ["ended", "kill"])
def test_groups_are_killed_before_their_leaders_are_reaped(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Kill them first: another process group may have the number after that."""
    killed: list[int] = []

    def kill(leader: int, number: int) -> None:
        assert process.owner(leader) is not None
        killed.append(leader)

    monkeypatch.setattr(os, "killpg", kill)
    learners = Learners(["/bin/true"], 1, "none")
    (pid,) = learners.pids
    eventually(lambda: process.start_ticks(pid) == 0)
    assert getattr(learners, end)() is None or end == "ended"
    assert killed == [pid]
    assert not learners.pids


@pytest.mark.parametrize(("program", "hopeless"), [("kill -9 $$", False), ("exit 1", True)])
def test_programs_that_fail_are_hopeless_and_killed_ones_are_not(
    program: str, hopeless: bool
) -> None:
    learners = Learners(["/bin/sh", "-c", program], 1, "none")
    for _ in range(MAX_QUICK_FAILURES):
        assert not learners.hopeless
        eventually(learners.ended)
        learners.start(0)
    assert learners.hopeless == hopeless
    learners.kill()
