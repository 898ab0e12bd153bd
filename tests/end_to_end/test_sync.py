"""Synchronization models with real processes: which wait for which, stopped and dead ones too."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection

import numpy as np
import pytest
from support import Child, daemon, eventually, fork, learner, live_weights, ring_of, status
from support.steered import all_granted

from gadei_ps import _native
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout

VALUES = 3000
TENSORS = [{"name": "w", "shape": [VALUES]}]


def _push_when_told(pipe: Connection, job: str) -> None:
    """Push a vector of the number that it is sent, then wait for its next turn."""
    with Client(job) as client:
        client.wait_turn()
        pipe.send("granted")
        while (number := pipe.recv()) is not None:
            client.push({"w": np.full(VALUES, number, np.float32)})
            pipe.send("pushed")
            client.wait_turn()
            pipe.send("granted")


def _push_for_ever(pipe: Connection, job: str) -> None:
    client = Client(job)
    client.wait_turn()
    pipe.send("granted")
    pipe.recv()
    while True:
        client.push({"w": np.ones(VALUES, np.float32)})


def test_bsp_applies_the_mean_of_the_living(job_name: str) -> None:
    with daemon(job_name, sync="bsp", tensors=TENSORS, shards=2), ExitStack() as stack:
        weights = live_weights(job_name)
        team = stack.enter_context(fork(4, _push_when_told, job_name))
        all_granted(team)
        expected = np.float32(0)

        def push(child: Child, number: int) -> None:
            child.send(number)
            assert child.receive() == "pushed"

        def mean(*numbers: int) -> np.float32:
            return np.float32(sum(numbers)) * np.float32(1 / len(numbers))

        # Everybody pushes: the weights move by the mean.
        for number, child in enumerate(team, 1):
            np.testing.assert_array_equal(weights[:VALUES], 0)
            push(child, number * 100)
        all_granted(team)
        expected -= mean(100, 200, 300, 400)
        np.testing.assert_array_equal(weights[:VALUES], expected)

        # One dies at the barrier, where the others wait for it.
        for child in team[:3]:
            push(child, 7)
        assert status(job_name)["supersteps"] == 1
        np.testing.assert_array_equal(weights[:VALUES], expected)
        team[3].kill()
        all_granted(team[:3])
        expected -= mean(7, 7, 7)
        np.testing.assert_array_equal(weights[:VALUES], expected)

        # One dies after its push: its gradient is part of the superstep.
        push(team[2], 300)
        team[2].kill()
        push(team[0], 9)
        push(team[1], 12)
        all_granted(team[:2])
        expected -= mean(300, 9, 12)
        np.testing.assert_array_equal(weights[:VALUES], expected)

        # A joining learner takes part.
        (late,) = stack.enter_context(fork(1, _push_when_told, job_name))
        assert late.receive() == "granted"
        for child in (*team[:2], late):
            push(child, 3)
        all_granted([*team[:2], late])
        expected -= mean(3, 3, 3)
        np.testing.assert_array_equal(weights[:VALUES], expected)
        # One that leaves by itself is not waited for either.
        late.send(None)
        push(team[0], 2)
        push(team[1], 4)
        all_granted(team[:2])
        expected -= mean(2, 4)
        np.testing.assert_array_equal(weights[:VALUES], expected)
        end = status(job_name)
        assert (end["supersteps"], end["version"]) == (5, 4 + 3 + 3 + 3 + 2)


def _heads(job: str) -> dict[int, int]:
    return {row["pid"]: row["published"] for row in status(job)["learners"]}


@pytest.mark.parametrize(("model", "bound"), [("ssp:0", 1), ("ssp:3", 4), ("bsp", 1)])
def test_bounded_spread(model: str, bound: int, job_name: str) -> None:
    with (
        daemon(job_name, sync=model, tensors=TENSORS, shards=2),
        fork(3, _push_for_ever, job_name) as team,
    ):
        all_granted(team)  # all are members now, at the same clock
        rows = {one["pid"]: one["row"] for one in status(job_name)["learners"]}
        rings = [ring_of(job_name, rows[child.pid]) for child in team]
        for child in team:
            child.send()

        def heads() -> list[int]:
            return [_native.load(ring.word(layout.RING, "head")) for ring in rings]

        def watch(times: int, members: slice) -> None:
            for _ in range(times):
                # A learner that is seen ahead in the first look was ahead before the second.
                first, second = heads()[members], heads()[members]
                assert max(first) - min(second) <= bound, (first, second)
                time.sleep(0.001)

        everybody, others = slice(None), slice(1, None)
        eventually(lambda: min(heads()) > 20)
        watch(300, everybody)
        stopped = team[0]
        stopped.signal(signal.SIGSTOP)

        def caught_up() -> bool:
            first, *rest = heads()
            return all(one == first + bound for one in rest)

        eventually(caught_up, what="the others continue as far as the model lets them")
        watch(300, everybody)
        assert caught_up()
        # Continues where it was.
        there = heads()[0]
        stopped.signal(signal.SIGCONT)
        eventually(lambda: min(heads()) > there + 20)
        watch(150, everybody)
        stopped.signal(signal.SIGSTOP)
        stopped.kill()
        there = max(heads())
        eventually(lambda: learner(job_name, stopped.pid) is None)
        eventually(lambda: min(heads()[others]) > there + 20)
        watch(150, others)


def test_asp_waits_for_nobody(job_name: str) -> None:
    with (
        daemon(job_name, tensors=TENSORS),
        fork(2, _push_for_ever, job_name) as (one, other),
    ):
        all_granted([one, other])
        one.signal(signal.SIGSTOP)
        other.send()
        eventually(lambda: _heads(job_name)[other.pid] > 200)
        assert _heads(job_name)[one.pid] == 0


def _push_bad(pipe: Connection, job: str, count: int) -> None:
    with Client(job) as client:
        client.wait_turn()
        pipe.send("granted")
        pipe.recv()
        for number in range(count):
            bad = np.zeros(VALUES, np.float32)
            bad[-1] = (np.nan, np.inf, -np.inf)[number % 3]
            client.push({"w": bad})
            client.wait_applied()
        pipe.send("done")
        pipe.recv()


@pytest.mark.parametrize("model", ["ssp:1", "bsp"])
def test_nonfinite_is_refused_and_named(model: str, job_name: str) -> None:
    with (
        daemon(job_name, sync=model, tensors=TENSORS, shards=2) as job,
        fork(1, _push_bad, job_name, 6) as (bad,),
        fork(1, _push_for_ever, job_name) as (good,),
    ):
        all_granted([bad, good])
        for child in (bad, good):
            child.send()
        assert bad.receive() == "done"
        row = learner(job_name, bad.pid)
        assert row
        assert (row["refused"], row["applied"]) == (6, 0)
        assert row["refused_because"] == "holds a NaN or an infinity"
        assert status(job_name)["gradients_refused"] == 6
        bad.send()
        assert bad.join() == 0
        eventually(lambda: len(_heads(job_name)) == 1)
        there = _heads(job_name)[good.pid]
        eventually(lambda: _heads(job_name)[good.pid] > there + 20)
        good.kill()
        eventually(lambda: not _heads(job_name))
        job.check()
        end = status(job_name)
        assert end["gradients_refused"] == 6
        np.testing.assert_array_equal(live_weights(job_name)[:VALUES], -end["version"])


SAMPLES = 50
EPOCHS = 5
SPREAD = 16  # each batch of each epoch has a value of its own, several chunks apart in all


def _answer_and_die(pipe: Connection, job: str, seed: int, deaths: bool) -> None:
    """Answer batches: each adds 1 to a value of its own. Kill itself at any point of it."""
    chance = random.Random(seed)
    client = Client(job)
    pipe.send("attached")
    for batch in client.batches(samples=SAMPLES, batch_size=1, epochs=EPOCHS, seed=9):
        gradient = np.zeros(client.model.elements, np.float32)
        gradient[(batch.epoch * SAMPLES + int(batch.indices[0])) * SPREAD] = -1.0
        point = chance.randrange(24) if deaths else -1
        if point == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        payload = client.claim() + layout.PAYLOAD_AT
        if point == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        client.write_named(payload, gradient)
        if point == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        client.publish(samples=1)
        if point == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    client.detach()
    pipe.send("done")


def _seeds() -> Iterator[int]:
    yield from range(10_000)


@pytest.mark.parametrize(
    ("model", "ahead"),
    [
        ("asp", 1),
        ("asp", 4),
        ("ssp:1", 4),
        ("bsp", 1),
        ("elastic-bsp:R=4", 4),
        ("cutoff:c=2", 1),
        ("wsp:D=1", 4),
    ],
)
def test_every_sample_once_an_epoch(model: str, ahead: int, job_name: str) -> None:
    tensors = [{"name": "w", "shape": [SAMPLES * EPOCHS * SPREAD]}]
    seeds = _seeds()
    with daemon(job_name, sync=model, tensors=tensors, shards=2, slots=2, ahead=ahead) as job:
        team = [Child(_answer_and_die, job_name, next(seeds), True) for _ in range(3)]
        deaths = 0
        try:

            def replaced() -> bool:
                nonlocal deaths
                for at, child in enumerate(team):
                    if not child.alive and child.join() < 0:
                        deaths += 1
                        # A late learner finds work or none, and lives on if there were many deaths.
                        more = deaths < 20
                        team[at] = Child(_answer_and_die, job_name, next(seeds), more)
                job.check()
                # One that has died since its look above is replaced by the next call.
                return status(job_name)["work"]["state"] == "done" and not any(
                    child.alive or child.join() < 0 for child in team
                )

            eventually(replaced, what=lambda: status(job_name))
            for child in team:
                assert child.join() == 0
        finally:
            for child in team:
                child.kill()
        eventually(lambda: not status(job_name)["learners"])
        end = status(job_name)
        assert end["work"]["epochs_done"] == EPOCHS
        assert end["gradients_applied"] == SAMPLES * EPOCHS, end
        assert deaths > 5
        weights = live_weights(job_name)
        answered = weights[: SAMPLES * EPOCHS * SPREAD : SPREAD]
        if model in ("bsp", "cutoff:c=2"):
            # A superstep divides by its members. As many gradients as samples, and none is missed.
            assert (answered > 0).all()
            assert answered.max() <= 1
        else:
            np.testing.assert_array_equal(answered, 1.0)
        assert np.count_nonzero(weights) == SAMPLES * EPOCHS
