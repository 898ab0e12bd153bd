"""A stop closes the rings: the last checkpoint has all that was published before, and no more."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from shell import Cli
from support import Stopped, eventually, fork, ring_of, segments, status

from gadei_ps.errors import Evicted, JobStopped, NotSaved
from gadei_ps.learners.client import Client
from gadei_ps.memory import segment, shm
from gadei_ps.memory.layout import PAYLOAD_AT, RING, SegmentKind
from gadei_ps.storage.checkpoint import newest

VALUES = 1024
TOML = f"""
sync = "{{sync}}"
[optimizer]
kind = "sgd"
lr = 1.0
[checkpoint]
directory = "{{directory}}"
every_s = 0
[[tensors]]
name = "w"
shape = [{VALUES}]
"""


def _push_for_ever(pipe: Connection, job: str) -> None:
    """Push without looking at anything else; return how many pushes have returned."""
    returned = 0
    with Client(job) as client:
        try:
            while True:
                client.push(np.ones(VALUES, np.float32), samples=1)
                returned += 1
                if returned == 10:
                    pipe.send(None)
        except JobStopped:
            assert client.published == returned
            pipe.send(returned)


def _hang_in_a_push(pipe: Connection, job: str) -> None:
    """Hang as if stopped while the head of the ring is moved."""
    with Client(job) as client:
        client.push(np.ones(VALUES, np.float32), samples=1)
        client.wait_applied()
        name = shm.segment_name(job, f"ring.{client.row}")
        ring = segment.attach(name, SegmentKind.RING, writable=True)
        ring.view(RING)["publishing"] = 1
        pipe.send(None)
        time.sleep(1000)


def _publish_late(pipe: Connection, job: str) -> None:
    """Claim a slot and write it; publish it on request."""
    with Client(job) as client:
        client.push(np.ones(VALUES, np.float32), samples=1)
        client.wait_applied()
        slot = client.claim()
        client.write_named(slot + PAYLOAD_AT, np.ones(VALUES, np.float32))
        pipe.send(None)
        pipe.recv()
        with pytest.raises(Evicted):
            client.publish(samples=1)
        pipe.send(client.published)


def _serve(cli: Cli, job: str, directory: Path, sync: str = "asp") -> None:
    cli.serve(job, TOML.format(sync=sync, directory=directory))


def _same_everywhere(directory: Path, report: dict[str, object], published: int) -> None:
    """Check that learners, the stop, the counters and the weights of the checkpoint agree."""
    snapshot, _, problems = newest(directory)
    assert not problems
    assert snapshot is not None
    assert published == snapshot.version == report["version"] == report["gradients_applied"]
    assert snapshot.counts["applied"] == snapshot.counts["samples"] == published
    np.testing.assert_array_equal(snapshot.weights[:VALUES], np.float32(-published))


@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize("how", [["--drain", "--timeout", "0.3"], []], ids=["drain", "now"])
def test_learners_that_push_on(
    sync: str, how: list[str], cli: Cli, job_name: str, tmp_path: Path
) -> None:
    _serve(cli, job_name, tmp_path / "kept", sync)
    with fork(3, _push_for_ever, job_name) as learners:
        for one in learners:
            one.receive()
        report = cli("stop", job_name, *how, "--json").json
        published = sum(one.receive() for one in learners)
        assert [one.join() for one in learners] == [0, 0, 0]
    if sync == "asp":
        _same_everywhere(tmp_path / "kept", report, published)
    else:  # what waits at a barrier that nobody comes to is dropped, and counted
        decided = ("gradients_applied", "gradients_dropped", "gradients_refused")
        assert published == sum(int(report[one]) for one in decided)
    assert not segments(job_name)


def test_a_learner_that_is_stopped_does_not_hold_it_up(
    cli: Cli, job_name: str, tmp_path: Path
) -> None:
    _serve(cli, job_name, tmp_path / "kept")
    with fork(2, _push_for_ever, job_name) as (still, other):
        still.receive()
        other.receive()
        rows = [int(one["row"]) for one in status(job_name)["learners"] if one["pid"] == still.pid]
        ring = ring_of(job_name, rows[0]).view(RING)
        while True:
            with Stopped(still.pid):
                if ring["publishing"]:
                    continue  # it would count as one that hangs
                report = cli("stop", job_name, "--json").json
                break
        _same_everywhere(tmp_path / "kept", report, still.receive() + other.receive())


def test_a_learner_that_hangs_in_a_push_is_killed(cli: Cli, job_name: str, tmp_path: Path) -> None:
    _serve(cli, job_name, tmp_path / "kept")
    with fork(1, _hang_in_a_push, job_name) as (learner,):
        learner.receive()
        report = cli("stop", job_name, "--json").json
        assert learner.join() == -signal.SIGKILL
    _same_everywhere(tmp_path / "kept", report, 1)


def test_a_watchdog_that_dies_once_the_rings_are_closed(
    cli: Cli, job_name: str, tmp_path: Path
) -> None:
    """The next one finishes the stop, and the rings stay closed meanwhile.

    If it is stopped meanwhile, the job does not start again.
    """
    _serve(cli, job_name, tmp_path / "kept")
    with fork(2, _push_for_ever, job_name) as learners:
        for one in learners:
            one.receive()
        before = status(job_name)
        with Stopped(before["server_pid"]):  # what is published stays where it is
            stop = cli.start("stop", job_name)
            published = sum(one.receive() for one in learners)
            cli.start("kill", job_name, "--watchdog").wait()
            again = cli.start("serve", f"{job_name}.toml")
            eventually(lambda: "finishing the stop" in again.err)
            again.process.terminate()
        stop.wait()
        assert again.wait().code == 0
    snapshot, _, _ = newest(tmp_path / "kept")
    assert snapshot is not None
    assert snapshot.version == published
    eventually(lambda: not segments(job_name))


def test_a_gradient_in_hand_over_a_stop_that_did_not_save(
    cli: Cli, job_name: str, tmp_path: Path
) -> None:
    """Check that its learner is detached before it publishes; the job continues without it."""
    kept = tmp_path / "kept"
    _serve(cli, job_name, kept)
    with fork(1, _publish_late, job_name) as (learner,):
        learner.receive()
        kept.rename(tmp_path / "aside")
        kept.touch()
        assert cli("stop", job_name).code == NotSaved.exit_code
        kept.unlink()
        _serve(cli, job_name, kept)
        learner.send()
        assert learner.receive() == status(job_name)["gradients_applied"] == 1
