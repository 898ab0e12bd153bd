"""Curves of a history: calls of the libraries, continued runs, and names."""

from __future__ import annotations

import os
import selectors
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support import config

from gadei_ps.errors import UsageError
from gadei_ps.job import sync_change
from gadei_ps.job.config import LIBRARIES, load, with_overrides
from gadei_ps.monitoring import curves
from gadei_ps.monitoring.curves import Writer, tagged
from gadei_ps.monitoring.following import Follower
from gadei_ps.storage.history_file import line
from gadei_ps.watchdog import monitors, settings
from gadei_ps.watchdog.durations import MOST_MONITORS
from gadei_ps.watchdog.monitors import Monitors
from gadei_ps.watchdog.script import Script

POINT = {"samples": 3, "samples_per_s": 1.5, "loss": 2.0, "staleness": None, "learners": 2}


def lines(*versions: int, begin: float = 1000.0) -> list[dict[str, Any]]:
    return [{"time": begin + at, "version": one} | POINT for at, one in enumerate(versions)]


def write(path: Path, *found: dict[str, Any]) -> None:
    made = path.with_suffix(".tmp")
    made.write_bytes(b"".join(map(line, found)))
    made.rename(path)


class Recorded:
    """A sink that records its run and what is written."""

    made: list[Recorded]

    def __init__(self, where: str, name: str, version: str) -> None:
        self.where, self.name, self.version = where, name, version
        self.lines: list[tuple[int, dict[str, float], str]] = []
        Recorded.made.append(self)

    @property
    def versions(self) -> list[int]:
        return [version for version, _, _ in self.lines]

    def write(self, line: curves.Line, values: dict[str, float], event: str) -> None:
        self.lines.append((line["version"], values, event))

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Recorded, "made", [], raising=False)
    monkeypatch.setattr(curves, "SINKS", {"tensorboard": Recorded})
    return tmp_path / "history.jsonl"


def writer(history: Path, begun: float = 0.0) -> Writer:
    return Writer("no-such-job", history, "tensorboard", "runs", begun)


def test_names() -> None:
    assert tagged(lines(1)[0]) == {"loss/train": 2.0, "samples_per_second": 1.5, "learners": 2.0}
    assert tagged({"samples": 0, "samples_per_s": 0.0, "learners": 1}) == {"learners": 1.0}
    measured = {"epoch": 1, "accuracy": 0.5, "validation_loss": 0.25}
    assert tagged({"measured": measured}) == {"accuracy": 0.5, "loss/held_out": 0.25}
    assert tagged({"event": "attach", "learners": 1}) == {}
    assert tagged(lines(1)[0] | {"reported": {"f1": 1}})["f1"] == 1.0


def test_a_reported_value_with_the_name_of_the_jobs_own() -> None:
    """Keep the job's own, except the learning rate."""
    given = {"loss/train": 7, "samples_per_second": 8, "learning_rate": 9, "loss/held_out": 0.5}
    found = tagged(lines(1)[0] | {"learning_rate": 0.1, "reported": given})
    assert (found["loss/train"], found["samples_per_second"]) == (2.0, 1.5)
    assert (found["learning_rate"], found["loss/held_out"]) == (9.0, 0.5)
    assert tagged(lines(1)[0] | {"learning_rate": 0.1})["learning_rate"] == 0.1


def test_a_reported_loss_is_another_curve() -> None:
    given = tagged(lines(1)[0] | {"reported": {"loss": 7, "queue": 8}})
    assert (given["loss/train"], given["reported/loss"], given["reported/queue"]) == (2.0, 7.0, 8.0)


def test_a_run_begins_with_its_first_point(history: Path) -> None:
    one = writer(history)
    assert not one.write()
    attached = {"time": 999.0, "version": 0, "event": "attach", "learner": 0, "pid": 7}
    write(history, attached)
    assert not one.write() and not Recorded.made
    write(history, attached, *lines(5, 9))
    assert one.write()
    (sink,) = Recorded.made
    assert sink.name == sink.version and sink.name.startswith("no-such-job-")
    assert sink.versions == [0, 5, 9]
    assert sink.lines[0][1:] == ({}, "learner 0 attached (pid 7)")
    write(history, *lines(5, 9, 12))  # thinned out
    assert one.write() and not one.write()
    assert sink.versions == [0, 5, 9, 12] and len(Recorded.made) == 1


