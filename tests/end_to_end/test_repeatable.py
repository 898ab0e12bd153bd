"""Runs under BSP with a known number of learners: all weights equal to the last bit."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import numpy as np
import pytest
from support import daemon, eventually, fork, live_weights, status

from gadei_ps.learners.client import Client

LEARNERS, STEPS, VALUES = 3, 5, 3000
BATCHES, EPOCHS = 20, 2


def _learn(pipe: Connection, job: str, work: bool) -> None:
    """Learner of the number that it is sent; its gradients depend on its number and the weights."""
    number = pipe.recv()
    os.environ["GADEI_PS_LEARNER"] = str(number)
    random = np.random.default_rng(number)
    first = random.standard_normal(VALUES).astype(np.float32)
    with Client(job, tensors={"w": first}) as client:
        # What it draws goes with the batches that it gets, as dropout does.
        batches = client.batches(BATCHES, 1, EPOCHS) if work else iter(range(STEPS))
        for batch in batches:
            factor = 0.1 + batch.index if work else 0.1
            noise = random.standard_normal(VALUES).astype(np.float32)
            client.push({"w": factor * client.weights["w"] + noise}, samples=1)
            if not work:
                client.wait_turn()
    pipe.send("done")


def _start(there: int) -> dict[str, int]:
    return {"learners": there, "of": LEARNERS}


def _run(job: str, order: list[int], work: bool) -> np.ndarray:
    """One run, whose learners come in this order: each once the one before has got on."""
    rate = {"kind": "adam", "lr": 0.01}
    with (
        daemon(job, sync="bsp", start_with=LEARNERS, optimizer=rate, shards=2) as served,
        fork(LEARNERS, _learn, job, work) as team,
    ):
        for there, (child, number) in enumerate(zip(team, order, strict=True), 1):
            child.send(number)
            if 0 in order[:there] and there < LEARNERS:  # else all wait for learner 0's model
                eventually(lambda there=there: status(job)["start"] == _start(there))
        for child in team:
            assert child.receive() == "done"
        eventually(lambda: not status(job)["learners"])
        report = status(job)
        assert report["start"] is None
        applied = BATCHES * EPOCHS if work else LEARNERS * STEPS
        assert report["gradients_applied"] == applied
        weights = live_weights(job).copy()
        served.end()
        return weights


@pytest.mark.parametrize("work", [False, True])
def test_each_run_gives_the_same_weights(work: bool, job_name: str) -> None:
    first, *others = [_run(job_name, order, work) for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0])]
    assert np.unique(first).size > 1
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_a_learner_that_never_comes_is_awaited_for_a_while(job_name: str) -> None:
    """One that dies before the first superstep, too; the others continue, with their batches."""
    wanted = {"sync": "bsp", "start_with": 3, "learner_timeout_s": 3.0}
    with daemon(job_name, **wanted), fork(2, _learn, job_name, True) as (one, other):
        other.send(0)
        eventually(lambda: status(job_name)["start"] == _start(1))
        other.kill()
        eventually(lambda: status(job_name)["start"] == _start(0))
        one.send(1)
        assert one.receive() == "done"
        report = status(job_name)
        assert (report["gradients_applied"], report["start"]) == (BATCHES * EPOCHS, None)
