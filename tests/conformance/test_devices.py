"""One suite for every device, alone and in the pipeline: a new one joins by a line in DEVICES."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from support import daemon, eventually, fork, learner, status

from gadei_ps import layout
from gadei_ps.control import StopJob
from gadei_ps.daemon import Daemon
from gadei_ps.errors import GadeiError, JobFailed, JobStopped, ModelMismatch, UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.device import Device
from gadei_ps.learners.host import Host
from gadei_ps.learners.pipeline import Pipeline

SHAPES = {"a": (3, 5), "b": (1000,), "s": ()}


@dataclass(frozen=True)
class Case:
    """A device, and how its arrays are made and read."""

    make: Callable[[], Device]
    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]


DEVICES = {"host": Case(Host, np.asarray, np.asarray)}


@pytest.fixture(params=sorted(DEVICES))
def case(request: pytest.FixtureRequest) -> Case:
    return DEVICES[request.param]


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


# -- the device alone -----------------------------------------------------------------------------


def test_buffer_load_and_views(case: Case, job: Daemon, job_name: str) -> None:
    device = case.make()
    assert device.name in DEVICES
    with Client(job_name, tensors=arrays(2.5)) as client:
        buffer = device.buffer(client.model.elements)
        views = device.views(client.model, buffer)
        assert {name: tuple(view.shape) for name, view in views.items()} == SHAPES
        assert not case.to_host(buffer).any()
        device.load(client.flat, buffer)
        for view in views.values():
            np.testing.assert_array_equal(case.to_host(view), 2.5)
        # A copy: it does not move with the job.
        client.push(flat_ones(client))
        client.wait_applied()
        np.testing.assert_array_equal(case.to_host(views["b"]), 2.5)
        device.load(client.flat, buffer)
        np.testing.assert_array_equal(case.to_host(views["b"]), 1.5)


def test_store(case: Case, job: Daemon, job_name: str) -> None:
    device = case.make()
    for number, wire in enumerate(["float32", "bfloat16", "float16"]):
        with Client(job_name, tensors=arrays(0.0), wire=wire) as client:

            def push(given: dict[str, Any], client: Client = client) -> bool:
                refused = int(client._control["roster"][client.row]["refused"])
                device.store(client, client.claim() + layout.PAYLOAD_AT, given)
                client.publish()
                client.wait_applied()
                return int(client._control["roster"][client.row]["refused"]) > refused

            before = -2.0 * number
            assert not push(gradients(case, 0.5))
            assert not push({"a": None, "b": case.to_device(arrays(1.5)["b"])})  # the rest is zero
            np.testing.assert_array_equal(client.weights["a"], before - 0.5)
            np.testing.assert_array_equal(client.weights["b"], before - 2.0)
            assert client.weights["s"] == before - 0.5
            for bad in (np.nan, np.inf, -np.inf):
                one = arrays(0.0)["b"]
                one[-1] = bad
                assert push({"b": case.to_device(one)})
            (row,) = (one for one in status(job_name)["learners"] if not one["leaving"])
            assert (row["applied"], row["refused"]) == (2, 3)
            with pytest.raises(ModelMismatch, match="'x'"):
                push({"x": case.to_device(np.zeros(1, np.float32))})
            with pytest.raises(ModelMismatch, match="'b'"):
                push({"b": case.to_device(np.zeros(999, np.float32))})
            rest = {"a": arrays(1.5)["a"], "s": arrays(1.5)["s"]}
            push({name: case.to_device(array) for name, array in rest.items()})


# -- the pipeline ---------------------------------------------------------------------------------


def test_pipeline_pushes_each_once_and_in_order(case: Case, job: Daemon, job_name: str) -> None:
    with Client(job_name, tensors=arrays(0.0)) as client:
        with Pipeline(client, case.make()) as pipeline:
            for number in range(1, 201):
                weights = pipeline.weights()
                pushed_before = case.to_host(weights["b"])
                # Whole sums only: no gradient is seen in part by more than one pull's raggedness.
                assert pushed_before.max() <= 0
                pipeline.push(gradients(case, number), samples=1, loss=float(number))
            pipeline.flush()
            assert client.published == 200
            client.wait_applied()
            # The newest weights arrive without a further push.
            eventually(lambda: pipeline.weights() and pipeline.version == 200)
            np.testing.assert_array_equal(
                case.to_host(pipeline.weights()["b"]), -np.float32(200 * 201 / 2)
            )
        np.testing.assert_array_equal(client.weights["a"], -200 * 201 / 2)
        row = status(job_name)["learners"][0]
        assert (row["applied"], row["samples"], row["loss"]) == (200, 200, 200.0)


def _push_ones(pipe: Connection, job: str) -> None:
    client = Client(job)
    pipe.send("attached")
    while True:
        client.push(flat_ones(client))


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
            eventually(lambda before=before: pipeline.weights() and pipeline.version > before)
            weights = pipeline._front.views
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


@pytest.mark.parametrize("model", ["ssp:1", "bsp"])
def test_no_pipeline_past_a_barrier(case: Case, model: str, job_name: str) -> None:
    with (
        daemon(job_name, sync=model),
        Client(job_name, tensors=arrays(0.0)) as client,
        pytest.raises(UsageError, match="ahead of the barrier"),
    ):
        Pipeline(client, case.make())


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


def test_an_unanswered_pipeline_ends(case: Case, job: Daemon, job_name: str) -> None:
    """Closing does not hang where the learner has no turn and the job ends."""
    with Client(job_name, tensors=arrays(0.0)) as client:
        pipeline = Pipeline(client, case.make())
        pipeline.close()
        with pytest.raises(GadeiError):
            Client(job_name, tensors={"x": np.zeros(1)})
        assert not any(thread.is_alive() for thread in pipeline._threads)
