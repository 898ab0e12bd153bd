"""A job that owns a part of the batches: each is answered once, whoever is killed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from support import Child, eventually, spin, status
from team import Team, send

from gadei_ps.job.faults import Role
from gadei_ps.learners.assigned_batches import AssignedBatches, WeightsCopy
from gadei_ps.learners.client import Client
from gadei_ps.memory.owned import Ranges

BATCHES, EPOCHS = 600, 2
VALUES = 2 * BATCHES * EPOCHS
"""Each gradient counts its batch in both halves, which two shards hold."""


def _answers(pipe: Connection, job: str) -> None:
    with Client(job) as client:
        pipe.send(None)
        for batch in client.batches(BATCHES, 1, EPOCHS):
            gradient = np.zeros(VALUES, np.float32)
            place = batch.epoch * BATCHES + batch.index
            gradient[[place, VALUES // 2 + place]] = -1
            client.push(gradient, samples=1)
        pipe.send("done")


@contextlib.contextmanager
def learners(job: str, count: int) -> Iterator[list[Child]]:
    children = [Child(_answers, job) for _ in range(count)]
    try:
        for one in children:
            one.receive()
        yield children
    finally:
        for one in children:
            one.kill()


def places(ranges: Ranges) -> np.ndarray:
    """A mask of these batches."""
    found = np.zeros(BATCHES * EPOCHS, bool)
    for epoch, begin, end in ranges:
        found[epoch * BATCHES + begin : epoch * BATCHES + end] = True
    return found


class Owner:
    """An agent's part: what it has given, and what must be in the weights."""

    def __init__(self, job: str) -> None:
        self.client = Client(job, name="agent")
        self.owned = AssignedBatches(self.client)
        self.given = np.zeros(BATCHES * EPOCHS, bool)
        self.weights = np.zeros(self.client.model.elements, np.float32)

    def close(self) -> None:
        self.owned.close()
        self.client.detach()

    def give(self, ranges: Ranges) -> None:
        self.given |= places(ranges)
        while ranges:
            ranges = self.owned.give(ranges)

    def look(self) -> WeightsCopy:
        """Check that the weights have each given and answered value exactly once, in all shards."""
        copied = self.owned.copy(self.weights)
        answered = self.given & ~places(copied.unanswered)
        for half in np.split(self.weights[:VALUES], 2):
            np.testing.assert_array_equal(half, answered)
        assert copied.samples == answered.sum()
        return copied


def test_each_batch_once_whoever_is_killed(job_name: str, tmp_path: Path) -> None:
    chance = random.Random(18)
    ranges: Ranges = [
        (epoch, begin, begin + 3) for epoch in range(EPOCHS) for begin in range(0, BATCHES, 3)
    ]
    chance.shuffle(ranges)
    with (
        Team(job_name, tmp_path, values=VALUES, learners=0, owned=True) as team,
        learners(job_name, 2) as children,
    ):
        eventually(lambda: status(job_name)["work"]["batches"])
        owner = Owner(job_name)
        assert not owner.look().unanswered
        for role in (Role.SERVER, Role.WATCHDOG, Role.SERVER, None, Role.WATCHDOG):
            part, ranges = ranges[:60], ranges[60:]
            target = team.find(role) if role else None
            killer = None
            owner.give(part[:30])
            spin(chance, 0.003)
            if target is not None:
                send(target)
            if role is Role.WATCHDOG:
                team.watch()
            if role is None:
                killer = children.pop()
                killer.kill()
                children.append(Child(_answers, job_name))
                children[-1].receive()
            owner.give(part[30:])
            owner.look()
        # Reset batches are handed out to nobody, until it is given again.
        owner.give(ranges)
        owner.owned.take_back()
        eventually(lambda: not owner.owned.copy(owner.weights).unanswered)
        assert status(job_name)["work"]["waits"]
        owner.given = owner.weights[: VALUES // 2] > 0
        owner.look()
        again = [
            (int(one) // BATCHES, int(one) % BATCHES, int(one) % BATCHES + 1)
            for one in np.flatnonzero(~owner.given)
        ]
        owner.give(again)
        owner.owned.finish(EPOCHS)
        for one in children:
            assert one.receive() == "done"
        assert owner.given.all() and not owner.look().unanswered
        owner.close()
