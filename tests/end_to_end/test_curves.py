"""Curves of jobs for TensorBoard: the same as the history, whichever process was killed."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from saved_jobs import again, die
from shell import Cli
from support import PATIENCE_S, daemon, eventually, gone, quick, status

from gadei_ps.commands import change, history, jobs
from gadei_ps.commands import daemon as command_daemon
from gadei_ps.job import config
from gadei_ps.learners.client import Client
from gadei_ps.monitoring import curves
from gadei_ps.watchdog import history as points
from gadei_ps.watchdog import monitors, supervisor

FILE = """\
standby = false
[optimizer]
lr = 1.0
[curves]
tensorboard = "runs"
[checkpoint]
every_s = 0
on_stop = false
[[tensors]]
name = "w"
shape = [8]
"""


def push(client: Client) -> None:
    client.push({"w": np.ones(8, np.float32)}, loss=2.0, samples=3)
    client.wait_applied()


def records(path: Path) -> Iterator[Any]:
    """Yield the whole events of a file: their length, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    raw = path.read_bytes()
    while len(raw) > 12 and len(raw) >= 16 + (size := struct.unpack_from("<Q", raw)[0]):
        yield Event.FromString(raw[12 : 12 + size])
        raw = raw[16 + size :]


def shown(run: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return what TensorBoard shows of a run: steps and values by tag."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for path in sorted(run.glob("events.*")):
        for event in records(path):
            if event.HasField("session_log"):
                for tag, values in found.items():
                    found[tag] = [one for one in values if one[0] < event.step]
            for one in event.summary.value:
                text = one.tensor.string_val
                value = text[0].decode() if text else round(one.simple_value, 3)
                found.setdefault(one.tag.removesuffix("/text_summary"), []).append(
                    (event.step, value)
                )
    return found


def losses(job: str, after: float = 0.0) -> list[tuple[int, Any]]:
    """Return the loss in each point of the history."""
    lines = history.read(job)["lines"]
    points = [one for one in lines if one.get("loss") is not None and one["time"] > after]
    return [(one["version"], round(one["loss"], 3)) for one in points]


def run_of(directory: Path) -> Path:
    (run,) = directory.iterdir()
    return run


def writer(job: str) -> int:
    """Return the pid of the process that writes curves; 0 if there is none."""
    for child in psutil.Process(status(job)["watchdog_pid"]).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.name() == "curves":
                return child.pid
    return 0


def push_until_shown(client: Client, runs: Path, points: int) -> None:
    """Push until the newest run has so many more points."""

    def has() -> int:
        there = sorted(runs.iterdir()) if runs.exists() else []
        return len(shown(there[-1]).get("loss/train", ())) if there else 0

    wanted = has() + points
    eventually(lambda: push(client) or has() >= wanted)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let points come ten times a second, and the process that writes them start quickly."""
    importlib.import_module("tensorboardX")  # forks have it then
    for module, name in (
        *((monitors, "RESTART_S"), (supervisor, "SLOW_TICK_S"), (points, "LEAST_POINT_S")),
        (curves, "POLL_S"),
    ):
        monkeypatch.setattr(module, name, 0.1)
    for module, name in (  # a stop waits until all is written, on a busy machine too
        *((points, "HISTORY_END_S"), (supervisor, "MONITORS_END_S")),
        (command_daemon, "END_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, PATIENCE_S)


@pytest.mark.usefixtures("quickly")
def test_they_are_those_of_the_history(cli: Cli, job_name: str) -> None:
    """Kill the process that writes them, report values and change a setting meanwhile."""
    service = cli.serve(job_name, FILE)
    runs = cli.directory / "runs"
    with Client(job_name) as client:
        push_until_shown(client, runs, 2)
        first = writer(job_name)
        os.kill(first, signal.SIGKILL)
        client.report(accuracy=0.5)
        change.set_optimizer(job_name, {"lr": 0.5}, PATIENCE_S)
        eventually(lambda: push(client) or writer(job_name) not in (0, first))
        push_until_shown(client, runs, 2)
        last = writer(job_name)
    cli("stop", job_name)
    assert service.wait().code == 0, service.err
    assert gone(last)
    found = shown(run_of(runs))
    assert found["loss/train"] == losses(job_name)
    assert 1.0 in dict(found["learners"]).values() and 0.0 in dict(found["staleness"]).values()
    assert found["samples_per_second"] and found["learning_rate"][-1][1] == 0.5
    assert [value for _, value in found["accuracy"]] == [0.5]
    texts = [text for _, text in found["events"]]
    assert any("attached" in one for one in texts)
    assert any("set lr 1 -> 0.5" in one for one in texts), texts


@pytest.mark.usefixtures("quickly")
def test_a_checkpoint_hides_what_came_after_it(cli: Cli, job_name: str) -> None:
    """Continue the run after a power failure; a job from zero begins another one."""
    cli.serve(job_name, FILE)
    runs = cli.directory / "runs"
    client = Client(job_name)
    push_until_shown(client, runs, 1)
    version = jobs.checkpoint(job_name)["version"]
    push_until_shown(client, runs, 2)
    last = writer(job_name)
    die(job_name)
    client.detach()
    eventually(lambda: gone(last))
    run = run_of(runs)
    before = [one for one in losses(job_name) if one[0] <= version]
    assert before != losses(job_name)
    died = history.read(job_name)["lines"][-1]["time"]
    service = again(cli, job_name)
    with Client(job_name) as client:
        eventually(lambda: push(client) or losses(job_name, died))
    cli("stop", job_name)
    assert service.wait().code == 0
    assert run_of(runs) == run
    assert shown(run)["loss/train"] == before + losses(job_name, died)
    restored = f"continues from the checkpoint of version {version}"
    assert (version, restored) in shown(run)["events"]

    service = again(cli, job_name, "--fresh")
    with Client(job_name) as client:
        eventually(lambda: push(client) or len(list(runs.iterdir())) == 2)
    cli("stop", job_name)
    assert service.wait().code == 0
    newest = max(runs.iterdir(), key=lambda one: one.name)
    assert shown(newest)["loss/train"] == losses(job_name)


SHORT = """
import numpy as np
from gadei_ps.learners.client import Client

with Client(tensors={"w": np.zeros(8, np.float32)}) as client:
    client.push({"w": np.ones(8, np.float32)}, loss=2.0, samples=3)
    client.wait_applied()
"""


def test_a_short_run_has_them(cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a process that loads its library longer than the job runs."""
    monkeypatch.delitem(quick.PROGRAMS, "gadei_ps.monitoring.curves")  # as users start it
    for module, limit in (
        (points, "HISTORY_END_S"),
        (supervisor, "MONITORS_END_S"),
        (command_daemon, "END_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, limit, PATIENCE_S)
    (cli.directory / "short.py").write_text(SHORT)
    done = cli("run", job_name, "--tensorboard", "runs", "--", sys.executable, "short.py")
    assert done.code == 0, done.err
    assert shown(run_of(cli.directory / "runs"))["loss/train"] == losses(job_name) == [(1, 2.0)]


def test_a_library_that_is_missing(
    cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(config.LIBRARIES, "wandb", "no_such_module")
    file = cli.directory / f"{job_name}.toml"
    file.write_text("")
    program = "--", "python", "x.py"
    for words in (
        ("serve", file, "--wandb", "runs"),
        ("run", job_name, "--wandb", "runs", *program),
    ):
        done = cli(*words)
        assert done.code == 2
        assert done.error == (
            "curves.wandb: no_such_module is not installed: pip install 'gadei-ps[wandb]'"
        )
    assert not (cli.directory / "runs").exists()


def test_training_does_not_depend_on_them(
    cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(quick.PROGRAMS, "gadei_ps.monitoring.curves")  # as users start it
    (cli.directory / "runs").write_text("not a directory")
    service = cli.serve(job_name, FILE)
    with Client(job_name) as client:
        eventually(
            lambda: push(client) or "curves.tensorboard: " in service.err, what=lambda: service.err
        )
        push(client)
    assert "FileExistsError" in service.err or "NotADirectoryError" in service.err
    assert "training continues" in service.err
    cli("stop", job_name)
    assert service.wait().code == 0


def test_a_job_that_runs_has_its_own(cli: Cli, job_name: str) -> None:
    with daemon(job_name):
        done = cli("run", job_name, "--tensorboard", "runs", "--", "python", "x.py")
        assert done.code == 2 and "--tensorboard: job" in done.error
