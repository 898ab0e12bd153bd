"""Machines that divide the batches of a pass: each is in the group's weights once, whoever dies."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from support import Child, daemon, eventually, live_weights, status
from support.beside import Agent, alike, ports

from gadei_ps.learners.client import Client

BATCHES, EPOCHS = 360, 2
PLACES = BATCHES * EPOCHS
EVERY = 20


def _answers(pipe: Connection, job: str, log: Path, batches: int = BATCHES) -> None:
    """The gradient of a batch is 1 at its place, and at another place a number of its own."""
    chance = random.Random(os.getpid())
    with Client(job) as client, log.open("a", buffering=1) as lines:
        pipe.send(None)
        for batch in client.batches(batches, 1, EPOCHS):
            place, number = batch.epoch * BATCHES + batch.index, chance.uniform(1, 1000)
            gradient = np.zeros(client.model.elements, np.float32)
            gradient[[place, PLACES + place]] = -1, -number
            lines.write(f"{place} {number}\n")
            client.push(gradient, samples=3)
            time.sleep(0.02)  # so that a job has some left when its next agent comes
        pipe.send("done")


@contextlib.contextmanager
def machines(prefix: str, log: Path, *batches: int) -> Iterator[tuple[list[str], list[Child]]]:
    """Jobs, each with a learner that takes so many batches for a pass."""
    names = [f"{prefix}-{number}" for number in range(len(batches))]
    with contextlib.ExitStack() as stack:
        learners = []
        for name, count in zip(names, batches, strict=True):
            tensors = [{"name": "w", "shape": [2 * PLACES]}]
            job = stack.enter_context(daemon(name, tensors=tensors, shards=2, owned=True))
            learners.append(Child(_answers, name, log, count))
            stack.callback(job.check)
            stack.callback(learners[-1].kill)
            learners[-1].receive()
        yield names, learners


def _spoil(job: str) -> None:
    """One gradient makes all weights infinite."""
    with Client(job) as client:
        client.push(np.full(client.model.elements, 3e38, np.float32), rate_scale=1e9)


def check(job: str, log: Path) -> None:
    """A batch that two gradients were counted for would have the numbers of neither."""
    numbers: dict[int, list[float]] = {}
    for line in log.read_text().splitlines():
        place, number = line.split()
        numbers.setdefault(int(place), []).append(float(number))
    weights = live_weights(job)
    counted, weighed = weights[:PLACES], weights[PLACES : 2 * PLACES]
    assert (counted > 1e-3).all(), np.flatnonzero(counted <= 1e-3)
    assert (counted < 1 + 1e-3).all()
    for place in range(PLACES):
        found = weighed[place] / counted[place]
        assert any(abs(found - one) < 1e-2 * one for one in numbers[place]), (place, found)


def test_each_batch_once_though_an_agent_is_killed(job_name: str, tmp_path: Path) -> None:
    """The first member, which makes proposals; its job trains on alone until the next life."""
    victim = 0
    log = tmp_path / "pushed"
    log.touch()
    with machines(job_name, log, *[BATCHES] * 3) as (jobs, learners):
        agents = {number: f"127.0.0.1:{port}" for number, port in enumerate(ports(3))}
        how = {"every": EVERY, "divides": 1}
        # The learners of machine 1 stand still in each exchange.
        group = [
            Agent(job, number, agents, **how, overlap=number != 1)
            for number, job in enumerate(jobs)
        ]
        for one in group:
            one.go_on(2)
        for job in jobs[1:]:
            _spoil(job)  # what it had answered since the last round is divided again
        for one in group[1:]:
            one.hears("hold a NaN or an infinity")
            one.go_on(1)
        dead = group[victim]
        assert dead.end(signal.SIGKILL) == -signal.SIGKILL
        others = [one for one in group if one is not dead]
        again = Agent(
            *(jobs[victim], victim, {n: one for n, one in agents.items() if n != victim}),
            **how,
            joins=True,
        )
        for one in others:
            one.go_on(2)
        assert status(jobs[victim])["work"]["epochs_done"] < EPOCHS
        for one in learners:
            assert one.receive() == "done"
        for job in jobs:
            eventually(lambda job=job: status(job)["work"]["state"] == "done")
            check(job, log)
        assert {one.end(signal.SIGTERM) for one in (*others, again)} == {0}
        alike(*group)
        alike(*others, again)


def test_a_machine_with_other_data_ends_with_an_error(job_name: str, tmp_path: Path) -> None:
    """Another life would end as well: its exit code says so. The group goes on without it."""
    log = tmp_path / "pushed"
    with machines(job_name, log, BATCHES, BATCHES + 1) as (jobs, _):
        agents = {number: f"127.0.0.1:{port}" for number, port in enumerate(ports(2))}
        one, other = (
            Agent(job, number, agents, every=EVERY, divides=1) for number, job in enumerate(jobs)
        )
        assert other.process.stderr
        assert other.process.stderr.read() == (
            f"gadei-ps: the group divides {BATCHES} batches, {EPOCHS} epochs, seed 0, but the job "
            f"of this machine has {BATCHES + 1} batches, {EPOCHS} epochs, seed 0: give all "
            "machines the same data, batch size, epochs and seed\n"
        )
        assert other.end(signal.SIGTERM) == 2
        one.go_on(3)
        assert one.end(signal.SIGTERM) == 0
