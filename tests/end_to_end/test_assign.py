"""Writes to the weights that are not gradients: exactly once, in their order, also after deaths."""

from __future__ import annotations

import os
import random
import signal
from multiprocessing.connection import Connection

import numpy as np
import pytest
from support import PATIENCE_S, Child, Stopped, daemon, eventually, fork, live_weights, spin, status
from support import kernel_reference as reference

from gadei_ps.errors import ModelMismatch, PushTimeout, UsageError
from gadei_ps.job.faults import Processes
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec, slots
from gadei_ps.learners.client import Client, Rows
from gadei_ps.memory.layout import NO_BATCH
from gadei_ps.run_times.run_time_recorder import Recorder

VALUES = 70_000
MODELS = ("asp", "ssp:s=1", "bsp", "cutoff:by=order", "elastic-bsp:R=3", "wsp:D=0,s_local=0")


@pytest.mark.parametrize("kind", [kind.name.lower() for kind in Kind])
def test_assigned_values_are_the_weights(kind: str, job_name: str) -> None:
    """The slots stay, unless they are reset; gradients continue from there."""
    spec = OptimizerSpec(Kind[kind.upper()], lr=0.1, momentum=0.9)
    tensors = {"a": np.ones((50, 3), np.float32), "b": np.ones(700, np.float32)}
    buffers = {"mean": np.zeros(40, np.float32)}
    draw = np.random.default_rng(1)
    gradients = {name: draw.standard_normal(one.shape) for name, one in tensors.items()}
    expected = {name: one.copy() for name, one in tensors.items()}
    state = {name: [np.zeros_like(one)] * slots(spec.kind) for name, one in tensors.items()}
    state = {name: [one.copy() for one in some] for name, some in state.items()}

    def push(number: int) -> None:
        client.wait_applied(client.push(gradients))
        for name, one in expected.items():
            g = gradients[name].astype(np.float32)
            reference.step(spec, one, state[name], g, number, 0.1)
            np.testing.assert_allclose(client.weights[name], one, rtol=2e-5, atol=2e-6)

    optimizer = {"kind": kind, "lr": 0.1, "momentum": 0.9}
    with (
        daemon(job_name, optimizer=optimizer, shards=2) as job,
        Client(job_name, tensors=tensors, buffers=buffers) as client,
    ):
        push(1)
        push(2)
        expected["b"][:] = 5
        client.assign({"b": expected["b"], "mean": np.arange(40)})
        np.testing.assert_array_equal(client.weights["b"], 5)
        np.testing.assert_array_equal(client.weights["mean"], np.arange(40))
        push(3)
        expected["a"][:] = draw.standard_normal((50, 3))
        for one in state["a"]:
            one[:] = 0
        client.assign({"a": expected["a"]}, reset=True)
        np.testing.assert_array_equal(client.weights["a"], expected["a"])
        push(4)
        report = status(job_name)
        assert (report["version"], report["gradients_applied"]) == (6, 4)
        job.check()


def test_own_assignments_make_no_gradient_stale(job_name: str) -> None:
    """Momentum would be compensated for what the gradient has not missed."""
    tensors, buffers = {"a": np.ones(VALUES, np.float32)}, {"mean": np.zeros(40, np.float32)}
    with (
        daemon(job_name, optimizer={"kind": "momentum", "lr": 0.1}, shards=2) as job,
        Client(job_name, tensors=tensors, buffers=buffers) as client,
    ):
        for number in range(60):
            if number % 3:
                client.assign({"mean": np.full(40, number)}, wait=False)
            if number % 2:
                client.mark_current()
            client.wait_applied(client.push({"a": np.ones(VALUES)}))
        (learner,) = status(job_name)["learners"]
        assert (learner["applied"], learner["staleness_max"]) == (60, 0)
        job.check()


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_added_values_are_no_gradients(kind: str, job_name: str) -> None:
    """No rate and no momentum; of buffers, too."""
    tensors = {"a": np.ones((50, 3), np.float32), "b": np.ones(700, np.float32)}
    buffers = {"mean": np.ones(40, np.float32)}
    optimizer = {"kind": kind, "lr": 0.5}
    draw = np.random.default_rng(1).standard_normal(700).astype(np.float32)
    with (
        daemon(job_name, optimizer=optimizer, shards=2) as job,
        Client(job_name, tensors=tensors, buffers=buffers) as client,
    ):
        client.wait_applied(client.push({"b": np.ones(700)}))
        before = client.pull()
        expected = client.model.views(before)
        client.add({"b": draw, "mean": np.full(40, -3)})
        np.testing.assert_array_equal(client.weights["a"], expected["a"])
        np.testing.assert_array_equal(client.weights["b"], expected["b"] + draw)
        np.testing.assert_array_equal(client.weights["mean"], -2)
        with pytest.raises(ModelMismatch):
            client.add({"b": np.ones(3)})
        with pytest.raises(UsageError):
            client.add({"b": np.full(700, np.nan)})
        job.check()


