"""A learner, the watchdog, or both die while the optimizer's state is loaded, between its slots."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from support import PATIENCE_S, daemon, eventually, fork, gone, status

from gadei_ps.errors import PushTimeout
from gadei_ps.learners.client import Client

TENSORS = [{"name": "w", "shape": [1000]}]
ADAM = {"kind": "adam", "lr": 0.1}


STATE = [{"w": np.full(1000, 1.0)}, {"w": np.full(1000, 2.0)}]


def _load(pipe: Connection, job: str, trains: bool, stops: bool) -> None:
    """trains: before it loads. stops: between the two slots, until a message."""
    client = Client(job)
    if trains:
        client.wait_applied(client.push({"w": np.ones(1000, np.float32)}))
    made, assign = 0, client._assign

    def stop(*arguments: Any, **more: Any) -> None:
        nonlocal made
        made += 1
        if stops and made == 2:
            pipe.send("half")
            pipe.recv()
        assign(*arguments, **more)

    client._assign = stop  # type: ignore[method-assign]
    pipe.send("begins")
    pipe.recv()
    pipe.send(client.load_optimizer_state(STATE, 7))
    pipe.recv()


def _is_whole(job: str, steps: int = 7) -> bool:
    with Client(job) as client:
        found = client.job_state()
        whole = (found.slots[0][:1000] == 1).all() and (found.slots[1][:1000] == 2).all()
        return bool(whole) and found.steps == steps


@pytest.mark.parametrize("trains", [False, True], ids=["at the start", "later"])
def test_the_next_learner_finishes_it(
    trains: bool, job_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that loads as it did: when it begins, or after a step of its own."""
    with daemon(job_name, optimizer=ADAM, tensors=TENSORS) as job:
        with fork(1, _load, job_name, trains, True) as (one,):
            assert one.receive() == "begins"
            one.send()
            assert one.receive() == "half"
            one.kill()
        eventually(lambda: status(job_name)["learner_deaths"] == 1)
        with Client(job_name) as client:
            found = client.job_state()
            assert (found.slots[1][:1000] == 2).all(), "squares come first"
            assert not (found.slots[0] == 1).any()
            assert found.steps == int(trains), "and the steps at the end"
        with fork(1, _load, job_name, trains, False) as (other,):
            assert other.receive() == "begins"
            other.send()
            assert other.receive() is True
        assert _is_whole(job_name)
        job.check()
    assert "a learner has died while it loaded the optimizer's state" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["state", "weights"])
def test_the_writer_is_interrupted(
    what: str, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one that loads writes it, while the writer lives, and so does the writer."""

    def load(client: Client, timeout_s: float | None = None) -> bool:
        if what == "weights":
            return client.load_weights({"w": np.ones(1000)}, timeout_s=timeout_s)
        return client.load_optimizer_state(STATE, 7, timeout_s=timeout_s)

    with (
        daemon(job_name, optimizer=ADAM, tensors=TENSORS) as job,
        Client(job_name) as one,
        Client(job_name) as other,
    ):

        def interrupt(*_: Any, **__: Any) -> None:
            with pytest.raises(PushTimeout, match=r"another learner has not loaded .* within 0 s"):
                load(other, 0)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(one, "_assign", interrupt)
            with pytest.raises(KeyboardInterrupt):
                load(one)
        assert load(other, PATIENCE_S)
        assert load(one, PATIENCE_S), "it is what was loaded"
        assert one.published == 0
        if what == "state":
            assert _is_whole(job_name)
        else:
            np.testing.assert_array_equal(one.weights["w"], 1)
        job.check()


def _load_weights(_: Connection, job: str) -> None:
    client = Client(job)
    client._assign = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    client.load_weights({"w": np.ones(1000)})


def test_the_job_trains_before_the_next_one_loads(job_name: str) -> None:
    """Check that its training stays, and that the next one gets weights as well as state."""
    with daemon(job_name, optimizer=ADAM, tensors=TENSORS) as job:
        with fork(1, _load, job_name, False, True) as (one,):
            assert one.receive() == "begins"
            one.send()
            assert one.receive() == "half"
            one.kill()
        with fork(1, _load_weights, job_name) as (one,):
            eventually(lambda: status(job_name)["learner_deaths"] == 2)
        with Client(job_name) as client, Client(job_name) as late:
            client.wait_applied(client.push({"w": np.ones(1000, np.float32)}))
            before = client.job_state()
            assert not late.load_weights({"w": np.ones(1000)})
            assert not late.load_optimizer_state(STATE, 7)
            found = client.job_state()
            np.testing.assert_array_equal(found.weights, before.weights)
            np.testing.assert_array_equal(found.slots, before.slots)
            assert found.steps == 1
        job.check()


@pytest.mark.parametrize("both", [False, True], ids=["watchdog", "and the learner"])
def test_the_watchdog_dies(both: bool, job_name: str) -> None:
    """The next one knows who loads, and who waits for that."""
    with (
        daemon(job_name, optimizer=ADAM, tensors=TENSORS) as job,
        fork(1, _load, job_name, False, True) as (one,),
        fork(1, _load, job_name, False, False) as (other,),
    ):
        for learner in (one, other):
            assert learner.receive() == "begins"
        one.send()
        assert one.receive() == "half"
        other.send()
        before = status(job_name)["watchdog_pid"]
        os.kill(before, signal.SIGKILL)
        eventually(lambda: gone(before))
        job.check()
        assert status(job_name)["watchdog_pid"] != before
        assert not other.has_sent, "it waits"
        if both:
            one.kill()
        else:
            one.send()
            assert one.receive() is True
        assert other.receive() is True
        assert _is_whole(job_name)
        job.check()
