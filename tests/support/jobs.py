"""Jobs with all their processes, and learners that push to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps import _native
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import JobConfig, from_mapping
from gadei_ps.job.control import Status, ask
from gadei_ps.learners import client as client_module
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout, presence, segment, shm
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import data
from support.processes import Child, gone
from support.quick import QuickDaemon
from support.waiting import PATIENCE_S, eventually


def segments(prefix: str) -> list[str]:
    """Return segments of the jobs whose name begins so."""
    return [found.name for found in presence.find() if found.job.startswith(prefix)]


def remove_segments(prefix: str) -> None:
    """Remove the segments of the jobs whose name begins so."""
    for name in segments(prefix):
        segment.unlink(name)


def config(name: str, **values: Any) -> JobConfig:
    """SGD with a rate of 1, so that integer gradients give integer weights, by default.

    No history is kept by default.
    """
    usual = {"optimizer": {"kind": "sgd", "lr": 1.0}, "name": name, "history": False}
    return from_mapping(usual | values, "test")


def daemon(name: str, **values: Any) -> Daemon:
    """A job's daemon, to be used in a with statement; with one server, which starts quicker."""
    return QuickDaemon(config(name, **({"standby": False} | values)))


def status(job: str) -> dict[str, Any]:
    return ask(job, Status(), PATIENCE_S)


def learner(job: str, pid: int) -> dict[str, Any] | None:
    """The row of the status that this process has."""
    return next((row for row in status(job)["learners"] if row["pid"] == pid), None)


def ring_of(job: str, row: int) -> Segment:
    """A learner's ring, read-only: it can be read after the learner is dead and the name gone."""
    return segment.attach(
        shm.segment_name(job, f"ring.{row}"), layout.SegmentKind.RING, writable=False
    )


def live_weights(job: str) -> np.ndarray:
    """The job's weights, read-only, shape (elements,)."""
    name = shm.segment_name(job, "weights")
    return data(segment.attach(name, layout.SegmentKind.WEIGHTS, writable=False))


def _push_for_ever(pipe: Connection, job: str, push: Callable[[Client], object]) -> None:
    client_module.JOB_GONE_S = PATIENCE_S  # a test that kills all servers starts others
    client = Client(job)
    pipe.send((client.row, client.generation))
    pipe.recv()  # a test that needs our ring's head after our death has mapped it
    while True:
        push(client)


class Pusher:
    """A process that calls push(client) for ever, and its ring."""

    def __init__(self, job: str, push: Callable[[Client], object]) -> None:
        self.child = Child(_push_for_ever, job, push)
        try:
            self.row, self.generation = self.child.receive()
            self.ring = ring_of(job, self.row)
        except BaseException:
            self.child.kill()
            raise
        self.child.send()

    @property
    def published(self) -> int:
        """Return the published gradients; also after its death."""
        return _native.load(self.ring.word(layout.RING, "head"))

    def kill(self) -> None:
        self.child.kill()


def kill_all(job: str, socket: Path | None = None) -> None:
    """SIGKILL for the job's watchdog and servers, all at once; its memory stays."""
    pids = [status(str(socket or job))["watchdog_pid"], *presence.server_pids(job)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        eventually(lambda pid=pid: gone(pid), what=f"{pid} of {pids}")
