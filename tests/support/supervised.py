"""Learners that do one call at a time, and a watchdog whose looks are counted."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
from shell import Cli, Running, is_running

from gadei_ps.errors import GadeiError
from gadei_ps.job.control import StopJob, ask
from gadei_ps.learners.client import Client
from gadei_ps.watchdog import servers, supervisor
from gadei_ps.watchdog.notify import Notify
from gadei_ps.watchdog.roster import Roster
from gadei_ps.watchdog.serve_options import Options
from support import (
    FORK,
    Child,
    Pusher,
    config,
    eventually,
    fork,
    live_weights,
    status,
)
from support.quick import fork_quickly

VALUES = 3000
TIMEOUT_S = 1.2
TENSORS = [{"name": "w", "shape": [VALUES]}]
TOML = f"[optimizer]\nkind = 'sgd'\nlr = 1.0\n[[tensors]]\nname = 'w'\nshape = [{VALUES}]\n"


def _obey(pipe: Connection, job: str) -> None:
    """Call the client's methods whose names and arguments it is sent."""
    client = Client(job)
    pipe.send("attached")
    while True:
        name, *args = pipe.recv()
        try:
            pipe.send(getattr(client, name)(*args))
        except GadeiError as error:
            pipe.send(f"{type(error).__name__}: {error}")


def tell(child: Child, name: str, *args: Any) -> None:
    """The child begins a call; child.receive() gives its result."""
    child.send((name, *args))


def call(child: Child, name: str, *args: Any) -> Any:
    tell(child, name, *args)
    return child.receive()


@contextlib.contextmanager
def team(job: str, count: int, *calls: str) -> Iterator[list[Child]]:
    """Yield learners that follow orders and have done these calls."""
    with fork(count, _obey, job) as made:
        for child in made:
            assert child.receive() == "attached"
            for name in calls:
                call(child, name)
        yield made


def one_at(value: int) -> np.ndarray:
    gradient = np.zeros(VALUES, np.float32)
    gradient[value] = 1.0
    return gradient


def gradient_of(values: np.ndarray) -> dict[str, np.ndarray]:
    return {"w": values}


@contextlib.contextmanager
def pushing(job: str, value: int | None = None) -> Iterator[Pusher]:
    """Start a learner that has had its first turn; with ones, or a one at a single value."""
    gradient = one_at(value) if value is not None else np.ones(VALUES, np.float32)

    def push(client: Client) -> None:
        client.wait_turn()
        client.push({"w": gradient})
        time.sleep(0.0005)  # what is started meanwhile needs the cores

    one = Pusher(job, push)
    try:
        eventually(lambda: one.published)
        yield one
    finally:
        one.kill()


def goes_on(job: str, gradients: int = 20) -> None:
    version = status(job)["version"]
    eventually(lambda: status(job)["version"] >= version + gradients)


def standby(job: str) -> int:
    return int(eventually(lambda: status(job)["standby_pid"], what="nobody stands by"))


def settled(job: str) -> None:
    """Once the learners are gone: every published gradient is in the weights."""
    eventually(lambda: not status(job)["learners"])
    now = status(job)
    np.testing.assert_array_equal(live_weights(job)[:VALUES], -now["version"])
    assert now["gradients_applied"] == now["version"]


TICK_S = 0.02


class Looks(Notify):
    """Called by the watchdog after each look at everything."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self._count = count

    @property
    def enabled(self) -> bool:
        return True

    def status(self, text: str) -> None:
        self._count.value += 1


def _supervise(
    pipe: Connection, job: str, looks: Any, clock: Any | None, values: dict[str, Any]
) -> None:
    """A watchdog that looks at everything more often than others do, and counts it.

    clock: time by which learners hang; None: the real time.
    """
    kill_hung = Roster.kill_hung
    if clock is not None:
        Roster.kill_hung = lambda self, now: kill_hung(self, clock.value)
    supervisor.TICK_S = supervisor.SLOW_TICK_S = TICK_S
    servers.STANDBY_LIMIT_S = TIMEOUT_S
    wanted = config(job, **({"standby": False, "tensors": TENSORS} | values))
    with fork_quickly():
        supervisor.serve(wanted, Options(fresh=True, quiet=True), Looks(looks))


class Watched:
    """A job with such a watchdog.

    stands: learners hang by a time that passes in look() only, however busy the machine is.
    """

    def __init__(self, job: str, *, stands: bool = False, **values: Any) -> None:
        self.job = job
        self._looks = FORK.Value(ctypes.c_uint64)
        self._clock = FORK.Value(ctypes.c_double) if stands else None
        self.watchdog = Child(_supervise, job, self._looks, self._clock, values)

    def __enter__(self) -> Self:
        eventually(lambda: is_running(self.job))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None and self.watchdog.alive:
            ask(self.job, StopJob(drain=False))
            assert self.watchdog.join() == 0
        self.watchdog.kill()

    def look(self, seconds: float) -> None:
        """Wait until the watchdog has looked for so long, by its own clock."""
        for _ in range(round(seconds / TICK_S)):
            enough = self._looks.value + 1
            if self._clock is not None:
                self._clock.value += TICK_S
            eventually(lambda enough=enough: self._looks.value >= enough)


def again(cli: Cli, job: str, *options: str) -> Running:
    """Serve the job file once more."""
    made = cli.start("serve", f"{job}.toml", *options)
    eventually(lambda: is_running(job) or made.process.poll() is not None, what=lambda: made.err)
    assert made.process.poll() is None, made.err
    return made
