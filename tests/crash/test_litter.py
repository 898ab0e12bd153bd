"""Deaths that leave nothing behind, and memory use as configured."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support import (
    PATIENCE_S,
    QuickDaemon,
    config,
    daemon,
    eventually,
    fork,
    gone,
    kill_all,
    live_weights,
    quick,
    segments,
    status,
)

from gadei_ps.errors import GadeiError, JobFailed, JobInUse, JobNotFound
from gadei_ps.job import paths
from gadei_ps.job.control import Connection as Control
from gadei_ps.job.control import StopJob, ask
from gadei_ps.learners import client as client_module
from gadei_ps.learners.client import Client
from gadei_ps.machine import process
from gadei_ps.machine.launch import Learners
from gadei_ps.memory import layout, presence
from gadei_ps.memory.weights import payload_bytes
from gadei_ps.watchdog import restart

TENSORS = [{"name": "w", "shape": [1000]}]


def _push_until_told(pipe: Connection, job: str) -> None:
    """Push until an error. Send the name of the error."""
    client = Client(job)
    client.push({})
    client.wait_applied()
    pipe.send("pushing")
    try:
        while True:
            client.push({}, samples=1)
    except GadeiError as error:
        pipe.send(f"{type(error).__name__}: {error}")


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_everything_dies_but_the_learners(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that learners wait some time for a new watchdog, then report what has happened."""
    monkeypatch.setattr(client_module, "JOB_GONE_S", 1.0)  # the fork inherits it
    with daemon(job_name, tensors=TENSORS), fork(1, _push_until_told, job_name) as (child,):
        assert child.receive() == "pushing"
        kill_all(job_name)
        answer = child.receive()
        assert answer.startswith("JobFailed"), answer
        assert "watchdog" in answer
        assert child.join() == 0


def test_everything_dies(job_name: str) -> None:
    """The next start of that name with `fresh` removes what the dead job left."""
    with fork(1, _launch, job_name) as (launcher,):
        launcher.receive()
        now = status(job_name)
        kill_all(job_name)
    left = segments(job_name)
    assert len(left) == 5
    with pytest.raises(JobNotFound):
        status(job_name)
    with daemon(job_name, tensors=TENSORS), Client(job_name) as client:
        assert status(job_name)["job_id"] != now["job_id"]
        client.push({"w": np.ones(1000)})
        client.wait_applied()
        assert client.current_version == 1
    assert not segments(job_name)


