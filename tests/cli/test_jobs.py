"""Serving, watching, stopping and cleaning up."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import support
from shell import FOREVER, Cli, is_running, learning
from support import quick

from gadei_ps import homes
from gadei_ps.commands import jobs
from gadei_ps.dashboard.data import Watcher
from gadei_ps.errors import JobNotFound
from gadei_ps.job import lock_file, paths, service
from gadei_ps.job.config import state_directory
from gadei_ps.learners.client import Client
from gadei_ps.memory import presence

pytestmark = pytest.mark.usefixtures("compiled")

MODEL = "[[tensors]]\nname = 'w'\nshape = [100]\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_cleanly(cli: Cli, job_name: str, number: int, interpreters: None) -> None:
    daemon = cli.serve(job_name, MODEL)
    assert "ready" in daemon.err
    assert support.segments(job_name)
    (server,) = presence.server_pids(job_name)
    mapped = Path(f"/proc/{server}/maps").read_text()
    assert "libllvmlite" in mapped
    assert "/numba/" not in mapped, "its code is kept"
    result = daemon.signal(number)
    assert (result.code, result.out) == (0, "")
    assert not support.segments(job_name)
    assert not list(cli.directory.glob("*.sock"))


def test_the_limit_of_open_files_is_named(cli: Cli, job_name: str) -> None:
    """A watchdog without a descriptor for the next server starts it as soon as it has one."""
    daemon = cli.serve(job_name, "standby = false\n" + MODEL)
    (server,) = presence.server_pids(job_name)
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    os.kill(server, signal.SIGKILL)
    support.eventually(lambda: "cannot start a server" in daemon.err)
    assert "the limit of open files is 3: raise it (ulimit -n" in daemon.err
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
    support.eventually(lambda: presence.server_pids(job_name))
    assert daemon.signal(signal.SIGTERM).code == 0
    assert not support.segments(job_name)


def test_serve_with_json(cli: Cli, job_name: str) -> None:
    (cli.directory / "job.toml").write_text(f"name = '{job_name}'")
    daemon = cli.start("serve", "job.toml", "--json", "--json-log")
    support.eventually(lambda: is_running(job_name))
    assert cli("stop", job_name).out.startswith(f"job {job_name} has stopped: 0 gradients applied")
    result = daemon.wait()
    assert (result.code, result.json["job"]) == (0, job_name)
    assert all(line.startswith("{") for line in result.err.splitlines())


def test_status(cli: Cli, job_name: str, learner: list[str]) -> None:
    assert cli("status").out == "no job is running\n"
    assert cli("status", "--json").json == {"jobs": []}
    cli.serve(job_name)
    assert "none yet" in cli("status", job_name).out
    attached = cli.start("attach", job_name, "--", *learner, FOREVER)
    support.eventually(learning(job_name, attached, 1))
    shown = cli("status", job_name).out
    assert f"job            {job_name}, serving" in shown
    assert "8 values in 1 tensor" in shown
    assert str(attached.pid) in shown
    report = cli("status", job_name, "--json").json
    assert [one["pid"] for one in report["learners"]] == [attached.pid]
    assert [one["job"] for one in cli("status", "--json").json["jobs"]] == [job_name]
    assert job_name in cli("status").out


def test_watch(cli: Cli, job_name: str) -> None:
    assert cli("status", job_name, "--watch").code == 1
    cli.serve(job_name)
    one, everything = (cli.start("status", *job, "--watch") for job in ([job_name], []))
    for watching in (one, everything):
        support.eventually(lambda out=watching: job_name in out.out)
    cli("stop", job_name)
    assert one.wait().code == 0
    assert "has ended" in one.out
    result = everything.signal(signal.SIGINT)
    assert (result.code, result.err) == (130, "")


def test_stop_with_learners(cli: Cli, job_name: str, learner: list[str]) -> None:
    daemon = cli.serve(job_name)
    attached = cli.start("attach", job_name, "--", *learner, FOREVER)
    support.eventually(learning(job_name, attached, 1))
    report = cli("stop", job_name, "--drain", "--timeout", 30, "--json").json
    assert report["gradients_applied"] > 0
    assert not support.segments(job_name), "stop waits until the job is gone"
    assert (daemon.wait().code, attached.wait().code) == (0, 0)


def test_starting(cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "DYING_S", 0.01)  # commands are forks of this process
    go = cli.directory / "go"

    def wait(program: str) -> None:
        while program == "gadei_ps.server.manager" and not go.exists():
            time.sleep(0.01)

    monkeypatch.setattr(quick, "STARTING", [*quick.STARTING, wait])
    (cli.directory / f"{job_name}.toml").write_text("standby = false")
    daemon = cli.start("serve", f"{job_name}.toml")
    support.eventually(lambda: support.segments(job_name))
    for command in ("status", "stop"):
        assert "is starting" in cli(command, job_name).error
    go.touch()
    assert daemon.signal(signal.SIGTERM).code == 0


def test_ls(cli: Cli, job_name: str) -> None:
    assert not [one for one in cli("ls", "--json").json["jobs"] if one["name"] == job_name]
    daemon = cli.serve(job_name, MODEL)
    (job,) = (one for one in cli("ls", "--json").json["jobs"] if one["name"] == job_name)
    assert (job["state"], job["watchdog_pid"]) == ("running", daemon.pid)
    assert job["shared_bytes"] > 0
    assert abs(job["started"] - time.time()) < 600
    assert job["command"] == ""
    assert job_name in cli("ls").out


def test_job_of_another_runtime_directory(
    cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = presence.find

    def find_ours(job: str | None = None, uid: int | None = None) -> list[presence.Found]:
        return [one for one in find(job, uid) if one.job == job_name]

    # In the commands too, which are forks: dead jobs of other tests are not to be listed.
    monkeypatch.setattr(presence, "find", find_ours)
    cli.serve(job_name, MODEL)
    other = cli.directory / "other"
    found = cli("ls", "--json", GADEI_PS_RUNTIME_DIR=str(other)).json["jobs"]
    assert [one["state"] for one in found if one["name"] == job_name] == ["elsewhere"]
    views = [Watcher().look_at(job_name)]
    with monkeypatch.context() as patch:
        patch.setenv("GADEI_PS_RUNTIME_DIR", str(other))
        views.append(Watcher().look_at(job_name))
    assert [one and one.state for one in views] == ["running", "elsewhere"]
    right = f"GADEI_PS_RUNTIME_DIR={os.environ['GADEI_PS_RUNTIME_DIR']}"
    for command in ("status", "stop", "checkpoint"):
        assert right in cli(command, job_name, GADEI_PS_RUNTIME_DIR=str(other)).error
    assert not other.exists(), "who only looks makes no directory"
    refused = cli("serve", f"{job_name}.toml", GADEI_PS_RUNTIME_DIR=str(other)).error
    assert right in refused
    refused = cli("gc", job_name, "--json", GADEI_PS_RUNTIME_DIR=str(other))
    assert not refused.json["removed"]
    assert right in refused.err
    assert support.segments(job_name)
    assert f"gadei-ps stop {job_name}" in cli("gc", job_name).err
    for command in ("status", "gc --dry-run"):
        empty = cli(*command.split(), GADEI_PS_RUNTIME_DIR=str(other)).err
        assert f"({job_name}): {right} gadei-ps ls shows them" in empty
        assert f"looked in {other}, for user" in empty
    for words in (("attach", job_name, "--", "true"), ("reload", f"{job_name}.toml")):
        assert right in cli(*words, GADEI_PS_RUNTIME_DIR=str(other)).error
    assert not list(other.iterdir()), "gc leaves no lock of its own"


def test_a_job_whose_socket_and_lock_are_removed(cli: Cli, job_name: str) -> None:
    """Check what commands report until the watchdog has made both again, and then after."""
    daemon = cli.serve(job_name, MODEL)
    with support.Stopped(daemon.pid):
        for lost in (paths.socket_path(job_name), paths.lock_path(job_name)):
            lost.unlink()
            message = cli("status", job_name).error
            assert f"its socket {paths.socket_path(job_name)} is gone or replaced" in message
            assert f"gadei-ps kill {job_name} --watchdog" in message
            (job,) = (one for one in cli("ls", "--json").json["jobs"] if one["name"] == job_name)
            assert job["state"] == "silent"
    support.eventually(lambda: is_running(job_name))
    with support.Stopped(daemon.pid):
        paths.socket_path(job_name).unlink()
        paths.socket_path(job_name).touch()  # another file
        assert "is gone or replaced" in cli("status", job_name).error
    support.eventually(lambda: is_running(job_name))
    assert "is running already" in cli("serve", f"{job_name}.toml").error, "it is locked again"
    assert cli("stop", job_name).code == 0
    assert daemon.wait().code == 0
    assert daemon.err.count("made again") == 2
    assert not list(cli.directory.glob(f"{job_name}.sock"))


def test_a_job_of_the_systems_unit(
    cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Name its runtime directory in commands; in it, name the unit of an ended job. No unit is
    named where there is none."""
    jobs, system = tmp_path / "jobs", Path(os.environ["GADEI_PS_RUNTIME_DIR"])
    jobs.mkdir()
    (jobs / f"{job_name}.toml").write_text(MODEL)
    monkeypatch.setattr(homes, "JOBS", jobs)
    monkeypatch.setattr(homes, "RUNTIME", system)
    other = str(cli.directory / "other")
    by_hand = cli("status", job_name, GADEI_PS_RUNTIME_DIR=other).error
    by_hand += cli("status", job_name).error
    assert "systemctl" not in by_hand, "there are job files, but no units"
    assert service.serve(job_name) == "gadei-ps serve JOB.toml"
    (jobs / "system").mkdir()
    (jobs / "system" / "gadei-ps@.service").touch()
    monkeypatch.setattr(service, "UNITS", (jobs,))
    monkeypatch.setattr(service, "MANAGER", jobs)
    for command in ("status", "kill --server", "export"):
        verb, *options = command.split()
        options += [f"{tmp_path}/w.npz"] if verb == "export" else []
        message = cli(verb, job_name, *options, GADEI_PS_RUNTIME_DIR=other).error
        assert f"set GADEI_PS_RUNTIME_DIR={system}" in message, command
        if verb != "export":
            message = cli(verb, job_name, *options).error
            assert f"systemctl status gadei-ps@{job_name} gadei-ps-end@{job_name}" in message
    daemon = cli.serve(job_name, MODEL)
    assert daemon.signal(signal.SIGKILL).code == -signal.SIGKILL
    assert f"(systemctl start gadei-ps@{job_name})" in cli("status", job_name).error


