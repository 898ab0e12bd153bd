"""One suite for every device, alone and in the pipeline; a function in DEVICES adds a new one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import emulator
import numpy as np
import pytest
from clients.drivers import Job
from support import daemon, eventually, fork, learner, status

from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import (
    GadeiError,
    JobFailed,
    JobStopped,
    ModelMismatch,
    PushTimeout,
    UsageError,
)
from gadei_ps.job.control import StopJob
from gadei_ps.learners import devices
from gadei_ps.learners.client import Client, Rows
from gadei_ps.learners.devices import Device
from gadei_ps.learners.host import Host
from gadei_ps.learners.pipeline import Pipeline
from gadei_ps.machine.cuda import missing as cuda_missing

SHAPES = {"a": (3, 5), "b": (1000,), "s": (), "table": (40, 6), "column": (50, 1)}


@dataclass(frozen=True)
class Case:
    """A device, and functions that make and read its arrays in the order of its computation.

    name: as Device.name. keeps_threads: whether it has threads that live as long as it does.
    """

    name: str
    make: Callable[[], Device]
    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]
    keeps_threads: bool = False


def host() -> Iterator[Case]:
    yield Case("host", Host, np.asarray, np.asarray)


def cuda() -> Iterator[Case]:
    if why := cuda_missing():
        pytest.skip(why)
    import cupy

    yield Case("cuda", lambda: devices.choose("cuda"), cupy.asarray, cupy.asnumpy)


def emulated() -> Iterator[Case]:
    """The code of cuda, on a device in software."""
    with emulator.installed():
        for one in cuda():
            yield replace(one, keeps_threads=True)  # a thread for each stream


DEVICES = [host, emulated, pytest.param(cuda, marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    yield from request.param()


@pytest.fixture
def job(job_name: str) -> Iterator[Daemon]:
    with daemon(job_name, shards=2) as one:
        yield one


def arrays(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def gradients(case: Case, value: float) -> dict[str, Any]:
    return {name: case.to_device(array) for name, array in arrays(value).items()}


def flat_ones(client: Client) -> np.ndarray:
    return client.model.flatten(arrays(1.0))


# -- a link alone --------------------------------------------------------------------------------


def test_weights_arrive(case: Case, job: Daemon, job_name: str) -> None:
    device = case.make()
    assert device.name == case.name
    with Client(job_name, tensors=arrays(2.5)) as client:
        link = device.link(client)
        buffer = link.buffer()
        views = link.views(buffer)
        assert {name: tuple(view.shape) for name, view in views.items()} == SHAPES
        assert not case.to_host(buffer).any()
        link.fill(buffer)
        assert link.version == 0
        for view in views.values():
            np.testing.assert_array_equal(case.to_host(view), 2.5)
        # A copy: it does not move with the job.
        client.push(flat_ones(client))
        client.wait_applied()
        np.testing.assert_array_equal(case.to_host(views["b"]), 2.5)
        link.pull(buffer)
        eventually(link.pulled)
        assert link.version == 1
        np.testing.assert_array_equal(case.to_host(views["b"]), 1.5)
        assert not link.pulled()
        link.pull(buffer)
        assert not link.pulled()  # the weights are current
        link.close()
        link.close()


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_gradients_arrive(case: Case, job: Daemon, job_name: str, wire: str) -> None:
    with Client(job_name, tensors=arrays(0.0), wire=wire) as client:
        link = case.make().link(client)

        def refused() -> int:
            (row,) = (one for one in status(job_name)["learners"] if not one["leaving"])
            return int(row["refused"])

        def push(given: dict[str, Any]) -> bool:
            """Return whether the server refuses it."""
            before = refused()
            link.push(given, client.current_version)
            link.flush()
            client.wait_applied()
            return refused() > before

        assert not push(gradients(case, 0.5))
        assert not push({"a": None, "b": case.to_device(arrays(1.5)["b"])})  # the rest is zero
        np.testing.assert_array_equal(client.weights["a"], -0.5)
        np.testing.assert_array_equal(client.weights["b"], -2.0)
        assert client.weights["s"] == -0.5
        for bad in (np.nan, np.inf, -np.inf):
            one = arrays(0.0)["b"]
            one[-1] = bad
            assert push({"b": case.to_device(one)})
        (row,) = (one for one in status(job_name)["learners"] if not one["leaving"])
        assert (row["applied"], row["refused"]) == (2, 3)
        client.detach()


@pytest.mark.parametrize("wrong", [{"x": np.zeros(1)}, {"b": np.zeros(999)}])
def test_gradients_of_another_model(
    case: Case, job: Daemon, job_name: str, wrong: dict[str, np.ndarray]
) -> None:
    with Client(job_name, tensors=arrays(0.0)) as client:
        link = case.make().link(client)
        (name,) = wrong
        with pytest.raises(ModelMismatch, match=f"'{name}'"):
            link.push({name: case.to_device(np.float32(wrong[name]))}, 0)
            link.flush()
        link.abandon()


def test_rows_arrive(case: Case, job: Daemon, job_name: str) -> None:
    """Push rows in any order, some repeated, which are added up; other rows stay as they are."""

    def rows(indices: np.ndarray, values: np.ndarray) -> Rows:
        return Rows(case.to_device(indices), case.to_device(values))

    with Client(job_name, tensors=arrays(0.0)) as client:
        link = case.make().link(client)
        indices = np.array([7, 3, 39, 3, 0], np.int64)
        values = np.arange(30, dtype=np.float32).reshape(5, 6)
        expected = np.zeros(SHAPES["table"], np.float32)
        np.subtract.at(expected, indices, values)
        for turn in (1, 2, 3):
            link.push({"table": rows(indices, values), "s": case.to_device(np.ones(()))}, 0)
            link.flush()
            client.wait_applied()
            np.testing.assert_array_equal(client.weights["table"], turn * expected)
            assert client.weights["s"] == -turn
            assert not client.weights["b"].any()
        with pytest.raises(ModelMismatch, match="'table'"):
            link.push({"table": rows(np.array([1, 40]), values[:2])}, 0)
            link.flush()
        with contextlib.suppress(ModelMismatch):
            link.flush()  # the host's thread raises its error in every later call
            for _ in range(2):
                link.push({"s": case.to_device(np.ones(()))}, 0)
            link.close()
            client.wait_applied()
            assert client.weights["s"] == -5
        np.testing.assert_array_equal(client.weights["table"], 3 * expected)


def test_buffers_and_another_shard(
    case: Case, job: Daemon, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gradient moves a buffer; a pull sees what any shard has written."""
    tensors, buffers = arrays(0.0), {"mean": np.full(7, 2, np.float32)}
    with Client(job_name, tensors=tensors, buffers=buffers) as client:
        link = case.make().link(client)
        buffer = link.buffer()
        link.fill(buffer)
        # As if the shard that counts versions were ahead of the others.
        monkeypatch.setattr(Client, "current_version", property(lambda client: 1))
        link.fill(buffer)
        assert "mean" not in link.gradients()
        if case.name != "host":  # which pushes in a thread of its own
            with pytest.raises(ModelMismatch, match="'mean' is a buffer, which no gradient"):
                link.push({"mean": case.to_device(np.full(7, 3, np.float32))}, 0)
        client.assign({"mean": np.full(7, 5)})
        np.testing.assert_array_equal(client.weights["mean"], 5)
        link.pull(buffer)
        eventually(link.pulled)
        np.testing.assert_array_equal(case.to_host(link.views(buffer)["mean"]), 5)
        link.close()


