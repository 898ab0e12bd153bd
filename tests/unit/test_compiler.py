"""Units of compiled code that are missing are compiled by one process and its forks.

Each test compiles in a process of its own: a compiler reaps all children of its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import psutil
import pytest
from support import PATIENCE_S, eventually

from gadei_ps.kernels import cache
from gadei_ps.machine import process
from gadei_ps.server import compiler, loading

NAMES = ("first", "second", "third")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))


class Unit(NamedTuple):
    """A unit whose compilation appends its name to a file."""

    name: str
    file: Path
    module: str = "os"

    def compile(self) -> bytes:
        with self.file.open("a") as file:
            file.write(f"{self.name}\n")
        return b"code"


class Meeting(Unit):
    """A unit whose compilation ends when all others have begun, each in a process of its own."""

    def compile(self) -> bytes:
        (self.file / self.name).write_text(str(os.getpid()))
        eventually(lambda: all((self.file / one).exists() for one in NAMES), 60.0)
        return b"code"


class Endless(Unit):
    """A unit whose compilation never ends."""

    def compile(self) -> bytes:
        signal.pause()
        return b""


def fork_ended(pid: int) -> None:
    """Wait until the fork of a process that has ended has ended."""
    eventually(lambda: not process.start_ticks(pid))
    with contextlib.suppress(ChildProcessError):  # this process inherits it only as a subreaper
        os.waitpid(pid, 0)


def in_child(call: Callable[[], object]) -> int:
    """Call a function in a process of its own; return its pid."""
    pid = os.fork()
    if not pid:
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def is_blocked(pid: int) -> bool:
    """Return whether the process waits for a lock."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(words[1] == "->" and str(pid) in words for words in lines)