def test_it_waits_for_the_history_of_its_job(history: Path) -> None:
    """Write nothing of the job before, whose history is there until the first line."""
    one = writer(history, 2000.0)
    write(history, *lines(5, 9))
    assert not one.write() and not Recorded.made
    write(history, *lines(3, 4, begin=2001.0))
    assert one.write() and Recorded.made[0].versions == [3, 4]


def test_it_reads_an_old_history_once(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []

    def follower(path: Path) -> Follower:
        reads.append(path)
        return Follower(path)

    one = writer(history, 2000.0)
    monkeypatch.setattr(curves, "Follower", follower)
    write(history, *lines(5, 9))
    assert not any(one.write() for _ in range(3))
    assert len(reads) == 1
    with history.open("ab") as file:
        file.write(line(lines(3, begin=2001.0)[0]))
    os.utime(history, (1500.0, 1500.0))  # by the clock of a file server
    assert one.write() and len(reads) == 2


def test_another_process_writes_all_of_it_again(history: Path) -> None:
    write(history, *lines(5, 9))
    writer(history).write()
    restored = {"time": 1002.0, "version": 6, "event": "restored"}
    write(history, *lines(5, 9), restored, *lines(7, 8, begin=1003.0))
    writer(history, 1002.0).write()
    first, second = Recorded.made
    assert second.name == first.name
    assert second.version == f"{first.name}-6"
    assert second.versions == [5, 6, 7, 8]
    assert second.lines[1][2] == "continues from the checkpoint of version 6"


# -- libraries that are too large for a test ------------------------------------------------------


class Calls:
    """An object that records the calls of its methods, and returns the values that are given."""

    def __init__(self, **returns: Any) -> None:
        self._returns = returns
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.calls.append((name, given, named))
            return self._returns.get(name)

        return call


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(info=SimpleNamespace(run_id="new"))
    there = SimpleNamespace(info=SimpleNamespace(run_id="old"))
    client = Calls(create_experiment="3", create_run=made, search_runs=[])
    uris: list[str] = []

    def connect(*, tracking_uri: str) -> Calls:
        uris.append(tracking_uri)
        return client

    entities = SimpleNamespace(Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=connect))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    sink = curves._MLflow(str(tmp_path / "flow"), "a-1", "a-1")
    assert uris == [f"sqlite:///{tmp_path}/flow/mlflow.db"] and (tmp_path / "flow").is_dir()
    assert (
        "create_experiment",
        ("gadei-ps", f"file://{tmp_path}/flow/artifacts"),
        {},
    ) in client.calls
    assert ("create_run", ("3",), {"run_name": "a-1"}) in client.calls
    for version in range(1500):
        sink.write({"time": 1.5, "version": version}, {"loss/train": 2.0}, "an event")
    sink.flush()
    sent = [named["metrics"] for name, given, named in client.calls if name == "log_batch"]
    assert [len(one) for one in sent] == [1000, 500]
    assert sent[0][0] == ("loss/train", 2.0, 1500, 0)
    names = ("a//b", "top/", "a/../b", "a/..", "a/./b", "a/../../b", "loss/train")
    sink.write({"time": 1.5, "version": 1}, dict.fromkeys(names, 1.0), "")
    sink.flush()
    sent = client.calls[-1][2]["metrics"]
    assert [one[0] for one in sent] == ["a/b", "top", "b", "_", "a/b", "b", "loss/train"]
    sink.close()
    assert client.calls[-1] == ("set_terminated", ("new",), {})

    client._returns |= {
        "search_runs": [there],
        "get_experiment_by_name": SimpleNamespace(experiment_id="3"),
    }
    curves._MLflow("http://127.0.0.1:1", "a-1", "a-1")
    assert uris[-1] == "http://127.0.0.1:1"
    assert client.calls[-1] == ("update_run", ("old",), {"status": "RUNNING"})
    curves._MLflow("http://127.0.0.1:1", "a-1", "a-1-7")
    searched = [given[1] for name, given, _ in client.calls if name == "search_runs"]
    assert searched[-1] == "attributes.run_name = 'a-1-7'"


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Calls()
    library = Calls(init=run, Settings="how")
    monkeypatch.setitem(sys.modules, "wandb", library)
    sink = curves._WandB(str(tmp_path / "w"), "a-1", "a-1")
    name, _, named = library.calls[-1]
    assert name == "init" and (named["mode"], named["id"]) == ("offline", "a-1")
    assert (tmp_path / "w").is_dir() and named["dir"] == str(tmp_path / "w")
    sink.write({"time": 1.5, "version": 7}, {"loss/train": 2.0}, "")
    assert run.calls[-1] == ("log", ({"loss/train": 2.0, "version": 7},), {})
    sink.write({"time": 1.5, "version": 8}, {}, "checkpoint of version 8")
    assert run.calls[-1] == ("log", ({"event": "checkpoint of version 8", "version": 8},), {})
    sink.flush()
    sink.close()
    assert run.calls[-1][0] == "finish"


