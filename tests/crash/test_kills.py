"""Servers and learners are killed at random instants: weights equal those of a run without kills.

They are equal bit for bit, and so is the optimizer state. One learner at a time pushes a fixed
sequence of gradients, so that only one order of applying them is possible.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import team
from support import (
    PATIENCE_S,
    Pusher,
    QuickDaemon,
    Rig,
    config,
    live_weights,
    payload_of,
    same,
    spin,
    status,
)
from team import apart, seen

from gadei_ps.job.faults import Processes
from gadei_ps.learners.client import Client, Rows
from gadei_ps.machine import process
from gadei_ps.memory import layout, segment, shm
from gadei_ps.memory.layout import STATE, Role, SegmentKind
from gadei_ps.memory.weights import Model, Tensor, place

# So large that applying one gradient takes longer than killing a process.
TENSORS = [
    Tensor("w", (400_000,)),
    Tensor("table", (4000, 100)),
    Tensor("b", (50_000,), Role.BUFFER),
]
ELEMENTS = place(TENSORS).elements
KINDS = 4  # the last one consists of rows
# For each of two jobs. test_recover.py and test_aimed.py kill more servers, and faster ones;
# test_exactly_once.py kills more learners.
ROUNDS = team.ROUNDS or 25
SLOTS = 3
SHARDS = 2
Steps = Generator[None, None, None]


@functools.cache
def gradient(elements: int, kind: int) -> np.ndarray:
    noise = np.random.default_rng(kind).standard_normal(elements)
    return noise.astype(np.float32)


@functools.cache
def rows() -> Rows:
    """Most rows of `table`, in random order, some of them twice."""
    draw = np.random.default_rng(99)
    indices = draw.integers(0, 4000, 6000)
    return Rows(indices, draw.standard_normal((6000, 100)).astype(np.float32))


@functools.cache
def squares(model: Model, kind: int) -> float:
    """The sum of squares that a client's frame has, to the last bit."""
    if kind == KINDS - 1:
        return payload_of(model, {0: gradient(400_000, 0), 1: tuple(rows())})[3]
    flat = model.gradients(gradient(model.elements, kind))
    return payload_of(model, dict(enumerate(flat.values())))[3]


def until(condition: Callable[[], Any], what: str) -> Steps:
    """A step of a job: waits for the condition while the other job continues."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        yield


class Job:
    """A job whose processes are killed."""

    def __init__(self, name: str, kind: str, rounds: int) -> None:
        self.name = name
        optimizer = {"kind": kind, "lr": 0.01, "clip_norm": 500.0 if kind == "sgd" else 0.0}
        # When a gradient comes decides how stale it is, so that no two runs would be the same.
        optimizer["spike_compensation"] = False
        self.how = {"optimizer": optimizer, "shards": SHARDS, "slots": SLOTS}
        self.rounds = rounds
        self.chance = random.Random(kind)
        tensors = [
            {"name": one.name, "shape": list(one.shape), "role": one.role.name.lower()}
            for one in TENSORS
        ]
        self.daemon = QuickDaemon(config(name, tensors=tensors, **self.how))
        self.total = 0  # gradients published by dead learners
        self.failovers: list[float] = []  # seconds from a kill to the next applied gradient
        self.learner: Pusher | None = None

    def __enter__(self) -> Job:
        self.daemon.__enter__()
        self.processes = Processes(self.name)
        self.control = self.processes.control
        self.weights = live_weights(self.name)
        self.state = segment.attach(
            shm.segment_name(self.name, "state"), SegmentKind.STATE, writable=False
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
            self.learner = Pusher(self.name, self._push)
            yield from self._round(self.learner)

    def _push(self, client: Client) -> None:
        """Push the next gradient of the sequence, which dead learners have begun."""
        number = self.total + client.published
        if number % KINDS == KINDS - 1:
            client.push({"table": rows(), "w": gradient(400_000, 0)}, samples=1)
        else:
            client.push(gradient(client.model.elements, number % KINDS), samples=1)

    def _round(self, learner: Pusher) -> Steps:
        """The learner pushes. The server is killed, and the learner just before or after it."""
        yield from until(lambda: learner.published > self.chance.randrange(5), "a gradient")
        if self.chance.random() < 0.3:
            spin(self.chance, 0.001)
            learner.child.signal(signal.SIGKILL)
            self._kill_server(pushed_to=False)
        else:
            self._kill_server(pushed_to=True)
            goal = learner.published + self.chance.randrange(2 * SLOTS)
            yield from until(lambda: learner.published >= goal, "gradients after the failover")
            spin(self.chance, 0.001)
        learner.kill()
        self.total += learner.published
        entry = self.control["roster"][learner.row]
        yield from until(lambda: entry["retired"] == entry["generation"], "its ring is released")

    def _kill_server(self, pushed_to: bool) -> None:
        """Kill the server, mostly in the middle of a gradient. pushed_to: a learner continues."""
        shards = self.control["shard"][:SHARDS]
        threads = shards["tid"].copy()
        server = self.processes.server()
        assert server
        pidfd = os.pidfd_open(server.pid)
        try:
            with apart(server.pid):
                if self.chance.random() < 0.8:
                    cursor = self.chance.choice(self.cursors)
                    seen(lambda: int(cursor["cursor"]) != layout.IDLE, 0.02)
                spin(self.chance, 0.0002)
                killed_at = time.monotonic()
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if pushed_to and seen(lambda: (shards["tid"] != threads).any(), 10.0):
                    before = shards["frames"].sum()
                    if seen(lambda: shards["frames"].sum() != before, 10.0):
                        self.failovers.append(time.monotonic() - killed_at)
            assert process.gone(pidfd, PATIENCE_S)
        finally:
            os.close(pidfd)

    def kept(self) -> list[np.ndarray]:
        """Return copies of weights and slots."""
        head = self.state.view(STATE)
        at, size = int(head["slots_at"]), int(head["slot_bytes"])
        slots = [
            self.state.array(np.float32, self.weights.size, at + stream * size)
            for stream in range(int(head["streams"]))
        ]
        return [part.copy() for part in (self.weights, *slots)]


def _undisturbed(job: Job) -> list[np.ndarray]:
    """Return weights and slots after the same gradients without a kill."""
    with Rig(job.name, TENSORS, **job.how) as rig, rig.serving():
        for number in range(job.total):
            if number % KINDS == KINDS - 1:
                given = {0: gradient(400_000, 0), 1: tuple(rows())}
                rig.publish_rows(0, given, squares=squares(rig.model, number % KINDS))
            else:
                flat = gradient(rig.model.elements, number % KINDS)
                rig.publish(0, flat, squares=squares(rig.model, number % KINDS))
        rig.wait_tail(0, job.total)
        return rig.kept()


@pytest.mark.timeout(600 + 5 * ROUNDS)
def test_killed_at_random_instants(job_name: str) -> None:
    """Run two jobs: while one waits for its next server, processes of the other are killed."""
    kinds = ("sgd", "adam")
    for number in range(KINDS):
        gradient(ELEMENTS, number)  # made once, before the learners are forked
    rows()
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
            found.append((job.kept(), finished))
    for job, (disturbed, finished) in zip(jobs, found, strict=True):
        same(disturbed, _undisturbed(job))
        p50, p99 = 1e3 * np.quantile(job.failovers, [0.5, 0.99])
        team.TOLD.append(
            f"{job.how['optimizer']['kind']}: {job.rounds} servers and {job.rounds} learners "
            f"killed, {finished} shards with a gradient in flight, {job.total} gradients: equal; "
            f"failover p50 {p50:.1f} ms, p99 {p99:.1f} ms"
        )
