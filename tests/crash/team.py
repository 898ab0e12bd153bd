"""A job with its real processes, and learners whose gradients can be counted in the weights."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from support import (
    PATIENCE_S,
    Pusher,
    QuickDaemon,
    config,
    eventually,
    live_weights,
    status,
)

from gadei_ps.commands.daemon import Daemon
from gadei_ps.job import processes
from gadei_ps.job.processes import Processes, Role, Target
from gadei_ps.learners.client import Client

ROUNDS = int(
    os.environ.get("CRASH_ROUNDS", "0")
)  # of each long test; 0: as short as in `make test`
TOLD: list[str] = []  # lines for the end of the run


PAUSE_S = 0.0005  # between two gradients: what starts meanwhile needs the cores


def push_ones(client: Client) -> None:
    client.push(np.ones(client.model.elements, np.float32), samples=1)
    time.sleep(PAUSE_S)


class Team:
    """A job under SGD with a rate of 1: each gradient takes 1 from every weight.

    Its daemon is started by `with`, adopts what is in memory if there is something, and is not
    looked after: that is what watch() is for.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        values: int = 20_000,
        learners: int = 2,
        start: type[Daemon] = QuickDaemon,
        **how: Any,
    ) -> None:
        tensors = [{"name": "w", "shape": [values]}]
        # A job that names a directory goes on from what is in memory when it is served again.
        how = {"shards": 2, "checkpoint": {"every_s": 0, "directory": str(directory)}} | how
        self.config = config(name, tensors=tensors, **how)
        self.name = name
        self.daemon = start(self.config)
        self.learners: list[Pusher] = []
        self._count = learners
        self._buried = 0

    def __enter__(self) -> Self:
        self.daemon.__enter__()
        try:
            self.look()
            self.hire()
        except BaseException:
            self.fire()
            self.daemon.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.fire()
        self.daemon.__exit__(kind, error, trace)

    def look(self) -> None:
        """Maps the job's memory, for good."""
        self.processes = Processes(self.name)
        self.control = self.processes.control
        self.weights = live_weights(self.name)

    @staticmethod
    def rounds(few: int) -> int:
        """How often a test repeats what it does; a long run does it more often."""
        return max(few, ROUNDS // 10)

    def hire(self) -> None:
        while len(self.learners) < self._count:
            self.learners.append(Pusher(self.name, push_ones))

    def fire(self) -> None:
        """Kills the learners; what they have published counts."""
        for one in self.learners:
            one.kill()
            self._buried += one.published
        self.learners.clear()

    @property
    def version(self) -> int:
        return int(self.control["version"])

    def find(self, role: Role) -> Target:
        """Waits until there is one; a server is not replaced before another stands by."""
        if role is Role.SERVER:
            self.find(Role.STANDBY)
        found: Target = eventually(lambda: self._found(role), what=f"a {role}")
        return found

    def _found(self, role: Role) -> Target | None:
        match role:
            case Role.SERVER:
                return self.processes.server()
            case Role.STANDBY:
                return self.processes.standby()
            case _:
                return self.processes.watchdog()

    def goes_on(self, gradients: int = 20) -> None:
        """More of them are applied."""
        wanted = self.version + gradients
        eventually(lambda: self.version >= wanted, what=lambda: f"stands still at {self.version}")

    def watch(self) -> None:
        """Another watchdog if there is none."""
        self.daemon.check()

    def serve_again(self) -> None:
        """After the death of the watchdog and both servers."""
        self.watch()
        self.look()

    def settle(self, before: int = 0) -> None:
        """Every published gradient is in the weights exactly once, and in the counters.

        before: version of a checkpoint that the job has gone on from.
        """
        self.watch()
        self.fire()
        roster = self.control["roster"]
        eventually(lambda: (roster["retired"] == roster["generation"]).all(), what="all are let go")
        expected = before + self._buried
        np.testing.assert_array_equal(self.weights, -expected)
        now = status(self.name)
        assert now["version"] == now["gradients_applied"] == now["samples"] == expected
        assert now["gradients_dropped"] == now["gradients_refused"] == 0
        assert expected < 2**24, "whole numbers that float32 holds"

    def forget(self) -> None:
        """What was pushed so far is lost, or in a checkpoint."""
        self._buried = 0


def send(target: Target, number: signal.Signals = signal.SIGKILL) -> None:
    """To a process that is alive; waits for the end of one that is killed."""
    sent = processes.send(target, number, PATIENCE_S)
    assert sent, f"{target} is gone"
    assert sent.ended or number != signal.SIGKILL


@contextlib.contextmanager
def stopped(target: Target) -> Iterator[None]:
    """It stands still meanwhile, or dies."""
    send(target, signal.SIGSTOP)
    try:
        yield
    finally:
        processes.send(target, signal.SIGCONT)


@contextlib.contextmanager
def apart(pid: int) -> Iterator[None]:
    """This process on one core, that one's threads on the others.

    On a shared core, a process that looks without a pause is preempted by what it waits for, and
    never sees it.
    """
    cores = os.sched_getaffinity(0)
    mine = {min(cores)}
    if len(cores) > 1:
        os.sched_setaffinity(0, mine)
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), cores - mine)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def seen(condition: Callable[[], Any], timeout_s: float = 10.0) -> bool:
    """Looks without a pause; False if it does not come true."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
    return True


def tids(control: np.void) -> list[int]:
    """Threads that hold the leases of the shards."""
    found: list[int] = control["shard"]["tid"][: int(control["shards"])].tolist()
    return found