def test_gc(cli: Cli, job_name: str, learner: list[str]) -> None:
    living, dead = f"{job_name}-living", job_name
    cli.serve(living, MODEL)
    watchdog = cli.serve(dead)
    attached = cli.start("attach", dead, "--", *learner, FOREVER)
    support.eventually(learning(dead, attached, 1))
    segments = {name for name in support.segments(dead) if f".{living}." not in name}
    support.kill_all(dead)  # first the watchdog: it would remove a dead learner's ring
    os.kill(attached.pid, signal.SIGKILL)
    assert watchdog.wait().code == attached.wait().code == -signal.SIGKILL
    states = {one["name"]: one["state"] for one in cli("ls", "--json").json["jobs"]}
    assert (states[living], states[dead]) == ("running", "stale")
    assert "gadei-ps gc" in cli("ls").out
    assert "nobody" not in cli("status", dead).error

    everything = cli("gc", "--dry-run", "--json").json
    assert dead not in {one["job"] for one in everything["removed"]}, "serve would continue with it"
    assert living not in {one["job"] for one in everything["removed"]}
    output = cli("gc", "--dry-run").err
    assert f"job {dead!r} is still in memory, but its processes are dead" in output
    assert f"job {living!r}" not in output
    wanted = cli("gc", dead, living, "--dry-run", "--json").json
    assert len(segments) == 4
    assert segments <= set(support.segments(dead)), "a dry run removes nothing"
    done = cli("gc", dead, living, "--json").json
    for result in (wanted, done):
        assert {one["job"] for one in result["removed"]} == {dead}
        paths = {f"/{one['path']}" for one in result["removed"] if one["kind"] == "segment"}
        assert paths == segments
        assert {one["kind"] for one in result["removed"]} == {"segment", "socket", "lock"}
        assert result["bytes"] == sum(one["bytes"] for one in result["removed"]) > 0
    assert not segments & set(support.segments(dead))
    assert is_running(living)
    assert cli("gc", dead, living).out == "nothing to remove\n"


