"""Monitors read the same of jobs as their watchdogs report, and need none of their processes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shell import Cli
from support import Pusher, Rig, Stopped, daemon, eventually, remove_segments, status

from gadei_ps import metrics
from gadei_ps.job import recorded
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout, shm
from gadei_ps.memory.weights import Tensor
from gadei_ps.metrics import Place
from gadei_ps.monitoring.reading import Job, Model, Reader, State

TENSORS = [{"name": "w", "shape": [96]}]
W = (Tensor("w", (96,)),)
FILE = """\
standby = false
history = true
[optimizer]
kind = "adamw"
lr = 0.5
[[tensors]]
name = "w"
shape = [96]
"""


def job_of(reader: Reader, name: str) -> Job | None:
    return next(iter(reader.jobs(name)), None)


def read(job: str) -> Job:
    found = job_of(Reader(), job)
    assert found is not None and not found.problem, found
    return found


def push(client: Client) -> None:
    client.push({"w": np.ones(96, np.float32)}, loss=2.0, samples=3)


def test_it_is_what_the_watchdog_reports(job_name: str) -> None:
    with daemon(job_name, tensors=TENSORS, history=True, standby=True) as job:
        assert read(job_name).state in (State.STARTING, State.RUNNING)
        with Client(job_name) as client:
            for _ in range(5):
                push(client)
            client.wait_applied()
            eventually(lambda: status(job_name)["standby_pid"])
            report: dict[str, Any] = status(job_name)
            found = read(job_name)
            assert found.state is State.RUNNING
            by_watchdog = {"checkpoint_age_s", "server_private_bytes"}
            for one in metrics.JOB:
                wanted = None if one.name in by_watchdog else report[one.name]
                assert found.metrics[one.name] == wanted, one.name
            (learner,), (row,) = found.learners, report["learners"]
            for one in metrics.LEARNER:
                if one.place is not Place.WATCHDOG or one.name not in ("holds_up_s", "killed_in_s"):
                    assert learner.metrics[one.name] == row[one.name], one.name
            for name in ("row", "generation", "pid", "leaving"):
                assert getattr(learner, name) == row[name], name
            assert list(learner.staleness_histogram) == row["staleness_histogram"]
            assert found.model == Model(**report["model"])
            for name in (
                "watchdog_pid",
                "server_pid",
                "standby_pid",
                "sync",
                "optimizer",
                "job_id",
            ):
                assert getattr(found, name) == report[name], name
            assert found.hyperparameters["lr"] == report["settings"]["lr"]
            assert str(found.history) == report["history"]
            assert found.config["name"] == job_name
        job.check()
    assert job_of(Reader(), job_name) is None


def test_no_process_is_needed(cli: Cli, job_name: str) -> None:
    service = cli.serve(job_name, FILE)
    with Client(job_name) as client:
        push(client)
        client.wait_applied()
        before = read(job_name)
        with Stopped(before.watchdog_pid):
            assert read(job_name).state is State.RUNNING
        service.signal(signal.SIGKILL)
        service.wait()
        found = read(job_name)
        assert found.state is State.ORPHANED and found.watchdog_pid is None
        assert found.metrics == before.metrics | {"learners_attached": 1}
        push(client)
        client.wait_applied()
        assert read(job_name).metrics["gradients_applied"] == 2
        server = found.server_pid
        assert server is not None
        os.kill(server, signal.SIGKILL)
        eventually(lambda: read(job_name).state is State.DEAD)
        assert read(job_name).metrics["gradients_applied"] == 2
        assert read(job_name).history == found.history
    service = cli.serve(job_name, FILE)
    eventually(lambda: read(job_name).state is State.RUNNING)
    cli("stop", job_name)
    service.wait()


@pytest.mark.parametrize("size", [0, 40, 200, 100_000])
def test_a_truncated_file_is_a_problem(size: int, job_name: str) -> None:
    with Rig(job_name, W, learners=1):
        path = shm.path_of(shm.segment_name(job_name, "control"))
        copy = path.read_bytes()
        other = shm.path_of(shm.segment_name(f"{job_name}-cut", "control"))
        try:
            other.touch(mode=0o600)
            other.write_bytes(copy[:size])
            found = job_of(Reader(), f"{job_name}-cut")
            assert found is not None and found.state is State.UNREADABLE and found.problem
            assert f"{job_name}-cut" in [one.name for one in Reader().jobs()]
        finally:
            other.unlink()


def test_a_record_that_is_nested_too_deeply_counts_as_none(job_name: str) -> None:
    with Rig(job_name, W):
        text = b"[" * 5000
        with shm.path_of(shm.segment_name(job_name, "control")).open("r+b") as file:
            file.seek(recorded.AT)
            file.write(recorded.HEAD.pack(9, len(text), recorded._sum(9, text)) + text)
        assert read(job_name).config == {}


def test_a_huge_file_is_a_problem(job_name: str) -> None:
    """Read whole, it would take the memory of the process that reads it."""
    with Rig(job_name, W):
        path = shm.path_of(shm.segment_name(job_name, "control"))
        size = path.stat().st_size
        os.truncate(path, 1 << 40)
        found = job_of(Reader(), job_name)
        assert found is not None and found.state is State.UNREADABLE and found.problem
        os.truncate(path, size)


def test_other_files_of_that_name(job_name: str, tmp_path: Path) -> None:
    path = shm.path_of(shm.segment_name(job_name, "control"))
    for make in (lambda: os.mkfifo(path, 0o600), lambda: path.symlink_to(tmp_path), path.mkdir):
        make()
        try:
            found = job_of(Reader(), job_name)
            assert found is not None and found.state is State.UNREADABLE
            assert str(path) in found.problem
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_another_version_is_a_problem(job_name: str) -> None:
    with Rig(job_name, W) as rig:
        rig.control["header"]["layout_version"] = 3
        found = job_of(Reader(), job_name)
        assert found is not None and "layout version 3" in found.problem
        rig.control["header"]["layout_version"] = layout.LAYOUT_VERSION
        assert read(job_name).metrics["gradients_applied"] == 0


def test_missing_and_replaced_segments(job_name: str) -> None:
    """A job whose watchdog makes or removes its memory just now."""
    with Rig(job_name, W, learners=2) as rig, rig.serving():
        rig.apply(0, rig.ones())
        assert [one.metrics["published"] for one in read(job_name).learners] == [1, 0]
        rig.control["ring_inode"][1] += 1
        assert [one.metrics["published"] for one in read(job_name).learners] == [1, None]
        for part in ("ring.0", "weights", "state"):
            shm.path_of(shm.segment_name(job_name, part)).unlink()
            found = read(job_name)
            assert found.metrics["gradients_applied"] == 1
        assert found.model is None
        remove_segments(job_name)
        assert job_of(Reader(), job_name) is None


def test_counters_never_decrease(job_name: str) -> None:
    """A server that dies in a transaction has counted what the next one counts again."""
    with Rig(job_name, W, learners=2) as rig:
        assert rig.memory.state
        state = rig.memory.state.view(layout.STATE)
        reader = Reader()
        rig.roster[0]["applied"], rig.control["past_applied"] = 7, 10
        state["journal"]["used"] = 3

        def applied() -> Any:
            found = job_of(reader, job_name)
            assert found
            return found.metrics["gradients_applied"]

        assert applied() == 17, "the first reading is all there is"
        rig.control["past_applied"] = 17  # but the learner's own count is not cleared yet
        assert applied() == 17
        rig.roster[0]["applied"] = 0
        state["journal"]["used"] = 0
        assert applied() == 17
        rig.control["past_applied"] = 16
        assert applied() == 17
        rig.control["past_applied"] = 18
        assert applied() == 18


def test_counts_of_a_first_reading_that_is_not_whole_are_not_kept(job_name: str) -> None:
    with Rig(job_name, W, learners=1) as rig:
        assert rig.memory.state
        state, reader = rig.memory.state.view(layout.STATE), Reader()
        rig.roster[0]["applied"], rig.control["past_applied"] = 7, 7  # counted twice for now
        state["journal"]["used"] = 3
        first = job_of(reader, job_name)
        assert first is not None and first.metrics["gradients_applied"] == 14
        rig.control["past_applied"], state["journal"]["used"] = 0, 0
        second = job_of(reader, job_name)
        assert second is not None and second.metrics["gradients_applied"] == 7


def test_learners_come_and_go_while_it_is_read(job_name: str) -> None:
    """No reading has more or fewer gradients than the one before and the one after."""
    with daemon(job_name, tensors=TENSORS) as job:
        reader, seen, over = Reader(), [0], threading.Event()

        def look() -> None:
            while not over.is_set():
                found = job_of(reader, job_name)
                if found is not None and not found.problem:
                    seen.append(found.metrics["gradients_applied"] or 0)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            published = 0
            for _ in range(6):
                learner = Pusher(job_name, push)
                eventually(lambda learner=learner: learner.published > 20)
                learner.kill()
                published += learner.published
                eventually(lambda: not status(job_name)["learners"])
                assert max(seen) <= published
        finally:
            over.set()
            thread.join()
        assert seen == sorted(seen)
        job.check()