# -- where they are written -----------------------------------------------------------------------


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "jobs" / "demo.toml"
    file.parent.mkdir()
    file.write_text('[curves]\ntensorboard = "a/b"\nmlflow = "flow"\n')
    wanted = load(file)
    there = {"tensorboard": f"{file.parent}/a/b", "mlflow": f"{file.parent}/flow"}
    assert wanted.curves.places() == there
    monkeypatch.chdir(tmp_path)
    given = with_overrides(wanted, {"mlflow": "http://a:1", "wandb": Path("w")}, "test")
    more = {"mlflow": "http://a:1", "wandb": f"{tmp_path}/w"}
    assert given.curves.places() == there | more
    assert with_overrides(wanted, {}, "test").curves == wanted.curves
    with pytest.raises(UsageError, match="--wandb: '~no-such-user/w' names no user"):
        with_overrides(wanted, {"wandb": "~no-such-user/w"}, "test")
    file.write_text('[curves]\nwandb = "~no-such-user/w"\n')
    with pytest.raises(UsageError, match=r"demo.toml: curves.wandb: '~no-such-user/w' names"):
        load(file)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("databricks", "Databricks is not supported"),
        ("databricks://profile", "Databricks is not supported"),
        ("file:mlruns", "'file:mlruns' is relative"),
        ("file:/tmp/mlruns", ""),
        ("file:///tmp/mlruns", ""),
    ],
)
def test_uris_of_mlflow(place: str, problem: str) -> None:
    wanted = config("demo", history=True)
    if problem:
        with pytest.raises(UsageError, match=f"--mlflow: {problem}"):
            with_overrides(wanted, {"mlflow": place}, "test")
    else:
        assert with_overrides(wanted, {"mlflow": place}, "test").curves.mlflow == place


def test_a_reload_keeps_the_curves_of_the_running_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept any [curves] in the file: those that run may also come from a command line."""
    monkeypatch.setattr(sync_change, "requested", lambda _: 0)
    monkeypatch.setattr(sync_change, "text", lambda *_: "asp")
    running = config("demo", history=True, curves={"tensorboard": "/a", "mlflow": "/b"})
    tables: list[dict[str, str]] = [{}, {"tensorboard": "/a"}, {"wandb": "/c"}]
    for table in tables:
        made = config("demo", history=True, curves=table, hang_s=7.0)
        mapping = made.model_dump(exclude_unset=True)
        new, changed = settings.changed(mock.Mock(), running, mapping, Script())
        assert new.curves == running.curves and changed == {"hang_s": 7.0}


def started(program: str, warnings: list[str], selector: selectors.BaseSelector) -> Monitors:
    logged = SimpleNamespace(warning=warnings.append)
    with mock.patch.object(monitors, "commands", lambda _: {"curves.x": ["sh", "-c", program]}):
        made = Monitors(config("demo"), selector, logged)
    made.look(1.0)
    return made


@pytest.mark.parametrize(
    ("program", "wait_s", "warning"),
    [
        ("cat; exit", 60.0, []),
        ("cat; echo no server; exit 1", 60.0, ["curves.x: no server; training continues"]),
        ("exec sleep 1000", 0.0, ["curves.x: killed before all was written"]),
    ],
)
def test_the_end_of_a_job_waits_for_them(program: str, wait_s: float, warning: list[str]) -> None:
    warnings: list[str] = []
    with selectors.DefaultSelector() as selector:
        made = started(program, warnings, selector)
        made.finish()
        made.end(wait_s)
        assert not selector.get_map()
    assert warnings == warning


def test_one_process_for_each_program() -> None:
    """A program that fails stops no other."""
    made = config("demo", history=True, curves={"tensorboard": "/a", "mlflow": "/b"})
    found = monitors.commands(made)
    assert [(name, one[-3:-1]) for name, one in found.items()] == [
        ("curves.tensorboard", ["tensorboard", "/a"]),
        ("curves.mlflow", ["mlflow", "/b"]),
    ]
    assert len(LIBRARIES) + 1 == MOST_MONITORS


def test_they_need_a_history() -> None:
    with pytest.raises(UsageError, match="curves are made of the history"):
        config("demo", curves={"tensorboard": "runs"}, history=False)