class _Gradient:
    """Tensor of torch that requires a gradient."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise RuntimeError("use detach")


def test_what_cannot_be_assigned(job_name: str) -> None:
    tensors = {"w": np.zeros((3, 2), np.float32)}
    with daemon(job_name) as job, Client(job_name, tensors=tensors) as client:
        client.assign({})
        for values, error, says in (
            ({"x": np.zeros(2)}, ModelMismatch, "the job's model has no tensor 'x'"),
            ({"w": np.zeros(6)}, ModelMismatch, r"'w' was given values of shape \[6\], the tensor"),
            ({"w": "abc"}, ModelMismatch, "'w': give numbers to assign"),
            ({"w": [["1", "2"]] * 3}, ModelMismatch, "'w': give numbers to assign, not <U1"),
            ({"w": np.ones((3, 2)) * 1j}, ModelMismatch, "give numbers to assign, not complex128"),
            ({"w": _Gradient()}, ModelMismatch, "'w': give numbers to assign: use detach"),
            ({"w": np.full((3, 2), 1e300)}, UsageError, "'w' holds a number beyond float32"),
            ({"w": Rows(np.zeros(1, int), np.zeros((1, 2)))}, ModelMismatch, "'w'"),
            ({"w": np.full((3, 2), np.nan)}, UsageError, "'w' holds a NaN or an infinity"),
            (np.zeros(6), ModelMismatch, "assign takes arrays by name, not a ndarray"),
        ):
            with pytest.raises(error, match=says) as caught:
                client.assign(values)  # type: ignore[arg-type]
            assert "\n" not in str(caught.value)
        with pytest.raises(UsageError, match="the state has 1 slots, the job's optimizer 0"):
            client.load_optimizer_state([{"w": np.zeros((3, 2))}])
        assert client.published == 0
        assert not client.flat.any()
        job.check()


def test_one_time_limit(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the limit between slot and server; the error names what was not made."""
    with (
        daemon(job_name) as job,
        Client(job_name, tensors={"w": np.zeros(3, np.float32)}) as client,
    ):
        server = eventually(lambda: Processes(job_name).server(ready=True))
        with (
            Stopped(server.pid),
            pytest.raises(PushTimeout, match=r"^the assignment was not applied within 0 s$"),
        ):
            client.assign({"w": np.ones(3)}, timeout_s=0)
        client.wait_applied()
        np.testing.assert_array_equal(client.weights["w"], 1)
        wait, left = client.wait_applied, []
        monkeypatch.setattr(
            client, "wait_applied", lambda number, rest: [left.append(rest), wait(number, rest)]
        )
        client.assign({"w": np.zeros(3)}, timeout_s=PATIENCE_S)
        assert 0 < left[0] < PATIENCE_S, "the claim has taken some"
        job.check()


def test_a_job_that_allows_it_takes_a_nan(job_name: str) -> None:
    tensors = {"w": np.zeros(3, np.float32)}
    with daemon(job_name, nonfinite="allow"), Client(job_name, tensors=tensors) as client:
        client.assign({"w": np.array([1, np.nan, np.inf])})
        np.testing.assert_array_equal(client.weights["w"], [1, np.nan, np.inf])


def _learn(pipe: Connection, job: str, steps: int, assigns: bool) -> None:
    """Push ones; one of the learners assigns 1000 after each third of its steps."""
    with Client(job) as client:
        pipe.send(None)
        pipe.recv()
        for step in range(steps):
            client.wait_turn()
            client.push({"w": np.ones(VALUES)})
            if assigns and step % 3 == 2:
                client.assign({"w": np.full(VALUES, 1000.0)})
        client.wait_applied()
    pipe.send(None)


@pytest.mark.parametrize("sync", MODELS)
def test_one_of_several_assigns(sync: str, job_name: str) -> None:
    """No learner is stuck, each gradient counts once, and no value lies between two writes."""
    tensors = [{"name": "w", "shape": [VALUES]}]
    with daemon(job_name, tensors=tensors, shards=2, sync=sync) as job:
        weights = live_weights(job_name)
        children = [Child(_learn, job_name, 30, number == 0) for number in range(3)]
        for child in children:
            child.receive()
        for child in children:
            child.send()
        for child in children:
            child.receive()
            child.join()
        eventually(lambda: not status(job_name)["learners"])
        report = status(job_name)
        done = report["gradients_applied"] + report["gradients_dropped"]
        assert done == 3 * 30
        assert report["gradients_refused"] == 0
        assert weights[:VALUES].min() >= 1000 - 60 - 1, "since the last assignment"
        assert weights[:VALUES].max() <= 1000
        job.check()


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_all_assign_the_same(sync: str, job_name: str) -> None:
    """Assign as a script does that runs in each learner; under BSP all see the same weights."""
    tensors = [{"name": "w", "shape": [10]}]

    def run(pipe: Connection, job: str) -> None:
        with Client(job) as client:
            pipe.send(None)
            pipe.recv()
            for step in range(20):
                client.wait_turn()
                client.push({"w": np.ones(10)})
                client.wait_turn()
                if sync == "bsp":
                    values = np.maximum(client.weights["w"], -3.0)  # clamp
                    client.assign({"w": values})
                    if (client.weights["w"] != values).any():
                        pipe.send(f"{step}: {client.weights['w']}")
                else:
                    client.assign({"w": np.full(10, 7.0)})
        pipe.send("done")

    with daemon(job_name, tensors=tensors, sync=sync) as job, fork(2, run, job_name) as children:
        for child in children:
            child.receive()
        for child in children:
            child.send()
        assert [child.receive() for child in children] == ["done", "done"]
        job.check()