def test_gc_of_old_histories(cli: Cli, job_name: str) -> None:
    """Only those of ended jobs, and not those beside checkpoints."""
    living, dead = f"{job_name}-living", f"{job_name}-dead"
    cli.serve(living, MODEL)
    state = state_directory()
    (state / dead).mkdir(parents=True)
    names = (f"{dead}.history.jsonl", f"{dead}.history.old.jsonl", f"{living}.history.jsonl")
    for path in (*(state / name for name in names), state / dead / "history.jsonl"):
        path.write_text('{"time":1,"version":1}\n')
        os.utime(path, (1, 1))
    (state / f"{job_name}-new.history.jsonl").write_text("")
    some = (dead, living, f"{job_name}-new")
    there = sorted(str(state / name) for name in names[:2])
    assert not cli("gc", *some, "--history-days", 40_000, "--json").json["removed"]
    for more in (["--dry-run"], []):
        removed = cli("gc", *some, *more, "--json").json["removed"]
        assert [(one["kind"], one["job"]) for one in removed] == [("history", dead)] * 2
        assert sorted(one["path"] for one in removed) == there
    left = {path.name for path in state.iterdir()}
    assert left >= {f"{job_name}-new.history.jsonl", names[2], dead}
    assert not left & set(names[:2])


def test_dead_job_starts_again(cli: Cli, job_name: str) -> None:
    cli.serve(job_name, MODEL)
    support.kill_all(job_name)
    daemon = cli.serve(job_name, MODEL)
    assert daemon.signal(signal.SIGTERM).code == 0


