"""A job with its real processes, and learners whose gradients can be counted in the weights."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
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
from gadei_ps.errors import GadeiError
from gadei_ps.job import faults
from gadei_ps.job.config import JobConfig
from gadei_ps.job.control import Checkpoint, Reload, ask
from gadei_ps.job.faults import Processes, Role, Target
from gadei_ps.learners.client import Client
from gadei_ps.machine import process

ROUNDS = int(
    os.environ.get("CRASH_ROUNDS", "0")
)  # of each long test; 0: as short as in `make test`
TOLD: list[str] = []  # lines that are printed at the end of the run


PATIENT_S = 60.0  # in which no server looks as if it hung, however busy the machine is
PAUSE_S = 0.0005  # between two gradients, because starting processes need the cores


def push_ones(client: Client) -> None:
    client.push(np.ones(client.model.elements, np.float32), samples=1)
    time.sleep(PAUSE_S)


class Team:
    """A job under SGD with a rate of 1: each gradient subtracts 1 from every weight.

    `with` starts its daemon, which adopts a job that is in memory. If the watchdog dies, only
    watch() starts another one.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        values: int = 20_000,
        learners: int = 2,
        start: Callable[[JobConfig], Daemon] = QuickDaemon,
        **how: Any,
    ) -> None:
        tensors = [{"name": "w", "shape": [values]}]
        # With a checkpoint directory, a job that is served again continues from memory.
        checkpoints = {"every_s": 0, "directory": str(directory)}
        how = {"tensors": tensors, "shards": 2, "checkpoint": checkpoints} | how
        self.config = config(name, **how)
        self.name = name
        self.daemon = start(self.config)
        self.learners: list[Pusher] = []
        self._count = learners
        self.buried = 0

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
        """Map the job's memory."""
        self.processes = Processes(self.name)
        self.control = self.processes.control
        self.weights = live_weights(self.name)

    @staticmethod
    def rounds(few: int) -> int:
        """The number of repetitions of a test: `few`, or more in a long run."""
        return max(few, ROUNDS // 10)

    def hire(self) -> None:
        while len(self.learners) < self._count:
            self.learners.append(Pusher(self.name, push_ones))

    def fire(self) -> None:
        """Kill the learners. Their published gradients count."""
        for one in self.learners:
            one.kill()
            self.buried += one.published
        self.learners.clear()

    @property
    def version(self) -> int:
        return int(self.control["version"])

    def find(self, role: Role) -> Target:
        """Wait for a process of this role; for a server, also until a standby is ready."""
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
            case Role.FORK_SERVER:
                return self.processes.fork_server()
            case _:
                return self.processes.watchdog()

    @contextlib.contextmanager
    def hanging(self, hang_s: float) -> Iterator[None]:
        """Have the watchdog kill servers that hang for so long, in this block only.

        Otherwise others would be killed on a machine so busy that a thread waits that long for a
        core.
        """
        self._reload(hang_s)
        yield
        self._reload(PATIENT_S)

    def _reload(self, hang_s: float) -> None:
        wanted = self.daemon.config.model_copy(update={"hang_s": hang_s})
        ask(self.name, Reload(config=wanted.model_dump(mode="json")))

    def goes_on(self, gradients: int = 20) -> None:
        """Wait until this many more gradients are applied."""
        wanted = self.version + gradients
        eventually(lambda: self.version >= wanted, what=lambda: f"is stopped at {self.version}")

    def watch(self) -> None:
        """Start another watchdog if there is none."""
        self.daemon.check()

    def serve_again(self) -> None:
        """Serve the job again, after the death of the watchdog and both servers."""
        self.watch()
        self.look()

    def settle(self, before: int = 0) -> None:
        """Check that each published gradient is in weights and counters exactly once.

        before: version of the checkpoint from which the job has continued.
        """
        self.watch()
        self.fire()
        roster = self.control["roster"]
        eventually(lambda: (roster["retired"] == roster["generation"]).all(), what="all have left")
        expected = before + self.buried
        np.testing.assert_array_equal(self.weights, -expected)
        now = status(self.name)
        assert now["version"] == now["gradients_applied"] == now["samples"] == expected
        assert now["gradients_dropped"] == now["gradients_refused"] == 0
        assert expected < 2**24, "whole numbers that float32 holds"

    def forget(self) -> None:
        """Exclude the gradients pushed so far: they are lost, or in a checkpoint."""
        self.buried = 0


def send(target: Target, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a living process. After SIGKILL, wait for its end."""
    sent = faults.send(target, number, PATIENCE_S)
    assert sent, f"{target} is gone"
    assert sent.ended or number != signal.SIGKILL


@contextlib.contextmanager
def stopped(target: Target) -> Iterator[None]:
    """The process is stopped during the block, or dies."""
    send(target, signal.SIGSTOP)
    try:
        yield
    finally:
        faults.send(target, signal.SIGCONT)


@contextlib.contextmanager
def apart(pid: int) -> Iterator[None]:
    """Run this process on one core and the threads of `pid` on the others.

    On a shared core, the observed process preempts one that polls without a pause, which then never
    sees what it waits for.
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


def seen(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> bool:
    """Poll without a pause. Return False if the condition does not become true."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
    return True


def tids(control: np.void) -> list[int]:
    """Return the threads that hold the leases of the shards."""
    found: list[int] = control["shard"]["tid"][: int(control["shards"])].tolist()
    return found


# -- checkpoints --------------------------------------------------------------------------------


def asking(pipe: Connection, job: str) -> None:
    """Ask for a checkpoint and report its result; runs in a Child."""
    try:
        answer = ask(job, Checkpoint(), PATIENCE_S)
    except GadeiError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    pipe.send(answer)


def writer_of(team: Team) -> Target:
    """Wait for the process that makes a checkpoint."""
    watchdog = psutil.Process(team.find(Role.WATCHDOG).pid)

    def look() -> Target | None:
        for child in watchdog.children():
            if child.name() == "checkpoint_writ":  # a fork, see support.quick; 15 characters
                return Target(Role.WATCHDOG, child.pid, process.start_ticks(child.pid))
        return None

    found: Target = eventually(look)
    return found