def test_servers_that_die_at_once_are_given_up(
    job_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that the job fails, reports it, and leaves nothing if each start of a server fails."""
    die = tmp_path / "die"
    delay = restart.delay

    def hurried(*history: Any) -> float:
        """Wait less; unit/test_restart.py tests the delays."""
        return delay(*history) / 20

    # The watchdog, a fork, inherits both.
    monkeypatch.setattr(restart, "delay", hurried)
    monkeypatch.setattr(quick, "STARTING", [*quick.STARTING, quick.servers_die_once(die)])
    with daemon(job_name, tensors=TENSORS) as job, fork(1, _push_until_told, job_name) as (child,):
        assert child.receive() == "pushing"
        pid = status(job_name)["watchdog_pid"]
        die.touch()
        for server in presence.server_pids(job_name):
            os.kill(server, signal.SIGKILL)
        eventually(lambda: gone(pid))
        answer = child.receive()
        assert answer.startswith("JobFailed"), answer
        with pytest.raises(JobFailed):
            job.check()
    assert not segments(job_name)
    assert not paths.socket_path(job_name).exists()
    assert not paths.lock_path(job_name).exists()


def _launch(pipe: Connection, job: str) -> None:
    """A launcher such as `run`: a daemon and learners that end with it."""
    script = (
        "import time\n"
        "from gadei_ps.learners.client import Client\n"
        "client = Client()\n"
        "while True:\n"
        "    client.push({})\n"
        "    time.sleep(0.0005)\n"  # what starts meanwhile needs the cores
    )
    with QuickDaemon(config(job, tensors=TENSORS)) as job_daemon:
        learners = Learners([sys.executable, "-c", script], 2, str(job_daemon.socket))
        eventually(lambda: len(status(job)["learners"]) == 2)
        now = status(job)
        pipe.send([now["watchdog_pid"], now["server_pid"], *learners.pids])
        pipe.recv()


def test_the_launcher_dies(job_name: str) -> None:
    with fork(1, _launch, job_name) as (launcher,):
        pids = launcher.receive()
        launcher.kill()
        for pid in pids:
            eventually(lambda pid=pid: gone(pid), what=f"{pid} of {pids}")
    eventually(lambda: not segments(job_name))
    assert not paths.socket_path(job_name).exists()


def test_a_clean_stop_leaves_nothing(job_name: str) -> None:
    with daemon(job_name, tensors=TENSORS) as job, Client(job_name) as client:
        client.push({})
        assert len(segments(job_name)) == 4
        with fork(1, _push_until_told, job_name) as (child,):
            assert child.receive() == "pushing"
            end = ask(job_name, StopJob(drain=False), timeout_s=PATIENCE_S)
            assert child.receive().startswith("JobStopped")
        assert end["gradients_applied"] >= 2
        with pytest.raises(GadeiError):
            eventually(job.check)
        assert not segments(job_name)
        assert [path.name for path in paths.directory().iterdir()] == []


def _start(pipe: Connection, job: str) -> None:
    pipe.recv()
    try:
        with QuickDaemon(config(job, tensors=TENSORS)):
            pipe.send("won")
            pipe.recv()
    except JobInUse as error:
        pipe.send(str(error))
        pipe.recv()


@pytest.mark.parametrize("stale", [False, True])
def test_two_starts_of_one_name(stale: bool, job_name: str) -> None:
    if stale:
        with fork(1, _launch, job_name) as (launcher,):
            launcher.receive()
            kill_all(job_name)
        assert segments(job_name)
    with fork(3, _start, job_name) as team:
        for child in team:
            child.send()
        answers = sorted(child.receive() for child in team)
        assert answers.count("won") == 1, answers
        assert all(job_name in one and "\n" not in one for one in answers if one != "won")
        with Client(job_name) as client:
            client.push({})
            client.wait_applied()
        for child in team:
            child.send()
        for child in team:
            assert child.join() == 0
    assert not segments(job_name)


def test_what_cannot_be_started_leaves_nothing(job_name: str, tmp_path: Path) -> None:
    with pytest.raises(GadeiError, match="No such file"), daemon(job_name, weights=tmp_path / "x"):
        pass
    free = os.statvfs("/dev/shm")
    huge = [{"name": "w", "shape": [free.f_bavail * free.f_frsize]}]
    with pytest.raises(GadeiError, match="MiB free"), daemon(job_name, tensors=huge):
        pass
    assert not segments(job_name)
    assert [path.name for path in paths.directory().iterdir()] == []


def _push_many(pipe: Connection, job: str) -> None:
    with Client(job) as client:
        gradient = np.ones(client.model.elements, np.float32)
        while (count := pipe.recv()) is not None:
            for _ in range(count):
                client.push(gradient, samples=1, loss=1.0)
            client.wait_applied()
            pipe.send("done")


@pytest.mark.parametrize("model", ["asp", "bsp"])
def test_memory_does_not_grow_with_gradients(model: str, job_name: str) -> None:
    with (
        daemon(job_name, tensors=TENSORS, sync=model, shards=2),
        fork(1, _push_many, job_name) as (child,),
    ):

        def push(count: int) -> dict[str, int]:
            child.send(count)
            assert child.receive() == "done"
            now = status(job_name)
            found = {"server": process.private_bytes(now["server_pid"])}
            found["shared"] = now["shared_bytes"]
            found["watchdog"] = psutil.Process(now["watchdog_pid"]).memory_info().rss
            return found

        before = push(1000)
        after = push(20_000 if model == "asp" else 4000)
        assert after["shared"] == before["shared"]
        assert after["server"] - before["server"] < 2 << 20
        assert after["watchdog"] - before["watchdog"] < 1 << 20
        child.send(None)
        assert child.join() == 0


def test_a_learner_costs_its_ring(job_name: str) -> None:
    slots = 3

    def used() -> int:
        total = 0
        for name in segments(job_name):
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                total += (Path("/dev/shm") / name[1:]).stat().st_blocks * 512
        return total

    with daemon(job_name, tensors=TENSORS, slots=slots), Client(job_name) as first:
        before, claimed = used(), status(job_name)["shared_bytes"]
        with Client(job_name):
            payload = layout.rounded(payload_bytes(first.model), layout.PAGE)
            ring = layout.rounded(layout.RING.itemsize, layout.PAGE)
            ring += slots * (layout.PAYLOAD_AT + payload)
            assert used() - before == ring
            assert status(job_name)["shared_bytes"] - claimed == ring
        eventually(lambda: used() == before)
        assert status(job_name)["shared_bytes"] == claimed


def test_learners_come_and_go(job_name: str) -> None:
    """A thousand learners in one process: rows, rings and descriptors are given back."""
    with daemon(job_name, tensors=TENSORS) as job, Control(job_name) as _:
        pid = status(job_name)["watchdog_pid"]
        server = status(job_name)["server_pid"]

        def held() -> tuple[int, int, int]:
            maps = Path(f"/proc/{server}/maps").read_text().count(job_name)
            return open_files(pid), open_files(server), maps

        with Client(job_name) as client:
            client.push({})
            client.wait_applied()
        eventually(lambda: not status(job_name)["learners"])
        before = held()
        count = 300
        for _ in range(count):
            with Client(job_name) as client:
                client.push({"w": np.ones(1000)})
        eventually(lambda: not status(job_name)["learners"])
        assert status(job_name)["gradients_applied"] == count + 1
        np.testing.assert_array_equal(live_weights(job_name)[:1000], -count)
        eventually(
            lambda: all(now <= then for now, then in zip(held(), before, strict=True)),
            what=lambda: (held(), before),
        )
        job.check()
