"""Processes that hang: they are replaced, and no other process waits for them.

Learners here do one call at a time, on request; what they have pushed is counted in weights.
"""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from support import (
    PATIENCE_S,
    Stopped,
    daemon,
    eventually,
    fork,
    gone,
    live_weights,
    status,
)
from support.processes import stop
from support.supervised import (
    TENSORS,
    TIMEOUT_S,
    VALUES,
    Watched,
    call,
    goes_on,
    gradient_of,
    one_at,
    pushing,
    settled,
    standby,
    team,
    tell,
)

from gadei_ps.commands import jobs
from gadei_ps.commands.daemon import kept_version
from gadei_ps.errors import NotSaved
from gadei_ps.job import control
from gadei_ps.job.control import StopJob
from gadei_ps.learners.client import Client


def test_a_hung_standby_is_replaced(job_name: str) -> None:
    with Watched(job_name, standby=True, hang_s=TIMEOUT_S):
        hung = standby(job_name)
        active = status(job_name)["server_pid"]
        with pushing(job_name):
            os.kill(hung, signal.SIGSTOP)
            eventually(lambda: status(job_name)["standby_pid"] not in (0, hung))
            assert gone(hung)
            assert status(job_name)["server_pid"] == active
            goes_on(job_name)


def test_a_server_that_cannot_be_killed(
    job_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeze it as a control group does: signals take effect only once it is thawed."""
    frozen = tmp_path / "frozen"
    send = signal.pidfd_send_signal

    def sends(pidfd: int, number: int) -> None:
        if (
            not frozen.exists()
            or f"Pid:\t{frozen.read_text()}\n" not in Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        ):
            send(pidfd, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", sends)
    checkpoint = {"directory": str(tmp_path / "checkpoints"), "every_s": 0}
    job = daemon(job_name, tensors=TENSORS, hang_s=TIMEOUT_S, checkpoint=checkpoint)
    with job, Client(job_name) as client:
        client.push({"w": np.ones(VALUES)})
        client.wait_applied()
        server = status(job_name)["server_pid"]
        frozen.write_text(str(server))
        try:
            stop(server)
            client.push({"w": np.ones(VALUES)})
            stuck = eventually(lambda: status(job_name)["server_stuck"])
            why = f"the active server, process {server}, hung for {TIMEOUT_S} s, and SIGKILL does"
            assert stuck.startswith(why)
            with pytest.raises(NotSaved, match="were not applied: the active server, process"):
                control.ask(job_name, StopJob(), timeout_s=PATIENCE_S)
            assert kept_version(job_name) == 1, "its memory stays"
        finally:
            os.kill(server, signal.SIGKILL)
    frozen.unlink()
    eventually(lambda: gone(server))
    jobs.drop(job_name)


SAMPLES, EPOCHS = 60, 2


def _answer(pipe: Connection, job: str, holds: bool) -> None:
    """Answer batches: each has a value of its own, which becomes 1 less."""
    with Client(job) as client:
        for batch in client.batches(samples=SAMPLES, batch_size=1, epochs=EPOCHS):
            if holds:
                pipe.send("holds")
                pipe.recv()
            client.push({"w": one_at(batch.epoch * SAMPLES + batch.index)}, samples=1)
    pipe.send("done")


def test_batches_of_the_hung_go_to_others(job_name: str) -> None:
    with (
        daemon(job_name, tensors=TENSORS, learner_timeout_s=TIMEOUT_S),
        fork(1, _answer, job_name, True) as (hung,),
        Stopped(hung.pid) if hung.receive() == "holds" else contextlib.nullcontext(),
        fork(1, _answer, job_name, False) as (good,),
    ):
        assert good.receive() == "done"
        eventually(lambda: gone(hung.pid))
        assert good.join() == 0
        end = status(job_name)
        assert end["work"]["state"] == "done"
        assert (end["gradients_applied"], end["learner_deaths"]) == (SAMPLES * EPOCHS, 1)
        assert end["batches_requeued"] > 0
        answered = live_weights(job_name)[:VALUES]
        np.testing.assert_array_equal(answered[: SAMPLES * EPOCHS], -1)
        assert not answered[SAMPLES * EPOCHS :].any()


def test_barriers_do_not_wait_for_the_hung(job_name: str) -> None:
    with (
        daemon(job_name, tensors=TENSORS, learner_timeout_s=TIMEOUT_S, sync="bsp"),
        team(job_name, 1, "wait_turn") as (hung,),
        pushing(job_name) as good,
    ):
        hung.signal(signal.SIGSTOP)
        eventually(lambda: gone(hung.pid))
        goes_on(job_name)
        good.kill()
        settled(job_name)


def test_the_slow_and_the_waiting_are_left_alone(job_name: str) -> None:
    wanted = {"learner_timeout_s": TIMEOUT_S, "sync": "bsp", "slots": 1}
    with (
        Watched(job_name, stands=True, **wanted) as job,
        team(job_name, 2, "wait_turn") as (slow, quick),
    ):
        gradient = np.ones(VALUES, np.float32)
        # It takes its time, but less than the limit; the other waits for its turn.
        for _ in range(3):
            call(quick, "push", gradient_of(gradient))
            tell(quick, "wait_turn")
            job.look(0.4 * TIMEOUT_S)  # it computes
            call(slow, "push", gradient_of(gradient))
            call(slow, "wait_turn")
            quick.receive()
        # Both have pushed, and wait far longer than the limit, but only for the server.
        with Stopped(status(job_name)["server_pid"]):
            for child in (slow, quick):
                call(child, "push", gradient_of(gradient))
                tell(child, "wait_turn")
            job.look(1.5 * TIMEOUT_S)
        for child in (slow, quick):
            child.receive()
            assert call(child, "wait_applied") is None
        end = status(job_name)
        assert (end["learner_deaths"], end["supersteps"], len(end["learners"])) == (0, 4, 2)


def test_who_holds_nobody_up_may_rest(job_name: str) -> None:
    """Rest under ASP while there are other batches, or nothing to do at all."""
    with (
        Watched(job_name, stands=True, learner_timeout_s=0.3) as job,
        team(job_name, 2) as (one, other),
    ):
        call(one, "set_work", 100, 1, 1)
        assert isinstance(call(one, "take_batch"), int)
        call(other, "push", gradient_of(one_at(0)))
        job.look(1.0)
        now = status(job_name)
        assert (now["learner_deaths"], len(now["learners"])) == (0, 2)


def _rest(pipe: Connection, job: str) -> None:
    """Pause, then compute without an end, each until the next order."""
    client = Client(job)
    client.wait_turn()
    with client.pause():
        pipe.send("paused")
        pipe.recv()
    pipe.send("computes")
    while not pipe.poll():
        pass
    pipe.recv()
    client.push(gradient_of(one_at(0)))
    client.wait_turn()
    pipe.send("pushed")
    pipe.recv()


@pytest.mark.parametrize("sync", ["bsp", "ssp:s=0"])
def test_who_validates_is_not_killed(sync: str, job_name: str) -> None:
    """Neither within pause() nor while it computes; under BSP others wait for it."""
    with (
        Watched(job_name, stands=True, learner_timeout_s=0.6, sync=sync) as job,
        fork(1, _rest, job_name) as (slow,),
        team(job_name, 1, "wait_turn") as (quick,),
    ):
        assert slow.receive() == "paused"
        # Either may have come first.
        eventually(
            lambda: sorted(one["paused"] for one in status(job_name)["learners"]) == [False, True]
        )
        if sync == "bsp":
            call(quick, "push", gradient_of(one_at(1)))
            tell(quick, "wait_turn")
        else:  # it would wait for another one after the first of these
            for _ in range(3):
                call(quick, "push", gradient_of(one_at(1)))
                call(quick, "wait_turn")
        job.look(1.2)
        slow.send("continue")
        assert slow.receive() == "computes"
        if sync != "bsp":
            eventually(lambda: live_weights(job_name)[1] == -3)
            tell(quick, "push", gradient_of(one_at(1)))
        job.look(1.2)
        waits = [one for one in status(job_name)["learners"] if one["holds_up_s"]]
        assert [one["pid"] for one in waits] == [slow.pid]
        assert 0 < waits[0]["killed_in_s"] < waits[0]["holds_up_s"] + 4
        slow.send("continue")
        assert slow.receive() == "pushed"
        quick.receive()
        assert status(job_name)["learner_deaths"] == 0