def test_orphaned(cli: Cli, job_name: str, learner: list[str]) -> None:
    """A job continues without its watchdog. It can be adopted or stopped."""
    daemon = cli.serve(job_name)
    attached = cli.start("attach", job_name, "--", *learner, FOREVER)
    support.eventually(learning(job_name, attached, 1))
    assert daemon.signal(signal.SIGKILL).code == -signal.SIGKILL

    def state() -> str:
        return next(
            one["state"] for one in cli("ls", "--json").json["jobs"] if one["name"] == job_name
        )

    assert state() == "orphaned"
    (job,) = (one for one in cli("ls", "--json").json["jobs"] if one["name"] == job_name)
    assert (job["watchdog_pid"], job["learners"]) == (None, 1)
    assert job["server_pid"] in presence.server_pids(job_name)
    assert "learner.py" in job["command"]
    assert "learner.py" in cli("ls").out
    assert "serve it again (gadei-ps serve JOB.toml)" in cli("status", job_name).error
    with pytest.raises(
        JobNotFound, match=r"lost its watchdog.* serve it again \(gadei-ps serve JOB"
    ):
        Client(job_name)
    assert not cli("gc", job_name, "--json").json["removed"]
    cli.serve(job_name)
    report = support.status(job_name)
    assert [one["pid"] for one in report["learners"]] == [attached.pid]
    assert cli("checkpoint", job_name).code == 0
    saved = support.status(job_name)["checkpoint_version"]
    support.eventually(lambda: support.status(job_name)["version"] > saved)
    assert "has a watchdog" in cli("stop", job_name, "--discard").error
    os.kill(report["watchdog_pid"], signal.SIGKILL)
    support.eventually(lambda: support.gone(report["watchdog_pid"]))
    refused = cli("stop", job_name).error
    assert f"gadei-ps stop {job_name} --discard" in refused
    assert "gadei-ps serve --finish" in refused
    stopped = cli("stop", job_name, "--discard", "--json").json
    assert stopped["gradients_applied"] >= report["version"]
    assert attached.wait().code != 0
    assert "has failed" in attached.err, "it is notified, and does not wait for another watchdog"
    assert not support.segments(job_name)


def test_silent_watchdog(cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ANSWER_TIMEOUT_S", 0.5)  # also in the commands, which are forks
    daemon = cli.serve(job_name)
    with support.Stopped(daemon.pid):
        found = cli("ls", "--json").json["jobs"]
        assert [one["state"] for one in found if one["name"] == job_name] == ["silent"]
        assert not cli("gc", job_name, "--json").json["removed"]
        assert f"gadei-ps kill {job_name} --watchdog" in cli("stop", job_name).error
