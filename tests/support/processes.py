"""Processes to fork, stop and kill, and what becomes of them."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from gadei_ps import _native
from gadei_ps.machine import process
from support.waiting import PATIENCE_S, eventually

FORK = multiprocessing.get_context("fork")
FAULTS = tempfile.TemporaryFile()  # noqa: SIM115
"""Target of reports of fatal signals: many tests want them, so a passing run prints none."""


def children() -> set[int]:
    """Return pids of this process' children; those that have ended are reaped."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):
            found |= {int(pid) for pid in path.read_text().split()}
    for pid in list(found):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                found.discard(pid)
    return found


def described(before: set[int]) -> list[list[str]]:
    """Command lines of children that were not there before."""
    lines = []
    for pid in children() - before:
        with contextlib.suppress(psutil.Error):
            lines.append([str(pid), *psutil.Process(pid).cmdline()])
    return lines


def _child(function: Callable[..., None], pipe: Connection, parent: int, args: Any) -> None:
    _native.die_with_parent(signal.SIGKILL)
    faulthandler.enable(FAULTS)
    if os.getppid() == parent:
        if torch := sys.modules.get("torch"):
            torch.seed()  # or it draws what its parent draws
        function(pipe, *args)


class Child:
    """A forked process that runs function(pipe, *args), to be killed at any instant."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(
            target=_child, args=(function, theirs, os.getpid(), args), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self._process.pid
        self.pid = self._process.pid

    def receive(self, timeout_s: float = PATIENCE_S) -> Any:
        """The next thing that it sends; fails when it ends or stays silent."""
        ready = wait([self._pipe, self._process.sentinel], timeout_s)
        if self._pipe not in ready and not self._pipe.poll():
            raise AssertionError(f"child {self.pid} ended: {self._process.exitcode}, {ready=}")
        return self._pipe.recv()

    @property
    def has_sent(self) -> bool:
        """Return whether there is something to receive, its end included."""
        return bool(wait([self._pipe, self._process.sentinel], 0))

    def send(self, value: Any = None) -> None:
        self._pipe.send(value)

    def signal(self, number: int) -> None:
        """Send a signal; after SIGSTOP none of its threads runs any more when this returns."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._process.kill()
        self.join()

    def join(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end and return its exit code, negative for a signal."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"child {self.pid} does not end"
        self._pipe.close()
        return self._process.exitcode


def stop(pid: int) -> None:
    """Send SIGSTOP; none of its threads runs any more when this returns."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    eventually(lambda: all(b") T" in (task / "stat").read_bytes() for task in tasks.iterdir()))


class Stopped:
    """A process that does not run meanwhile, none of its threads."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def __enter__(self) -> None:
        stop(self._process.pid)

    def __exit__(self, *exc: object) -> None:
        self._process.resume()


@contextlib.contextmanager
def fork(count: int, function: Callable[..., None], *args: Any) -> Iterator[list[Child]]:
    """Children that are killed at the block's end, if they have not ended."""
    made = [Child(function, *args) for _ in range(count)]
    try:
        yield made
    finally:
        for child in made:
            child.kill()


def gone(pid: int) -> bool:
    """Ended with all its threads, though perhaps nobody has asked for its exit code yet."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return process.gone(pidfd, 0)
    finally:
        os.close(pidfd)


class Manager:
    """systemd's end of a service's notify socket: a path, or @NAME for the abstract namespace."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        """Every datagram since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.socket.recv(4096).decode())
        return found

    def close(self) -> None:
        self.socket.close()