def _write(pipe: Connection, job: str) -> None:
    """Write until a message ends it; answer with the number of rounds."""
    client = Client(job)
    pipe.send(None)
    number = 0
    while not pipe.poll():
        number += 1
        value = float(10 * number)
        client.push({"w": np.ones(VALUES)})  # before: as if it had never been
        client.assign({"w": np.full(VALUES, value)})
        if (client.weights["w"] != value).any():
            pipe.send(f"round {number}")
        client.add({"w": np.full(VALUES, 3.0)})
        if (client.weights["w"] != value + 3).any():
            pipe.send(f"addition {number}")
        client.wait_applied(client.push({"w": np.ones(VALUES)}))
        if (client.weights["w"] != value + 2).any():
            pipe.send(f"after round {number}")
    pipe.send(number)
    client.detach()


@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize("shards", [1, 2])
def test_servers_are_killed(shards: int, sync: str, job_name: str) -> None:
    chance = random.Random(shards)
    tensors = [{"name": "w", "shape": [VALUES]}]
    with daemon(job_name, tensors=tensors, shards=shards, sync=sync, standby=True) as job:
        child = Child(_write, job_name)
        child.receive()
        for _ in range(6):
            server = status(job_name)["server_pid"]
            spin(chance, 0.01)
            os.kill(server, signal.SIGKILL)
            eventually(lambda server=server: _others(job_name, server))
            assert not child.has_sent
        child.send()
        rounds = child.receive()
        child.join()
        eventually(lambda: not status(job_name)["learners"])
        report = status(job_name)
        assert (report["version"], report["gradients_applied"]) == (4 * rounds, 2 * rounds)
        job.check()


def _others(job: str, server: int) -> bool:
    """Return whether another server serves, and a second one is on standby."""
    processes = Processes(job)
    one, other = processes.server(ready=True), processes.standby()
    return one is not None and one.pid != server and other is not None


def _dies(pipe: Connection, job: str) -> None:
    client = Client(job)
    pipe.send(client.row)
    number = 0
    while True:
        number += 1
        client.assign({"w": np.full(VALUES, float(number))})


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_the_learner_is_killed(sync: str, job_name: str) -> None:
    """Check that published assignments are completed, and unpublished ones have no effect."""
    chance = random.Random(3)
    tensors = [{"name": "w", "shape": [VALUES]}]
    with daemon(job_name, tensors=tensors, shards=2, sync=sync) as job:
        weights = live_weights(job_name)
        for _ in range(5):
            child = Child(_dies, job_name)
            child.receive()
            eventually(lambda: weights[0] > 3)
            spin(chance, 0.002)
            child.kill()
            eventually(lambda: not status(job_name)["learners"])
            assert (weights[:VALUES] == weights[0]).all()
            with Client(job_name) as other:
                other.assign({"w": np.zeros(VALUES)})
        job.check()


def test_a_trace_leaves_assignments_out(job_name: str) -> None:
    with daemon(job_name) as job, Client(job_name, tensors={"w": np.zeros(4)}) as client:
        recorder = Recorder(job_name, None)
        recorder.read()
        for assigns in (False, True, True, False, False):
            if assigns:
                client.assign({"w": np.ones(4)})
            else:
                client.push({"w": np.ones(4)})
        client.wait_applied()
        assert eventually(lambda: len(recorder.read()) + recorder.rows >= 3)
        recorder.read()
        assert (recorder.rows, recorder.missed) == (3, 0)
        job.check()


def test_batches_are_left_alone(job_name: str) -> None:
    """An assignment answers no batch, and is not an iteration of the learner's."""
    with daemon(job_name) as job, Client(job_name, tensors={"w": np.zeros(4)}) as client:
        answered = []
        for batch in client.batches(samples=20, batch_size=5, epochs=2):
            client.assign({"w": np.ones(4)})
            assert int(client.last_frame["batch"][0]) == NO_BATCH
            client.push({"w": np.ones(4)})
            answered.append(batch.index)
        client.assign({"w": np.full(4, 3.0)})
        np.testing.assert_array_equal(client.weights["w"], 3)
        assert sorted(answered) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert status(job_name)["gradients_applied"] == 8
        job.check()


def test_an_assignment_tells_no_loss(job_name: str) -> None:
    with daemon(job_name, optimizer={}), Client(job_name, tensors={"w": np.zeros(4)}) as client:
        client.assign({"w": np.ones(4)})
        assert status(job_name)["learners"][0]["loss"] is None
