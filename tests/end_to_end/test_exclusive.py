"""All learners pause while one copies the weights and assigns others: no gradient is lost.

Learners push ones at a rate of 1. The one that pauses them assigns what it has copied,
less LEAP. So the weights show how many gradients and assignments there were.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from support import (
    PATIENCE_S,
    Child,
    Stopped,
    daemon,
    eventually,
    fork,
    gone,
    learner,
    live_weights,
    ring_of,
    status,
)
from support.steered import (
    MODELS,
    TENSORS,
    VALUES,
    all_granted,
    push_until_told,
    push_when_told,
    tell,
)
from support.supervised import TIMEOUT_S, Watched, goes_on

from gadei_ps.commands import change
from gadei_ps.errors import GadeiError
from gadei_ps.job.control import StopJob, ask
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout

LEAP = 1000.0


def _ask(pipe: Connection, job: str) -> None:
    """Pause the others on each request; send the version then, and the copy.

    Within, it shows life until the next order: "leap" assigns, "push" pushes, and "go" ends it.
    """
    with Client(job, name="asks") as client:
        pipe.send("attached")
        while (timeout_s := pipe.recv()) is not None:
            try:
                with client.exclusive(timeout_s):
                    copy = client.pull()[:VALUES]
                    pipe.send((client.current_version, copy))
                    while (what := _order(pipe, client)) != "go":
                        if what == "leap":
                            client.assign({"w": copy - LEAP})
                            pipe.send((client.current_version, client.pull()[:VALUES]))
                        elif what == "push":
                            client.push({"w": copy})
                pipe.send("ended")
            except GadeiError as error:
                pipe.send(f"{type(error).__name__}: {error}")


def _order(pipe: Connection, client: Client) -> Any:
    while not pipe.poll(0.2):
        client.heartbeat()
    return pipe.recv()


def _stand(asks: Child) -> tuple[int, np.ndarray]:
    """Pause the others; return the version and the weights."""
    asks.send(PATIENCE_S)
    version, copy = asks.receive()
    assert np.ptp(copy) == 0  # all shards have applied the same
    return version, copy


def _leaps(asks: Child) -> None:
    """Pause the others, which continue elsewhere."""
    version, copy = _stand(asks)
    after, there = tell(asks, "leap")
    assert after == version + 1
    np.testing.assert_array_equal(there, copy - np.float32(LEAP))
    assert tell(asks, "go") == "ended"


def _settled(job: str, team: list[Child], leaps: int, pushed: int = 0) -> None:
    """All that was pushed is in the weights once, and so is each leap. pushed: by the dead."""
    pushed += sum(tell(child, "stop") for child in team)
    eventually(lambda: not [one for one in status(job)["learners"] if one["name"] != "asks"])
    end = status(job)
    assert (end["gradients_applied"], end["version"]) == (pushed, pushed + leaps)
    assert end["gradients_dropped"] == end["gradients_refused"] == 0
    steps = end["supersteps"] - leaps if end["sync"] == "bsp" else pushed
    np.testing.assert_array_equal(live_weights(job)[:VALUES], -steps - LEAP * leaps)


def test_all_stand_still_under_each_model(job_name: str) -> None:
    with (
        daemon(job_name, sync=MODELS[0], tensors=TENSORS, shards=2) as job,
        fork(3, push_until_told, job_name) as team,
        fork(1, _ask, job_name) as (asks,),
    ):
        all_granted(team)
        assert asks.receive() == "attached"
        pids = [child.pid for child in team]
        for number, model in enumerate(MODELS):
            assert change.set_sync(job_name, model, PATIENCE_S)["sync"] == model
            goes_on(job_name)
            version, copy = _stand(asks)
            assert [one["others_stand_still"] for one in status(job_name)["learners"]].count(True)
            for _ in range(20):
                now = status(job_name)
                ahead = [one["queue"] for one in now["learners"] if one["pid"] in pids]
                assert now["version"] == version and max(ahead) <= 1, now  # begun before
            np.testing.assert_array_equal(live_weights(job_name)[:VALUES], copy)
            after, there = tell(asks, "leap")
            assert after == version + 1 == status(job_name)["version"]
            np.testing.assert_array_equal(there, copy - np.float32(LEAP))
            assert tell(asks, "go") == "ended"
            goes_on(job_name)
            _leaps(asks)
            _leaps(asks)
            goes_on(job_name)
            job.check()
            assert np.ptp(live_weights(job_name)[:VALUES]) < LEAP, number
        pushed = sum(tell(child, "stop") for child in team)
        eventually(lambda: len(status(job_name)["learners"]) == 1)
        end = status(job_name)
        assert end["gradients_applied"] + end["gradients_dropped"] == pushed
        assert end["gradients_refused"] == 0
        asks.send(PATIENCE_S)
        asks.receive()
        assert tell(asks, "push").startswith("UsageError: exclusive: the other learners are paused")


def _kill(job: str, *which: str) -> None:
    """SIGKILL; where the active server dies, there is another one."""

    def ready() -> dict[str, Any] | None:
        now = status(job)
        pids = now["server_pid"], now["standby_pid"]
        return now if all(pids) and not any(map(gone, pids)) and len(set(pids)) == 2 else None

    before: dict[str, Any] = eventually(ready, what=lambda: status(job))
    for name in which:
        os.kill(before[name], signal.SIGKILL)
        eventually(lambda name=name: gone(before[name]))


@pytest.mark.parametrize("model", ["asp", "ssp:s=2", "bsp"])
def test_no_death_loses_a_gradient(model: str, job_name: str) -> None:
    """Kill the server, the watchdog, both, the requester or another learner in each phase."""
    dying = (("server_pid",), ("watchdog_pid",), ("watchdog_pid", "server_pid"))
    with (
        daemon(job_name, sync=model, tensors=TENSORS, shards=2, standby=True) as job,
        fork(2, push_until_told, job_name) as team,
        fork(2, _ask, job_name) as (asks, other),
    ):
        all_granted(team)
        assert asks.receive() == other.receive() == "attached"
        leaps = 0
        for number, which in enumerate(dying):
            asks.send(PATIENCE_S)
            if number % 2:  # that it has asked is known
                eventually(lambda: learner(job_name, asks.pid)["others_stand_still"])
            _kill(job_name, *which)
            _, copy = asks.receive()
            job.check()
            _kill(job_name, *which)
            np.testing.assert_array_equal(live_weights(job_name)[:VALUES], copy)
            job.check()
            assert tell(asks, "leap")[1][0] == copy[0] - LEAP
            _kill(job_name, *which)
            np.testing.assert_array_equal(live_weights(job_name)[:VALUES], copy - LEAP)
            other.send(PATIENCE_S)  # it waits until the first one has ended
            assert tell(asks, "go") == "ended"
            other.receive()
            job.check()
            tell(other, "leap")
            assert tell(other, "go") == "ended"
            leaps += 2
            goes_on(job_name)
        # The one that asks: before, while the others pause, with an assignment on its way.
        for phase in range(3):
            with fork(1, _ask, job_name) as (dies,):
                assert dies.receive() == "attached"
                dies.send(PATIENCE_S)
                if phase:
                    dies.receive()
                if phase == 2:
                    with Stopped(status(job_name)["server_pid"]):
                        dies.send("leap")
                        eventually(lambda: learner(job_name, dies.pid)["queue"])
                        dies.kill()
                    leaps += 1
                dies.kill()
            goes_on(job_name)
        with fork(1, push_until_told, job_name) as (late,):
            assert late.receive() == "granted"
            asks.send(PATIENCE_S)
            asks.receive()
            row = learner(job_name, late.pid)
            assert row
            ring = ring_of(job_name, row["row"])
            late.kill()
            pushed = int(ring.view(layout.RING)["head"])
            tell(asks, "leap")
            assert tell(asks, "go") == "ended"
            leaps += 1
            eventually(lambda: not learner(job_name, late.pid))
        job.check()
        _settled(job_name, team, leaps, pushed)


def test_who_waits_gives_up(job_name: str) -> None:
    with (
        daemon(job_name, sync="asp", tensors=TENSORS),
        fork(1, push_until_told, job_name) as team,
        fork(1, push_when_told, job_name) as (late,),
        fork(1, _ask, job_name) as (asks,),
    ):
        all_granted([*team, late])  # so it has an iteration in flight
        assert asks.receive() == "attached"
        why = "PushTimeout: the other learners did not pause within 0.2 s"
        assert tell(asks, 0.2) == why
        assert tell(late, 1) == "granted"  # all continue
        goes_on(job_name, 5)
        late.send(None)
        _settled(job_name, team, 0, pushed=1)


def test_who_hangs_is_killed(job_name: str) -> None:
    with (
        Watched(job_name, sync="ssp:s=9", learner_timeout_s=TIMEOUT_S) as watched,
        fork(1, push_until_told, job_name) as team,
        fork(1, push_when_told, job_name) as (hangs,),
        fork(1, _ask, job_name) as (asks,),
    ):
        all_granted([*team, hangs])  # so it has an iteration in flight
        assert asks.receive() == "attached"
        hangs.signal(signal.SIGSTOP)
        asks.send(PATIENCE_S)
        asks.receive()
        assert gone(hangs.pid)
        watched.look(2 * TIMEOUT_S)
        tell(asks, "leap")
        # Now all wait for the one that asks, and hangs.
        asks.signal(signal.SIGSTOP)
        eventually(lambda: gone(asks.pid))
        goes_on(job_name)
        assert status(job_name)["learner_deaths"] == 2
        _settled(job_name, team, 1)


def test_a_stop_waits_for_a_stand(job_name: str) -> None:
    with (
        daemon(job_name, sync="ssp:s=1", tensors=TENSORS),
        fork(2, push_until_told, job_name) as team,
        fork(1, _ask, job_name) as (asks,),
        ThreadPoolExecutor() as pool,
    ):
        all_granted(team)
        assert asks.receive() == "attached"
        version, copy = _stand(asks)
        stopping = pool.submit(ask, job_name, StopJob(drain=True), PATIENCE_S)
        eventually(lambda: status(job_name)["phase"] == "draining")
        assert tell(asks, "leap")[0] == version + 1
        np.testing.assert_array_equal(live_weights(job_name)[:VALUES], copy - LEAP)
        assert tell(asks, "go") == "ended"
        assert tell(asks, PATIENCE_S).startswith("JobStopped: ")  # no other one begins
        asks.send(None)
        pushed = sum(child.receive() for child in team)  # the stop has ended them
        assert stopping.result()["version"] == pushed + 1


def test_the_former_name_warns(job_name: str) -> None:
    with (
        daemon(job_name, tensors=TENSORS),
        Client(job_name) as client,
        pytest.warns(DeprecationWarning, match=r"use abandon\(\)"),
    ):
        client.give_up()
