"""Forks of a loaded process, and what remains of them when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest
from support import eventually

from gadei_ps.machine import interrupts, process
from gadei_ps.machine.forks import Fork, Loaded

# A child ends with the exit code that is its last word, or sleeps.
PROGRAM = """
import os, signal, sys
from gadei_ps.machine import forks
words = (sys.argv[1:] or forks.serve())
code = os.environ["CODE"] if words[-1] == "code" else words[-1]
if code == "sleep":
    signal.pause()
sys.exit(int(code) + len(sys.stdin.read()))
"""
ONE_FORK = """
import errno, os
left = [os.fork]
def fork():
    if not left:
        raise OSError(errno.EAGAIN, "no process left")
    return left.pop()()
os.fork = fork
"""
COMMAND = [sys.executable, "-c", PROGRAM]
HOW: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": 2}


@pytest.fixture
def loaded() -> Iterator[Loaded]:
    with closing(Loaded(COMMAND)) as loaded:
        yield loaded


def spawn(loaded: Loaded, word: str, **more: str) -> Any:
    return loaded.spawn([*COMMAND, word], env=os.environ | more, **HOW)


def parent(pid: int) -> int:
    return psutil.Process(pid).ppid()


def test_exit_codes(loaded: Loaded) -> None:
    child = spawn(loaded, "code", CODE="3")
    assert child.wait() == child.returncode == child.poll() == 3

    child = spawn(loaded, "sleep")
    assert isinstance(child, Fork)
    assert child.poll() is None
    assert not process.has_ended(child)
    assert parent(child.pid) != os.getpid()
    assert os.getpgid(child.pid) == child.pid
    os.kill(child.pid, signal.SIGTERM)
    eventually(lambda: process.has_ended(child))
    assert (process.end_group(child), child.lost) == (-signal.SIGTERM, False)
    assert process.owner(child.pid) is None, "reaped"


def test_the_loaded_process_is_killed(loaded: Loaded) -> None:
    """Check that its forks die with it, and that programs replace them."""
    first = spawn(loaded, "sleep")
    os.kill(parent(first.pid), signal.SIGKILL)
    eventually(lambda: process.has_ended(first))
    assert (first.wait(), first.lost) == (-signal.SIGKILL, True)
    second = spawn(loaded, "sleep")
    assert parent(second.pid) == os.getpid()
    assert process.end_group(second) == -signal.SIGKILL


def test_no_second_fork_can_be_made() -> None:
    """Check that a program takes its place, and that the first one lives."""
    with closing(Loaded([sys.executable, "-c", ONE_FORK + PROGRAM])) as loaded:
        first, second = spawn(loaded, "sleep"), spawn(loaded, "7")
        assert isinstance(first, Fork)
        assert second.wait() == 7
        assert not isinstance(second, Fork)
        assert first.poll() is None


def test_the_loaded_process_hangs(loaded: Loaded) -> None:
    first = spawn(loaded, "sleep")
    os.kill(parent(first.pid), signal.SIGSTOP)
    loaded._end.settimeout(0.01)
    second = spawn(loaded, "7")
    assert second.wait() == 7
    eventually(lambda: process.has_ended(first))


def test_what_ends_before_it_is_ready() -> None:
    with closing(Loaded(["/bin/false"])) as loaded:
        assert spawn(loaded, "5").wait() == 5


HANGS = """
import os, signal, socket
end = socket.socket(fileno=0)
end.recv(1 << 16)
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""


def test_a_signal_ends_the_wait_for_a_process_that_loads() -> None:
    """Check that the process is killed: its late answer would be taken for that of the next."""
    with closing(Loaded([sys.executable, "-c", HANGS])) as loaded:
        with pytest.raises(KeyboardInterrupt), interrupts.of_commands():
            spawn(loaded, "sleep")
        assert loaded._child.returncode == -signal.SIGKILL
        assert spawn(loaded, "7").wait() == 7