def lock_is_free() -> bool:
    with open(cache.directory() / compiler.LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def compile_to_the_end(path: Path) -> None:
    """Compile all units, and await the forks, as the end of a process does."""
    try:
        compiler._compile([Unit(one, path) for one in NAMES], len(NAMES))
    finally:
        for one in multiprocessing.active_children():
            one.join()


def test_processes_take_the_units_in_turn(tmp_path: Path) -> None:
    """Each is compiled once, and kept when the first process ends."""
    pid = in_child(lambda: compiler._compile([Meeting(name, tmp_path) for name in NAMES], 3))
    assert ended(pid) == 0
    pids = {(tmp_path / name).read_text() for name in NAMES}
    assert len(pids) == len(NAMES), "one waits for the others"
    assert [cache.read(name) for name in NAMES] == [b"code"] * len(NAMES)


def test_a_process_alone(tmp_path: Path) -> None:
    path = tmp_path / "order"
    assert ended(in_child(lambda: compiler._compile([Unit(one, path) for one in NAMES], 1))) == 0
    assert path.read_text().split() == list(NAMES)


@pytest.mark.parametrize("forks", [0, 1])
def test_without_a_process_for_a_fork(forks: int, tmp_path: Path) -> None:
    path = tmp_path / "order"

    def compile_all() -> None:
        limit = BlockingIOError(errno.EAGAIN, "a limit")
        made = [mock.DEFAULT] * forks + [limit]
        with mock.patch.object(os, "fork", side_effect=made, wraps=os.fork):
            compile_to_the_end(path)

    assert ended(in_child(compile_all)) == 0
    assert path.read_text().split() == list(NAMES)


def test_without_a_thread_for_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "order"

    def compile_all() -> None:
        no_thread = RuntimeError("can't start new thread")
        with (
            mock.patch.object(threading.Thread, "start", side_effect=no_thread),
            contextlib.suppress(RuntimeError),  # nor can the pool wait for its end
        ):
            compile_to_the_end(path)

    assert ended(in_child(compile_all)) == 0
    assert path.read_text().split() == list(NAMES)


def test_a_fork_for_each_unit_that_is_missing(tmp_path: Path) -> None:
    def compile_one() -> None:
        with mock.patch.object(os, "fork", wraps=os.fork) as fork:
            compiler._compile([Unit("first", tmp_path / "order")], len(NAMES))
        fork.assert_called_once()

    assert ended(in_child(compile_one)) == 0


def test_it_stops_once_nothing_can_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "order"
    names = [f"{number}" for number in range(9)]

    def compile_all() -> None:
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch.object(cache, "keep", side_effect=full):
            compiler._compile([Unit(one, path) for one in names], 1)

    assert ended(in_child(compile_all)) == 1
    assert len(path.read_text().split()) < len(names)


def test_forks_end_with_the_first_process(tmp_path: Path) -> None:
    pid = in_child(lambda: compiler._compile([Endless(one, tmp_path) for one in NAMES], 1))
    fork = eventually(psutil.Process(pid).children)[0]
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    fork_ended(fork.pid)


def test_another_compiler_is_awaited_until_it_is_dead(tmp_path: Path) -> None:
    """A fork of it counts: the lock is free when all of them have ended."""
    forked = tmp_path / "forked"

    def hold() -> None:
        compiler._lock()
        if not (fork := os.fork()):
            signal.pause()
        (tmp_path / "new").write_text(str(fork))
        (tmp_path / "new").rename(forked)
        signal.pause()

    holder = in_child(hold)
    eventually(forked.exists)
    fork = int(forked.read_text())
    waiter = in_child(compiler._lock)
    try:
        eventually(lambda: is_blocked(waiter))
        os.kill(holder, signal.SIGKILL)
        assert ended(holder) == -signal.SIGKILL
        assert is_blocked(waiter)
        assert not lock_is_free()
    finally:
        os.kill(fork, signal.SIGKILL)
    assert ended(waiter) == 0
    fork_ended(fork)


def test_another_compiler_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "LOCK_S", 1)

    def lock() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest has a handler
        compiler._lock()
        assert not signal.alarm(0), "the limit is for the lock alone"

    with open(cache.directory() / compiler.LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert ended(in_child(lock)) == -signal.SIGALRM
    monkeypatch.setattr(compiler, "LOCK_S", int(PATIENCE_S))
    assert ended(in_child(lock)) == 0


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


# -- the server that waits ------------------------------------------------------------------------


def test_forks_that_compile_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process waits for them."""

    def compile_all() -> None:
        parent = os.getpid()
        if not os.fork():
            process.die_with_parent(parent)
            while True:
                pass
        os.wait()

    first = in_child(compile_all)
    fork = eventually(psutil.Process(first).children)[0]
    now, looks = 0.0, 0

    def wait(_: float) -> None:
        nonlocal now, looks
        looks += 1
        if looks < 4:
            before = fork.cpu_times().user
            eventually(lambda: fork.cpu_times().user > before)
            now += loading.LATE_S + 1.0
            raise subprocess.TimeoutExpired("", 0.0)

    monkeypatch.setattr(loading, "time", mock.Mock(monotonic=lambda: now))
    try:
        loading._wait(mock.Mock(pid=first, wait=wait), [])
    finally:
        os.kill(first, signal.SIGKILL)
        ended(first)
    assert looks == 4, "it has waited until the end"


def test_units_that_another_job_compiles_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of this one waits for its lock."""
    now = 0.0

    def wait(_: float) -> None:
        nonlocal now
        now += loading.LATE_S + 1.0
        raise subprocess.TimeoutExpired("", 0.0)

    monkeypatch.setattr(loading, "time", mock.Mock(monotonic=lambda: now))
    monkeypatch.setattr(process, "tree_cpu_s", lambda _: 1.0)
    kept = mock.Mock(side_effect=[False, True, True])
    loading._wait(mock.Mock(wait=wait), [mock.Mock(is_kept=kept)])
    assert kept.call_count == 3


def test_an_upgrade_while_the_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler would be the new one's."""
    cache.directory()  # reads the sources
    monkeypatch.setattr(cache, "SOURCES", cache.SOURCES[:-1])
    monkeypatch.setattr(process, "spawn", mock.Mock(side_effect=AssertionError))
    with pytest.raises(OSError, match="installed again meanwhile"):
        loading._have_compiled([], 1)