def test_arrays_of_gradients(case: Case, job: Daemon, job_name: str) -> None:
    """Compute gradients in the memory they leave from; none is overwritten on its way."""
    with Client(job_name, tensors=arrays(0.0)) as client:
        link = case.make().link(client)
        for number in range(1, 31):
            for array in link.gradients().values():
                array.fill(number)
            link.push(link.gradients(), client.current_version)
        link.close()
        client.wait_applied()
        np.testing.assert_array_equal(client.weights["b"], -30 * 31 / 2)


# -- the pipeline ---------------------------------------------------------------------------------


def test_pipeline_pushes_each_once_and_in_order(case: Case, job: Daemon, job_name: str) -> None:
    with Client(job_name, tensors=arrays(0.0)) as client:
        with Pipeline(client, case.make()) as pipeline:
            for number in range(1, 201):
                weights = pipeline.weights()
                pushed_before = case.to_host(weights["b"])
                assert pushed_before.max() <= 0
                pipeline.push(gradients(case, number), samples=1, loss=float(number))
            pipeline.flush()
            assert client.published == 200
            client.wait_applied()
            # The newest weights arrive without a further push.
            eventually(lambda: _has(pipeline, case, -200 * 201 / 2) and pipeline.version == 200)
        np.testing.assert_array_equal(client.weights["a"], -200 * 201 / 2)
        row = status(job_name)["learners"][0]
        assert (row["applied"], row["samples"], row["loss"]) == (200, 200, 200.0)


