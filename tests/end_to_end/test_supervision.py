"""Synchronization models across a failover, and segments that have lost their names."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from shell import Cli
from support import (
    PATIENCE_S,
    Stopped,
    daemon,
    eventually,
    gone,
    live_weights,
    segments,
    status,
)
from support.supervised import (
    TENSORS,
    TOML,
    VALUES,
    call,
    goes_on,
    gradient_of,
    one_at,
    pushing,
    standby,
    team,
)

from gadei_ps.errors import JobFailed
from gadei_ps.job.faults import Processes
from gadei_ps.learners.client import Client
from gadei_ps.memory import segment

# -- clocks across a failover ----------------------------------------------------------------


def failover(job: str) -> None:
    """The active server is killed and the other one has taken over."""
    next_ = standby(job)
    os.kill(status(job)["server_pid"], signal.SIGKILL)
    eventually(lambda: status(job)["server_pid"] == next_)


def test_ssp_keeps_its_bound(job_name: str) -> None:
    bound = 2
    wanted = {"standby": True, "sync": f"ssp:{bound}", "shards": 2}
    fast_at, slow_at = 10, VALUES - 10  # of different shards
    with (
        daemon(job_name, tensors=TENSORS, **wanted),
        team(job_name, 1, "wait_turn") as (slow,),
        pushing(job_name, fast_at),
    ):
        weights = live_weights(job_name)

        def lead() -> int:
            """Applied gradients; the slow one's are looked at last, so that none is missed."""
            ahead = -weights[fast_at]
            ahead += weights[slow_at]
            assert ahead <= bound + 1
            return int(ahead)

        def lag_behind() -> None:
            eventually(lambda: lead() == bound + 1, what=lambda: weights[[fast_at, slow_at]])

        lag_behind()
        for pushed in range(1, 5):
            if pushed % 2:
                failover(job_name)
            call(slow, "push", gradient_of(one_at(slow_at)))
            call(slow, "wait_applied")
            assert -weights[slow_at] == pushed
            lag_behind()
        # A third one that comes after failovers begins where the slowest is.
        with team(job_name, 1, "wait_turn") as (late,):
            assert call(late, "push", gradient_of(one_at(slow_at))) == 0
            assert call(late, "wait_applied") is None
            assert call(late, "wait_turn", PATIENCE_S) is None
            assert int(-weights[fast_at]) == 4 + bound + 1
            call(late, "detach")


def test_bsp_keeps_its_supersteps(job_name: str) -> None:
    """A server dies with the first half of a superstep's gradients in the rings."""
    with (
        daemon(job_name, tensors=TENSORS, standby=True, sync="bsp", shards=2),
        team(job_name, 2, "wait_turn") as (one, other),
    ):
        weights = live_weights(job_name)[:VALUES]
        for number in range(1, 4):
            call(one, "push", gradient_of(np.full(VALUES, 3, np.float32)))
            if number != 2:
                failover(job_name)
            np.testing.assert_array_equal(weights, -2 * (number - 1))
            assert status(job_name)["supersteps"] == number - 1
            call(other, "push", gradient_of(np.full(VALUES, 1, np.float32)))
            for child in (one, other):
                assert call(child, "wait_turn", PATIENCE_S) is None
            np.testing.assert_array_equal(weights, -2 * number)
        end = status(job_name)
        assert (end["supersteps"], end["version"]) == (3, 6)


def test_what_the_dead_have_pushed_stays_in_its_superstep(job_name: str) -> None:
    """Check it even if the server dies after them: the next one finds the others' gradients."""
    with (
        daemon(job_name, tensors=TENSORS, standby=True, sync="bsp", shards=2),
        team(job_name, 2, "wait_turn") as (stays, dies),
    ):
        call(dies, "push", gradient_of(np.full(VALUES, 3, np.float32)))
        dies.kill()
        roster = Processes(job_name).control["roster"]
        eventually(lambda: roster["member"].sum() == 1)
        next_ = standby(job_name)
        with Stopped(next_):
            os.kill(status(job_name)["server_pid"], signal.SIGKILL)
            call(stays, "push", gradient_of(np.ones(VALUES, np.float32)))
        assert call(stays, "wait_turn", PATIENCE_S) is None
        np.testing.assert_array_equal(live_weights(job_name)[:VALUES], -2)
        assert status(job_name)["supersteps"] == 1


