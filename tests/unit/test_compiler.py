"""Units of compiled code that are missing are compiled by one process and its forks."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from support import eventually

from gadei_ps.kernels import cache
from gadei_ps.server import compiler

NAMES = ("first", "second", "third")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))


class Unit(NamedTuple):
    """A unit whose compilation is a call."""

    compile: Callable[[], object]
    module: str = "os"


def in_child(call: Callable[[], object]) -> int:
    """Call a function in a process of its own; return its pid."""
    pid = os.fork()
    if not pid:
        call()
        os._exit(0)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_processes_take_the_units_in_turn(tmp_path: Path) -> None:
    """Each is compiled once, and the first process ends after the others."""

    def note(name: str) -> None:
        (tmp_path / name).write_text(str(os.getpid()))
        eventually(lambda: all((tmp_path / one).exists() for one in NAMES), 60.0)

    def compile_all() -> None:
        compiler._compile([Unit(lambda name=name: note(name)) for name in NAMES], 9)

    pid = in_child(compile_all)
    assert ended(pid) == 0
    pids = {(tmp_path / name).read_text() for name in NAMES}
    assert len(pids) == len(NAMES), "one waits for the others"
    assert str(pid) in pids


def test_a_process_alone(tmp_path: Path) -> None:
    order: list[str] = []
    compiler._compile([Unit(lambda name=name: order.append(name)) for name in NAMES], 1)
    assert order == list(NAMES)


def test_it_stops_once_nothing_can_be_kept() -> None:
    order: list[str] = []

    def fails() -> None:
        order.append("first")
        cache.note(OSError(28, "No space left on device"))

    try:
        compiler._compile([Unit(fails), Unit(lambda: order.append("second"))], 1)
    finally:
        cache._problems.clear()
    assert order == ["first"]


def test_another_compiler_is_awaited_until_it_is_dead(tmp_path: Path) -> None:
    """A fork of it counts: the lock is free when all of them have ended."""
    locked, waits = tmp_path / "locked", tmp_path / "waits"

    def hold() -> None:
        compiler._lock()
        locked.touch()
        signal.pause()

    def wait() -> None:
        waits.touch()
        compiler._lock()

    holder = in_child(hold)
    eventually(locked.exists, 60.0)
    waiter = in_child(wait)
    eventually(waits.exists, 60.0)
    with open(cache.directory() / compiler.LOCK) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert os.waitpid(waiter, os.WNOHANG) == (0, 0)
    os.kill(holder, signal.SIGKILL)
    assert ended(holder) == -signal.SIGKILL
    assert ended(waiter) == 0


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*given: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(compiler.fcntl, "flock", flock)
    compiler._lock()


def test_without_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/none")
    compiler._lock()
    with pytest.raises(PermissionError, match="/proc/none/gadei-ps cannot be written"):
        cache.directory()