def _push_ones(pipe: Connection, job: str) -> None:
    client = Client(job)
    pipe.send("attached")
    while True:
        client.push(flat_ones(client))


def _has(pipeline: Pipeline, case: Case, values: Any) -> bool:
    """Return whether the newest weights are these: one shard may count before another writes."""
    return bool((case.to_host(pipeline.weights()["b"]) == values).all())


def _newer(pipeline: Pipeline, version: int) -> dict[str, Any] | None:
    """The weights, if they are newer than those of this version."""
    weights = pipeline.weights()
    return weights if pipeline.version > version else None


def test_weights_stay_until_the_next_call(case: Case, job: Daemon, job_name: str) -> None:
    with (
        Client(job_name, tensors=arrays(0.0)) as client,
        fork(1, _push_ones, job_name) as (other,),
        Pipeline(client, case.make()) as pipeline,
    ):
        other.receive()
        versions = set()
        for _ in range(50):
            before = pipeline.version
            weights = eventually(lambda before=before: _newer(pipeline, before))
            first = case.to_host(weights["b"]).copy()
            there = client.current_version
            eventually(lambda there=there: client.current_version > there + 5)
            np.testing.assert_array_equal(case.to_host(weights["b"]), first)
            versions.add(pipeline.version)
        assert len(versions) == 50


def test_gradients_carry_the_version_they_were_computed_from(
    case: Case, job: Daemon, job_name: str
) -> None:
    with Client(job_name, tensors=arrays(0.0)) as client, Pipeline(client, case.make()) as pipeline:
        for _ in range(20):
            pipeline.weights()
            pipeline.push(gradients(case, 1.0))
            pipeline.flush()
            client.wait_applied()
            eventually(lambda: pipeline.weights() and pipeline.version == client.current_version)
        assert status(job_name)["learners"][0]["staleness_max"] == 0


def test_own_writes_of_buffers_between_pull_and_push_are_seen(
    case: Case, job: Daemon, job_name: str
) -> None:
    """Momentum would be compensated for what the gradient has not missed."""
    buffers = {"mean": np.zeros(40, np.float32)}
    with (
        Client(job_name, tensors=arrays(0.0), buffers=buffers) as client,
        Pipeline(client, case.make()) as pipeline,
    ):
        for number in range(20):
            # A write that was being applied during the pull counts twice.
            eventually(lambda: pipeline.weights() and pipeline.version >= client.current_version)
            for value in range(number % 4):
                client.assign({"mean": np.full(40, value)}, wait=False)
                if value % 2:
                    client.wait_applied()
            pipeline.push(gradients(case, 1.0))
            pipeline.flush()
            client.wait_applied()
        (row,) = status(job_name)["learners"]
        assert (row["applied"], row["staleness_max"]) == (20, 0)


