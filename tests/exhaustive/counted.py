"""Learners that push ones on request, with a count of their gradients."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from support import Child, ring_of

from gadei_ps import _native
from gadei_ps.errors import ConnectionLost, GadeiError, JobNotFound, NoAnswer
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout

if TYPE_CHECKING:
    from served import Job

VALUES = 1024
# For what takes milliseconds on an idle machine.
PATIENCE_S = float(os.environ.get("PATIENCE_S", "30"))
NO_WATCHDOG = (JobNotFound, ConnectionLost, NoAnswer)


def patiently(call: Callable[[], Any]) -> Any:
    """Call until a watchdog answers."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except NO_WATCHDOG:
            if time.monotonic() > until:
                raise
            time.sleep(0.002)


def _learn(pipe: Connection, job: str, tensors: bool, stubborn: bool) -> None:
    """Attach, then follow orders: push until a pause is requested, detach.

    tensors: it brings the model. stubborn: it does not leave by itself when the job stops.
    """
    how = {"tensors": {"w": np.zeros(VALUES, np.float32)}} if tensors else {}
    client = patiently(lambda: Client(job, **how))
    ones = np.ones(client.model.elements, np.float32)
    pipe.send((client.row, client.generation))
    goes = False
    try:
        while True:
            if pipe.poll(0.0 if goes else None):
                word, *args = pipe.recv()
                if word == "go":
                    goes = True
                elif word == "once":
                    client.push(ones, samples=1)
                    client.wait_applied()
                    pipe.send(client.published)
                elif word == "pause":
                    with client.exclusive():
                        copy = client.pull()
                        pipe.send(None)
                        pipe.recv()
                        client.assign(client.model.views(copy))
                    pipe.send(bool(copy.min() == copy.max()))
                elif word == "rest":
                    goes = False
                    client.wait_applied()
                    pipe.send(client.published)
                elif word == "call":
                    name, *rest = args
                    pipe.send(getattr(client, name)(*rest))
                elif word == "damage":
                    at = client.place.ring.word(layout.RING, "head")
                    _native.store(at, 1 << 40)
                elif word == "detach":
                    client.detach()
                    pipe.send("detached")
                    return
            if goes and client.stopping and not stubborn:
                client.detach()
                return
            if goes:
                client.wait_turn()
                client.push(ones, samples=1)
                time.sleep(0.001)  # processes that start need the cores
    except GadeiError as error:
        pipe.send(error)


class Learner:
    """A learner's process, and its ring."""

    def __init__(self, job: Job, *, tensors: bool = False, stubborn: bool = False) -> None:
        self._job = job
        self._child = Child(_learn, job.name, tensors, stubborn)
        self.pid = self._child.pid
        self.row, self.generation = self._hear()
        self._ring = ring_of(job.name, self.row)
        self._published: int | None = None  # where the ring does not show it

    def _hear(self) -> Any:
        self._job.until(lambda: self._child.has_sent, "a learner continues")
        answer = self._child.receive()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def published(self) -> int:
        """Return the published gradients; also after its death."""
        if self._published is not None:
            return self._published
        return _native.load(self._ring.word(layout.RING, "head"))

    def go(self) -> None:
        """It pushes, one gradient after the other."""
        self._child.send(("go",))

    def rest(self) -> int:
        """It pushes no more, and all that it has pushed is applied. Returns how many."""
        self._child.send(("rest",))
        return int(self._hear())

    def once(self) -> None:
        """It pushes one gradient, which is applied."""
        self._child.send(("once",))
        self._hear()

    def call(self, name: str, *args: Any) -> Any:
        self._child.send(("call", name, *args))
        return self._hear()

    def pause(self) -> None:
        """Pause all others until go_on(), which assigns what this one has copied."""
        self._child.send(("pause",))
        self._hear()

    def go_on(self) -> None:
        self._child.send()
        assert self._hear(), "the shards had not applied the same"
        self._job.assigned += 1

    def damage(self) -> None:
        """It writes nonsense over the head of its ring."""
        self._published = self.rest()
        self._child.send(("damage",))

    def detach(self) -> None:
        self._child.send(("detach",))
        self._hear()
        self._child.join()

    def kill(self) -> None:
        self._child.kill()
