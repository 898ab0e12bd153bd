"""Servers and learners killed at random instants: the weights are those of a run without kills.

Bit for bit, optimizer state included. One learner at a time pushes a fixed sequence of gradients,
so that there is one order in which they can be applied.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import team
from support import PATIENCE_S, Child, Rig, config, live_weights, published, ring_of, status
from team import apart, seen, spin

from gadei_ps import layout, process, segment
from gadei_ps.daemon import Daemon
from gadei_ps.faults import Processes
from gadei_ps.layout import STATE, Role, SegmentKind
from gadei_ps.learners.client import Client
from gadei_ps.segment import Segment
from gadei_ps.weights import Tensor, place

# So large that one gradient takes longer than it takes to kill a process.
TENSORS = [Tensor("w", (800_000,)), Tensor("b", (50_000,), Role.BUFFER)]
ELEMENTS = place(TENSORS).elements
KINDS = 3
# For each of two jobs; test_recover.py and test_aimed.py kill more servers, and faster ones, and
# test_exactly_once.py more learners.
ROUNDS = team.ROUNDS or 12
SLOTS = 3
SHARDS = 2
Steps = Generator[None, None, None]


@functools.cache
def gradient(elements: int, kind: int) -> np.ndarray:
    noise = np.random.default_rng(kind).standard_normal(elements)
    return noise.astype(np.float32)


def _push(pipe: Connection, job: str, first: int) -> None:
    """Pushes until it is killed; the first gradient is the sequence's number `first`."""
    client = Client(job)
    pipe.send(client.row)
    pipe.recv()
    while True:
        number = first + client.published
        client.push(gradient(client.model.elements, number % KINDS), samples=1)


def until(condition: Callable[[], Any], what: str) -> Steps:
    """A step of a job that waits while the other job goes on."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        yield


class Job:
    """A job under fire."""

    def __init__(self, name: str, kind: str, rounds: int) -> None:
        self.name = name
        self.how = {"optimizer": {"kind": kind, "lr": 0.01}, "shards": SHARDS, "slots": SLOTS}
        self.rounds = rounds
        self.chance = random.Random(kind)
        tensors = [
            {"name": one.name, "shape": list(one.shape), "role": one.role.name.lower()}
            for one in TENSORS
        ]
        self.daemon = Daemon(config(name, tensors=tensors, **self.how))
        self.total = 0  # gradients published by learners that are dead
        self.learner: Child | None = None

    def __enter__(self) -> Job:
        self.daemon.__enter__()
        self.processes = Processes(self.name)
        self.control = self.processes.control
        self.weights = live_weights(self.name)
        self.state = segment.attach(
            segment.segment_name(self.name, "state"), SegmentKind.STATE, writable=False
        )
        self.cursors = list(self.state.view(STATE)["record"][:SHARDS])
        return self

    def __exit__(self, *exc: object) -> None:
        if self.learner is not None:
            self.learner.kill()
        self.daemon.__exit__(None, None, None)

    def run(self) -> Steps:
        for _ in range(self.rounds):
            yield from until(lambda: self.processes.standby() is not None, "a standby")
            yield from self._hire()
            yield from self._round()

    def _hire(self) -> Steps:
        self.learner = Child(_push, self.name, self.total)
        yield from until(lambda: self.learner and self.learner.has_sent, "a learner")
        self.row = self.learner.receive()
        self.ring: Segment = ring_of(self.name, self.row)

    def _round(self) -> Steps:
        """The learner pushes; then the server dies, and the learner a moment before or after."""
        assert self.learner
        self.learner.send()
        yield from until(lambda: published(self.ring) > self.chance.randrange(5), "a gradient")
        if self.chance.random() < 0.3:
            spin(self.chance, 0.001)
            self.learner.signal(signal.SIGKILL)
            self._kill_server()
        else:
            self._kill_server()
            goal = published(self.ring) + self.chance.randrange(2 * SLOTS)
            yield from until(lambda: published(self.ring) >= goal, "gradients after the take-over")
            spin(self.chance, 0.001)
        yield from self._bury()

    def _kill_server(self) -> None:
        """Mostly at some point of a gradient."""
        server = self.processes.server()
        assert server
        pidfd = os.pidfd_open(server.pid)
        try:
            with apart(server.pid):
                if self.chance.random() < 0.8:
                    cursor = self.chance.choice(self.cursors)
                    seen(lambda: int(cursor["cursor"]) != layout.IDLE, 0.02)
                spin(self.chance, 0.0002)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            assert process.gone(pidfd, PATIENCE_S)
        finally:
            os.close(pidfd)

    def _bury(self) -> Steps:
        """The next learner begins where the published gradients of the dead one end."""
        assert self.learner
        self.learner.kill()
        self.learner = None
        self.total += published(self.ring)
        entry = self.control["roster"][self.row]
        yield from until(lambda: entry["retired"] == entry["generation"], "its ring is let go")

    def slots(self) -> list[np.ndarray]:
        head = self.state.view(STATE)
        return [
            self.state.array(
                np.float32,
                self.weights.size,
                int(head["slots_at"]) + stream * int(head["slot_bytes"]),
            ).copy()
            for stream in range(int(head["streams"]))
        ]


def _undisturbed(job: Job) -> tuple[np.ndarray, list[np.ndarray]]:
    """What weights and slots are after the same gradients without a kill."""
    with Rig(job.name, TENSORS, **job.how) as rig, rig.serving():
        for number in range(job.total):
            rig.publish(0, gradient(rig.model.elements, number % KINDS))
        rig.wait_tail(0, job.total)
        return rig.weights.copy(), [slot.copy() for slot in rig.slots]


@pytest.mark.timeout(120 + 5 * ROUNDS)
def test_killed_at_random_instants(job_name: str) -> None:
    """Two jobs at a time: while one waits for its next server, the other one is hit."""
    kinds = ("sgd", "adam")
    for number in range(KINDS):
        gradient(ELEMENTS, number)  # made once, here: the learners are forks
    jobs = [Job(f"{job_name}-{kind}", kind, ROUNDS) for kind in kinds]
    found = []
    with jobs[0], jobs[1]:
        going = [job.run() for job in jobs]
        while going:
            going = [one for one in going if next(one, going) is not going]
            time.sleep(0.0005)
        for job in jobs:
            now = status(job.name)
            assert now["version"] == now["gradients_applied"] == now["samples"] == job.total
            assert now["server_deaths"] == now["learner_deaths"] == ROUNDS
            finished = int(job.control["shard"]["recovered"].sum())
            found.append((job.weights.copy(), job.slots(), finished))
    for job, (weights, slots, finished) in zip(jobs, found, strict=True):
        expected = _undisturbed(job)
        np.testing.assert_array_equal(weights, expected[0])
        for one, wanted in zip(slots, expected[1], strict=True):
            np.testing.assert_array_equal(one, wanted)
        team.TOLD.append(
            f"{job.how['optimizer']['kind']}: {job.rounds} servers and {job.rounds} learners "
            f"killed, {finished} shards with a gradient in hand, {job.total} gradients: equal"
        )