def test_learners_come_and_go_while_the_standby_sleeps(job_name: str) -> None:
    """It wakes up with the ring of a learner after whom others have had the same row."""
    with daemon(job_name, tensors=TENSORS, standby=True) as job:
        next_ = standby(job_name)
        maps = Path(f"/proc/{next_}/maps")
        with Client(job_name) as first:
            eventually(lambda: "ring.0" in maps.read_text())
            with Stopped(next_):
                first.detach()
                eventually(lambda: not status(job_name)["learners"])
                with Client(job_name) as second:
                    second.push({})
                eventually(lambda: not status(job_name)["learners"])
                third = Client(job_name)
        with third:
            assert third.row == 0
            third.push({})
            failover(job_name)
            third.push({})
            third.wait_applied()
        job.check()


# -- names that somebody has removed ----------------------------------------------------------


def test_segments_without_names(cli: Cli, job_name: str) -> None:
    """Remove them as logind's RemoveIPC does. All continues, even if the active server dies."""
    watchdog = cli.serve(job_name, "standby = true\n" + TOML)
    with pushing(job_name) as one:
        weights = live_weights(job_name)[:VALUES]
        control = Processes(job_name).control
        next_ = standby(job_name)
        for name in segments(job_name):
            segment.unlink(name)
        eventually(lambda: status(job_name)["names_lost"])
        assert "RemoveIPC" in watchdog.err
        goes_on(job_name)
        assert cli("checkpoint", job_name, "--json").json["version"] > 0
        with pytest.raises(JobFailed, match=r"is gone.*RemoveIPC"):
            Client(job_name)
        eventually(lambda: len(status(job_name)["learners"]) == 1)

        os.kill(status(job_name)["server_pid"], signal.SIGKILL)
        eventually(lambda: status(job_name)["server_pid"] == next_)
        goes_on(job_name)
        assert [row["pid"] for row in status(job_name)["learners"]] == [one.child.pid]
        eventually(lambda: status(job_name)["server_deaths"] == 1)
        status(job_name)  # it has looked for servers that are missing before it answers again
        assert int(control["server_starts"]) == 2, "none is started in vain"
        one.kill()
        eventually(lambda: not status(job_name)["learners"])
        version = status(job_name)["version"]
        np.testing.assert_array_equal(weights, -version)
    assert cli("stop", job_name, "--json").json["gradients_applied"] == version
    assert watchdog.wait().code == 0
    assert not segments(job_name)


def test_no_second_job_without_names(cli: Cli, job_name: str) -> None:
    """Another watchdog finds what runs on, though nothing in /dev/shm leads to it."""
    watchdog = cli.serve(job_name, "standby = false\n" + TOML)
    server = status(job_name)["server_pid"]
    for name in segments(job_name):
        segment.unlink(name)
    elsewhere = {"GADEI_PS_RUNTIME_DIR": str(cli.directory / "other")}
    assert f"kill {watchdog.pid}" in cli("serve", f"{job_name}.toml", **elsewhere).error
    assert not gone(server)
    with Stopped(server):  # it ends by itself otherwise, for no watchdog could adopt the job
        assert watchdog.signal(signal.SIGKILL).code == -signal.SIGKILL
        assert "without its names" in cli("status", job_name).error
    cli.serve(job_name, "standby = false\n" + TOML)
    assert gone(server)


def test_the_last_server_without_names(cli: Cli, job_name: str) -> None:
    """Nobody can follow it: the job fails, and says why."""
    watchdog = cli.serve(job_name, "standby = false\n" + TOML)
    for name in segments(job_name):
        segment.unlink(name)
    os.kill(status(job_name)["server_pid"], signal.SIGKILL)
    result = watchdog.wait()
    assert result.code == 1
    assert "RemoveIPC" in result.err
    assert not Path(cli.directory / f"{job_name}.sock").exists()