def test_newer_weights_arrive_after_a_version_that_counted_too_much(
    case: Case, job: Daemon, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base version counts a write of buffers twice while it is being applied."""
    with Client(job_name, tensors=arrays(0.0)) as client, Pipeline(client, case.make()) as pipeline:
        eventually(lambda: pipeline.weights() and pipeline.version == 0)
        with monkeypatch.context() as patch:
            patch.setattr(Client, "base_version", property(lambda self: self.current_version + 9))
            pipeline.push(gradients(case, 1.0))
            pipeline.flush()
            client.wait_applied()
            eventually(lambda: pipeline.weights() and pipeline.version == 10)
        pipeline.push(gradients(case, 1.0))
        pipeline.flush()
        client.wait_applied()
        there = client.weights["b"]
        eventually(lambda: _has(pipeline, case, there) and pipeline.version == 2)


def test_a_gradient_that_counts_after_the_pull_is_seen(
    case: Case, job: Daemon, job_name: str
) -> None:
    """A shard releases the weights first and counts the gradient then."""
    control = Job(job).control
    with Client(job_name, tensors=arrays(0.0)) as client, Pipeline(client, case.make()) as pipeline:
        pipeline.push(gradients(case, 1.0))
        pipeline.flush()
        client.wait_applied()
        eventually(lambda: pipeline.weights() and pipeline.version == 1)
        control["version"] = 2  # with no write to the weights after it
        eventually(lambda: pipeline.weights() and pipeline.version == 2)


@pytest.mark.parametrize("model", ["bsp", "cutoff:c=1"])
def test_no_pipeline_past_a_barrier(case: Case, model: str, job_name: str) -> None:
    with (
        daemon(job_name, sync=model),
        Client(job_name, tensors=arrays(0.0)) as client,
        pytest.raises(UsageError, match="ahead of the barrier"),
    ):
        Pipeline(client, case.make())


def test_a_pipeline_adds_up_a_wave(case: Case, job_name: str) -> None:
    """Two of three mini-batches begin before the grant, and the third sees what it promises."""
    with (
        daemon(job_name, sync="wsp:D=0,s_local=2"),
        Client(job_name, tensors=arrays(0.0)) as client,
        Client(job_name) as other,
    ):
        with Pipeline(client, case.make()) as pipeline:
            other.wait_turn()
            seen = []
            for number in range(1, 6):
                seen.append(case.to_host(pipeline.weights()["b"]).max())
                pipeline.push(gradients(case, number), samples=2, loss=float(number))
            assert seen == [0] * 5
            pipeline.flush()
            assert client.published == 1
            with pytest.raises(PushTimeout):
                client.wait_mini_batch(2, timeout_s=0.02)
            other.push(np.full(client.model.elements, 10, np.float32))
            assert case.to_host(pipeline.weights()["b"]).max() == -(1 + 2 + 3) - 10
            pipeline.push(gradients(case, 6.0), samples=2, loss=6.0)
            other.push(np.zeros(client.model.elements, np.float32))  # close() waits for the turn
            with pytest.raises(UsageError, match="whole arrays"):
                pipeline.weights()
                pipeline.push({"table": Rows(np.zeros(1, np.int64), np.ones((1, 6)))})
            pipeline.push(gradients(case, 7.0))
        client.wait_applied()
        for values in client.weights.values():
            np.testing.assert_array_equal(values, -10 - sum(range(8)))
        rows = {row["row"]: row for row in status(job_name)["learners"]}
        assert (rows[client.row]["applied"], rows[client.row]["samples"]) == (3, 12)


def test_a_pipeline_takes_batches_a_wave_at_a_time(case: Case, job_name: str) -> None:
    """Seven samples in waves of three mini-batches of one: the last wave is shorter."""
    with daemon(job_name, sync="wsp:D=0,s_local=2"):
        taken = []
        with Client(job_name, tensors=arrays(0.0)) as client, Pipeline(client, case.make()) as pipe:
            for batch in pipe.batches(samples=7, batch_size=1, epochs=1):
                taken += batch.indices.tolist()
                pipe.push(gradients(case, 1.0))
            assert client.published == 3
        assert sorted(taken) == list(range(7))
        assert status(job_name)["work"]["state"] == "done"


def test_errors_reach_the_main_thread(case: Case, job: Daemon, job_name: str) -> None:
    with Client(job_name, tensors=arrays(0.0)) as client:
        with pytest.raises(ModelMismatch), Pipeline(client, case.make()) as pipeline:
            pipeline.push({"x": None})
            pipeline.flush()
        with pytest.raises(ZeroDivisionError), Pipeline(client, case.make()) as pipeline:
            raise ZeroDivisionError
        with Pipeline(client, case.make()) as pipeline:
            pipeline.push(gradients(case, 1.0))
        client.wait_applied()
        assert client.current_version == 1
        row = learner(job_name, status(job_name)["learners"][0]["pid"])
        assert row
        with (
            pytest.raises((JobStopped, JobFailed)),
            Pipeline(client, case.make()) as pipeline,
        ):
            job.request(StopJob(drain=False))
            while True:
                pipeline.push(gradients(case, 1.0))


def test_detach_publishes_what_was_handed_over(case: Case, job: Daemon, job_name: str) -> None:
    client = Client(job_name, tensors=arrays(0.0))
    pipeline = Pipeline(client, case.make())
    for _ in range(10):
        pipeline.push(gradients(case, 1.0))
    client.detach()
    eventually(lambda: not status(job_name)["learners"])
    assert client.published == status(job_name)["gradients_applied"] == 10
    for values in client.weights.values():  # of all shards
        np.testing.assert_array_equal(values, -10)
    if case.name == "host":
        with pytest.raises(UsageError, match="has detached"):
            pipeline.push(gradients(case, 1.0))
    pipeline.close()


def test_an_unused_pipeline_closes(case: Case, job: Daemon, job_name: str) -> None:
    """Check that its threads end, and that the job still answers."""
    with Client(job_name, tensors=arrays(0.0)) as client:
        before = set(threading.enumerate())
        pipeline = Pipeline(client, case.make())
        pipeline.close()
        with pytest.raises(GadeiError):
            Client(job_name, tensors={"x": np.zeros(1)})
        if not case.keeps_threads:
            assert set(threading.enumerate()) <= before
