"""A job's history: what is in it, deaths of its processes, and disks that do not take it."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from shell import Cli
from support import PATIENCE_S, Pusher, daemon, eventually, status
from support.blocked_disk import BlockedDisk, why_not

from gadei_ps.commands import change, history, jobs
from gadei_ps.job.config import state_directory
from gadei_ps.job.control import Measured, SetSync, ask
from gadei_ps.learners.client import Client
from gadei_ps.memory.layout import REPLICA
from gadei_ps.replicas.training import ReplicaClient

TENSORS = [{"name": "w", "shape": [8]}]
FILE = """\
standby = false
[optimizer]
lr = 1.0
[checkpoint]
every_s = 0
[[tensors]]
name = "w"
shape = [8]
"""


def lines(source: str | Path) -> list[dict[str, Any]]:
    """Return points and changes, without the lines on learners, other events and the end."""
    found = history.read(str(source))["lines"]
    return [one for one in found if not {"command", "ended", "event"} & one.keys()]


def push(client: Client, count: int = 1) -> None:
    for _ in range(count):
        client.push({"w": np.ones(8, np.float32)}, loss=2.0, samples=3)
    client.wait_applied()


def push_until_told(client: Client, job: str, count: int) -> None:
    """Push until there are so many lines."""

    def is_written() -> bool:
        push(client)
        file = Path(status(job)["history"])
        return file.exists() and len(lines(file)) >= count

    eventually(is_written)


def test_a_history(job_name: str) -> None:
    path = state_directory() / f"{job_name}.history.jsonl"
    with daemon(job_name, tensors=TENSORS, history=True), Client(job_name) as client:
        push(client, 5)
        push_until_told(client, job_name, 1)
        change.set_optimizer(job_name, {"lr": 0.5}, PATIENCE_S)
        version = status(job_name)["settings_version"]
        ask(job_name, SetSync(sync="ssp:s=3"))
        eventually(lambda: push(client) or status(job_name)["sync"] == "ssp:s=3")
        ask(job_name, Measured(values={"epoch": 1.0, "accuracy": 0.75}))
        push_until_told(client, job_name, 5)
        assert path == Path(status(job_name)["history"])
        push(client)
        client.assign({"w": np.zeros(8, np.float32)})
        last = status(job_name)["version"]
    applied = last - 1
    there = lines(job_name)  # the job has ended
    assert there == lines(path)
    assert [one["time"] for one in there] == sorted(one["time"] for one in there)
    sets: dict[str, Any] = {}
    for one in there:
        sets |= one.get("set", {})
    assert sets == {"lr": [1.0, 0.5], "sync": ["asp", "ssp:s=3"]}
    assert [one["version"] for one in there if "lr" in one.get("set", {})] == [version]
    assert [one["measured"] for one in there if "measured" in one] == [
        {"epoch": 1.0, "accuracy": 0.75}
    ]
    points = [one for one in there if "samples" in one]
    assert points[-1]["version"] == last
    assert points[-1]["gradients_applied"] == applied
    assert points[-1]["samples"] == 3 * applied
    assert {one["loss"] for one in points} <= {2.0, None}
    assert any(one["samples_per_s"] > 0 and one["learners"] == 1 for one in points)
    assert {one["queue"] for one in points} <= {0, 1}
    old = path.with_name(f"{job_name}.history.old.jsonl")
    with daemon(job_name, tensors=TENSORS, history=True), Client(job_name) as client:
        eventually(lambda: push(client) or old.exists())  # another job of that name
        push_until_told(client, job_name, 1)
    assert lines(path)[0]["time"] > there[-1]["time"]
    assert lines(old) == there
    newest, before = (one for one in history.runs() if one.job == job_name)
    assert (newest.file, before.file) == (str(path), str(old))
    assert (newest.state, before.state) == ("stopped", "stopped")
    assert (before.gradients, before.accuracy, before.loss) == (applied, 0.75, 2.0)
    assert "pytest" in before.command or before.command, "the learner is a fork of this process"


def test_events(job_name: str) -> None:
    """Check learners that come and leave, checkpoints, and a failover with its duration."""

    def events(kind: str) -> list[dict[str, Any]]:
        file = Path(status(job_name)["history"])
        there = history.read(str(file))["lines"] if file.exists() else []
        return [one for one in there if one.get("event") == kind]

    how: dict[str, Any] = {"tensors": TENSORS, "history": True, "standby": True}
    with daemon(job_name, **how, checkpoint={"every_s": 0}):
        killed = Pusher(job_name, lambda client: push(client))
        eventually(lambda: events("attach"))
        killed.kill()
        eventually(lambda: events("death"))
        with Client(job_name) as client:
            eventually(lambda: push(client) or len(events("attach")) == 2)
            jobs.checkpoint(job_name)
            eventually(lambda: events("checkpoint"))
            eventually(lambda: status(job_name)["standby_pid"])
            active = status(job_name)["server_pid"]
            os.kill(active, signal.SIGKILL)
            eventually(lambda: push(client) or events("failover"))
            (failover,) = events("failover")
            assert failover["dead_pid"] == active
            assert failover["pid"] == status(job_name)["server_pid"] != active
            assert failover["ms"] >= 0
            pid = os.getpid()
        eventually(lambda: events("detach"))
        assert [one["pid"] for one in events("attach")] == [killed.child.pid, pid]
        assert [(one["learner"], one["pid"]) for one in events("death")] == [(0, killed.child.pid)]
        assert [one["pid"] for one in events("detach")] == [pid]
        assert events("checkpoint")[0]["checkpoint_version"] > 0
        path = status(job_name)["history"]
        before = len(lines(path))
        with ReplicaClient(job_name, name=REPLICA.decode()) as replica:
            eventually(lambda: push(replica) or len(lines(path)) > before + 1)
            assert lines(path)[-1]["learners"] == 0, "a replica is not a learner"
            push(replica)
            version = replica.current_version
    last = [one for one in history.read(path)["lines"] if one.get("event") == "checkpoint"][-1]
    assert last["checkpoint_version"] == version, "the one of the stop"


def test_it_goes_on_after_deaths(cli: Cli, job_name: str) -> None:
    service = cli.serve(job_name, FILE)
    with Client(job_name) as client:
        push_until_told(client, job_name, 2)
        before = lines(job_name)
        service.signal(signal.SIGKILL)
        service = cli.serve(job_name, FILE)
        push_until_told(client, job_name, len(before) + 2)
        cli("checkpoint", job_name)
    cli("stop", job_name)
    assert service.wait().code == 0
    there = lines(job_name)
    assert there[: len(before)] == before
    service = cli.serve(job_name, FILE)
    with Client(job_name) as client:
        push_until_told(client, job_name, len(there) + 1)
        out = cli("history", job_name, "--last", "2").out
        assert out.splitlines()[0].split() == [
            *("time", "gradients", "loss", "samples/s", "staleness", "queue", "learners")
        ]
        assert len(out.splitlines()) == 3
        assert len(cli("history", f"{job_name}.toml", "--last", "1", "--json").json["lines"]) == 1
    versions = [one["version"] for one in lines(job_name)]
    assert versions == sorted(versions)
    picture = cli.directory / "mine.svg"
    assert "mine.svg" in cli("plot", job_name, "--out", picture).out
    root = xml.etree.ElementTree.fromstring(picture.read_text())
    assert root.tag.endswith("svg")
    cli("stop", job_name)
    service.wait()


def _writers(job: str) -> list[int]:
    """Children of the watchdog that are not servers: the process that writes the history."""
    report = status(job)
    watchdog = psutil.Process(report["watchdog_pid"])
    return [one.pid for one in watchdog.children() if one.pid != report["server_pid"]]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_disk_that_blocks_holds_up_nothing(job_name: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(exist_ok=True)
    with (
        BlockedDisk(state) as disk,
        daemon(job_name, tensors=TENSORS, history=True) as job,
        Client(job_name) as client,
    ):
        push(client)
        waiting = threading.Thread(target=disk.waits)  # until the writer waits
        waiting.start()
        eventually(lambda: push(client) or not waiting.is_alive())
        before = status(job_name)["version"]
        push(client, 200)
        assert status(job_name)["version"] == before + 200
        assert change.set_optimizer(job_name, {"lr": 0.5}, PATIENCE_S)["changed"]
        job.check()


def test_a_directory_that_takes_nothing(
    job_name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("no directory")
    with daemon(job_name, tensors=TENSORS, history=True) as job, Client(job_name) as client:
        outputs = []

        def is_warned() -> bool:
            push(client)
            outputs.append(capfd.readouterr().err)
            return "the history cannot be written for now" in "".join(outputs)

        eventually(is_warned)
        (tmp_path / "state").unlink()
        eventually(lambda: push(client) or (state_directory()).is_dir())
        push_until_told(client, job_name, 3)
        job.check()


def test_a_file_that_may_not_grow(job_name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Check a full disk: whole lines stay, and training continues."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with daemon(job_name, tensors=TENSORS, history=True) as job, Client(job_name) as client:
            push_until_told(client, job_name, 1)
            path = Path(status(job_name)["history"])
            for pid in eventually(lambda: _writers(job_name)):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
            outputs = []

            def is_warned() -> bool:
                push(client)
                outputs.append(capfd.readouterr().err)
                return "the history cannot be written for now" in "".join(outputs)

            eventually(is_warned)
            assert path.read_bytes().endswith(b"\n")
            for pid in _writers(job_name):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
            push_until_told(client, job_name, 4)
            job.check()
    finally:
        signal.signal(signal.SIGXFSZ, before)


def test_a_killed_writer_is_replaced_and_loses_no_job(job_name: str) -> None:
    with daemon(job_name, tensors=TENSORS, history=True) as job, Client(job_name) as client:
        push_until_told(client, job_name, 1)
        for pid in eventually(lambda: _writers(job_name)):
            os.kill(pid, signal.SIGKILL)
        push(client, 50)
        job.check()
    assert lines(job_name)


def test_none_is_kept_if_that_is_asked(cli: Cli, job_name: str) -> None:
    with daemon(job_name, tensors=TENSORS, history=False), Client(job_name) as client:
        push(client)
        assert "keeps no history (history = false" in cli("history", job_name).error
    assert not state_directory().exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["history", "no-such-job"], "is not running and has left no history in"),
        (["history", "./no.sock"], "no job is there"),
        (["history", "gone.jsonl"], "there is no history yet"),
        (["plot", "no-such-job"], "is not running and has left no history in"),
        (["plot", "gone.jsonl", "--out", "x.png"], "give a name that ends in .svg"),
        (["plot", "empty.jsonl"], "there is nothing to draw yet"),
        (["plot", ""], "job name ''"),  # of a variable that is not set, not this directory
    ],
)
def test_what_cannot_be_shown(words: list[str], why: str, cli: Cli) -> None:
    (cli.directory / "empty.jsonl").write_text("")
    assert why in cli(*words).error


def test_the_picture_of_a_directory_has_its_name(cli: Cli) -> None:
    point = {"time": 1.0, "version": 1, "samples": 3, "loss": 1.0}
    (cli.directory / "history.jsonl").write_text(f"{json.dumps(point)}\n")
    assert cli("plot", ".").out == f"wrote {cli.directory.resolve().name}-history.svg\n"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    from gadei_ps.errors import UsageError
    from gadei_ps.monitoring.series import plot

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"plot needs matplotlib: pip install 'gadei-ps\[plot\]'"):
        plot([{"time": 1.0, "version": 1, "samples": 3, "loss": 1.0}], "demo")


def test_each_named_value_has_a_panel() -> None:
    from gadei_ps.monitoring.series import plot

    point = {"samples": 3, "samples_per_s": 1.0, "loss": 1.0, "reported": {"f1": 0.5, "cost_$": 2}}
    old = [{"time": 999.0, "version": 0} | point]  # by a release without the queue
    assert "<!-- queue -->" not in plot(old, "demo")
    point |= {"queue": 2}
    points = [{"time": 1000.0 + at, "version": at} | point for at in range(3)]
    measured = {"time": 1003.0, "version": 3, "measured": {"epoch": 1, "accuracy": 0.5}}
    picture = plot([*points, measured], "demo")
    for name in ("loss of the learners", "samples/s", "queue", "f1", "cost_$", "accuracy"):
        assert f"<!-- {name} -->" in picture
    assert "<!-- epoch -->" not in picture


def test_only_points_that_are_few_have_marks() -> None:
    """A measured value has few points, one that is reported with each gradient thousands."""
    from gadei_ps.monitoring.series import plot

    point = {"samples": 3, "loss": 1.0, "reported": {"f1": 0.5}}
    points = [{"time": 1000.0 + at, "version": at} | point for at in range(300)]
    few, many = (plot(points[:count], "demo").count("<use ") for count in (50, 300))
    assert few > many  # ticks are marks, too


def test_values_that_are_too_large_are_not_drawn() -> None:
    from gadei_ps.monitoring.series import plot

    point = {"time": 1.0, "version": 1, "samples": 3, "loss": 1e308, "reported": {"cost": -1e308}}
    assert "<!-- cost -->" in plot([point], "diverged")
