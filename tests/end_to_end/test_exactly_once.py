"""Learners die at any instant: every gradient that they have published is applied exactly once."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support import Pusher, Stopped, daemon, eventually, learner, live_weights, spin, status

from gadei_ps.learners.client import Client
from gadei_ps.memory import layout

VALUES = 5000
PATTERN = (np.arange(VALUES) % 5 + 1).astype(np.float32)
LEARNERS = 4
DEATHS = 8


def _push_integers(client: Client) -> None:
    """The k-th gradient is a known vector of whole numbers."""
    client.push({"w": PATTERN * (client.published % 3 + 1)})


def _pushed(count: int) -> int:
    """Sum of the factors of the first `count` gradients of a learner."""
    return sum(k % 3 + 1 for k in range(count))


def consumed(learner: Pusher) -> int:
    """Return the frames that every shard has released."""
    head = learner.ring.view(layout.RING)
    return int(head["tail"]["value"][: int(head["shards"])].min())


def leaving(job: str, pid: int) -> bool:
    """Return whether the watchdog has detected that this learner is gone."""
    row = learner(job, pid)
    return row is not None and row["leaving"]


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 2])
def test_killed_and_replaced(shards: int, slots: int, job_name: str) -> None:
    chance = random.Random(10 * shards + slots)
    tensors = [{"name": "w", "shape": [VALUES]}]
    with daemon(job_name, tensors=tensors, shards=shards, slots=slots) as job:
        weights = live_weights(job_name)
        server = status(job_name)["server_pid"]
        learners = [Pusher(job_name, _push_integers) for _ in range(LEARNERS)]
        gone: list[Pusher] = []
        try:
            for death in range(DEATHS):
                victim = chance.choice(learners)
                if death % 4 == 0:
                    # It dies while the server is busy elsewhere, with all its slots full.
                    eventually(lambda victim=victim: victim.published, what="it has been let in")
                    with Stopped(server):
                        full = consumed(victim) + slots
                        eventually(lambda victim=victim, full=full: victim.published == full)
                        victim.kill()
                        eventually(lambda victim=victim: leaving(job_name, victim.child.pid))
                else:
                    enough = victim.published + chance.randrange(40)
                    eventually(lambda victim=victim, enough=enough: victim.published >= enough)
                    spin(chance, 0.0001)  # anywhere between two gradients
                    victim.kill()
                gone.append(victim)
                learners[learners.index(victim)] = Pusher(job_name, _push_integers)
        finally:
            for one in learners:
                one.kill()
        heads = [one.published for one in (*gone, *learners)]
        eventually(lambda: not status(job_name)["learners"], what="all that died are detached")
        job.check()
        end = status(job_name)
        assert end["gradients_applied"] == end["version"] == sum(heads)
        assert end["gradients_refused"] == end["gradients_dropped"] == 0
        assert sum(heads) > DEATHS
        expected = -PATTERN * sum(_pushed(head) for head in heads)
        assert abs(expected).max() < 2**24, "whole numbers that float32 holds"
        np.testing.assert_array_equal(weights[:VALUES], expected)
