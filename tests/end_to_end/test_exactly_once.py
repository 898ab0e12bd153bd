"""Learners die at any instant: every gradient that they have published is applied exactly once."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection

import numpy as np
import pytest
from support import (
    Child,
    Stopped,
    daemon,
    eventually,
    learner,
    live_weights,
    published,
    ring_of,
    status,
)

from gadei_ps import layout
from gadei_ps.learners.client import Client
from gadei_ps.segment import Segment

VALUES = 5000
PATTERN = (np.arange(VALUES) % 5 + 1).astype(np.float32)
LEARNERS = 4
DEATHS = 8


def _push_integers(pipe: Connection, job: str) -> None:
    """Pushes for ever; the k-th gradient is a known vector of whole numbers."""
    client = Client(job)
    pipe.send(client.row)
    pipe.recv()  # our ring is mapped by who wants to know its head after our death
    while True:
        client.push({"w": PATTERN * (client.published % 3 + 1)})


def _pushed(count: int) -> int:
    """Sum of the factors of the first `count` gradients of a learner."""
    return sum(k % 3 + 1 for k in range(count))


def consumed(ring: Segment) -> int:
    """Frames that every shard has let go of."""
    head = ring.view(layout.RING)
    return int(head["tail"]["value"][: int(head["shards"])].min())


def leaving(job: str, pid: int) -> bool:
    """Whether the watchdog knows that this learner is gone."""
    row = learner(job, pid)
    return row is not None and row["leaving"]


def _start(job: str) -> tuple[Child, Segment]:
    child = Child(_push_integers, job)
    try:
        ring = ring_of(job, child.receive())
    except BaseException:
        child.kill()
        raise
    child.send()
    return child, ring


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 2])
def test_killed_and_replaced(shards: int, slots: int, job_name: str) -> None:
    chance = random.Random(10 * shards + slots)
    tensors = [{"name": "w", "shape": [VALUES]}]
    with daemon(job_name, tensors=tensors, shards=shards, slots=slots) as job:
        weights = live_weights(job_name)
        server = status(job_name)["server_pid"]
        learners = [_start(job_name) for _ in range(LEARNERS)]
        gone: list[Segment] = []
        try:
            for death in range(DEATHS):
                child, ring = victim = chance.choice(learners)
                if death % 4 == 0:
                    # It dies while the server is busy elsewhere, with all its slots full.
                    eventually(lambda ring=ring: published(ring), what="it has been let in")
                    with Stopped(server):
                        full = consumed(ring) + slots
                        eventually(lambda ring=ring, full=full: published(ring) == full)
                        child.kill()
                        eventually(lambda child=child: leaving(job_name, child.pid))
                    gone.append(ring)
                    learners[learners.index(victim)] = _start(job_name)
                    continue
                enough = published(ring) + chance.randrange(40)
                eventually(lambda ring=ring, enough=enough: published(ring) >= enough)
                for _ in range(chance.randrange(200)):  # anywhere between two gradients
                    published(ring)
                child.kill()
                gone.append(ring)
                learners[learners.index(victim)] = _start(job_name)
        finally:
            for child, _ in learners:
                child.kill()
        heads = [published(ring) for ring in [*gone, *(ring for _, ring in learners)]]
        eventually(lambda: not status(job_name)["learners"], what="all that died are let go")
        job.check()
        end = status(job_name)
        assert end["gradients_applied"] == end["version"] == sum(heads)
        assert end["gradients_refused"] == end["gradients_dropped"] == 0
        assert sum(heads) > DEATHS
        expected = -PATTERN * sum(_pushed(head) for head in heads)
        assert abs(expected).max() < 2**24, "whole numbers that float32 holds"
        np.testing.assert_array_equal(weights[:VALUES], expected)
