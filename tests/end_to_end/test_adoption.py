"""State that the next watchdog of a job finds, and what it does with it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from shell import Cli, is_running
from support import (
    Child,
    config,
    eventually,
    gone,
    learner,
    live_weights,
    quick,
    segments,
    status,
)
from support.quick import fork_quickly
from support.supervised import (
    TENSORS,
    TOML,
    VALUES,
    again,
    call,
    gradient_of,
    one_at,
    settled,
    team,
    tell,
)

from gadei_ps.errors import JobStopped
from gadei_ps.job import paths, recorded
from gadei_ps.job.in_process import JOB_VARIABLE
from gadei_ps.learners.attach import LEARNER_VARIABLE
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout, presence, segment, shm
from gadei_ps.storage.checkpoint import newest
from gadei_ps.watchdog import restart, supervisor
from gadei_ps.watchdog.serve_options import Options


def test_a_job_is_adopted(cli: Cli, job_name: str) -> None:
    """Adopt it with its history: learners that left are removed, the others stay attached."""
    watchdog = cli.serve(job_name, "standby = false\n" + TOML)
    with team(job_name, 4) as (stays, leaves, dies, dead):
        for child in (stays, leaves, dies, dead):
            call(child, "push", gradient_of(np.ones(VALUES, np.float32)))
            call(child, "wait_applied")
        dead.kill()
        eventually(lambda: status(job_name)["learner_deaths"] == 1)
        assert call(stays, "set_work", 10, 1, 1) is None
        before = status(job_name)
        watchdog.signal(signal.SIGKILL)
        call(stays, "push", gradient_of(np.ones(VALUES, np.float32)))
        call(stays, "wait_applied")
        call(leaves, "detach")
        dies.kill()

        watchdog = again(cli, job_name)
        assert "adopted" in watchdog.err
        eventually(lambda: [row["pid"] for row in status(job_name)["learners"]] == [stays.pid])
        now = status(job_name)
        for name in ("job_id", "server_pid", "server_generation", "started", "model"):
            assert now[name] == before[name], name
        assert now["version"] == now["gradients_applied"] == 5
        assert now["watchdog_starts"] == 2
        assert now["watchdog_pid"] == watchdog.pid
        assert now["server_deaths"] == 0
        # The learner speaks with the new one.
        assert call(stays, "set_work", 10, 1, 1) is None
        assert call(stays, "set_work", 11, 1, 1).startswith("ControlError")
        assert isinstance(call(stays, "take_batch"), int)
        call(stays, "push", gradient_of(np.ones(VALUES, np.float32)))
        call(stays, "detach")
        eventually(lambda: learner(job_name, stays.pid) is None)
        settled(job_name)
    # And so do others.
    with Client(job_name) as client:
        client.push(gradient_of(np.ones(VALUES, np.float32)))
        client.wait_applied()
        assert client.current_version == 7


def test_a_launched_learner_waits_for_the_next_watchdog(
    cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = cli.serve(job_name, TOML)
    monkeypatch.setenv(JOB_VARIABLE, str(paths.socket_path(job_name)))
    monkeypatch.setenv(LEARNER_VARIABLE, "0")
    watchdog.signal(signal.SIGKILL)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Client)
        again(cli, job_name)
        with joining.result() as client:
            client.push(gradient_of(np.ones(VALUES, np.float32)))
            client.wait_applied()
            assert client.current_version == 1


def test_another_configuration_is_refused(cli: Cli, job_name: str) -> None:
    watchdog = cli.serve(job_name, "standby = false\n" + TOML)
    with team(job_name, 1) as (child,):
        call(child, "push", gradient_of(one_at(0)))
        call(child, "wait_applied")
        server = status(job_name)["server_pid"]
        watchdog.signal(signal.SIGKILL)
        file = cli.directory / f"{job_name}.toml"
        file.write_text("standby = false\n" + TOML.replace("1.0", "0.5"))
        refused = cli("serve", file)
        message = refused.error
        assert refused.code == 2, "another try would be refused as well"
        assert "with another optimizer:" in message
        assert "--fresh" in message
        call(child, "push", gradient_of(one_at(0)))
        assert call(child, "wait_applied") is None, "the job continues as it is"
        # What does not change what is computed may change.
        file.write_text("standby = false\nwhen_idle = 'stop'\n[checkpoint]\nevery_s = 0\n" + TOML)
        watchdog = again(cli, job_name)
        assert status(job_name)["server_pid"] == server
        watchdog.signal(signal.SIGKILL)

        file.write_text("standby = false\n" + TOML.replace("1.0", "0.5"))
        again(cli, job_name, "--fresh")
        assert gone(server)
        assert status(job_name)["version"] == 0


def test_a_stop_is_finished_by_the_next(cli: Cli, job_name: str) -> None:
    """Finish with the last checkpoint, which the first watchdog did not live to make. The job then
    starts again from the job file."""
    text = "standby = false\n[checkpoint]\n" + TOML
    watchdog = cli.serve(job_name, text)
    with team(job_name, 1) as (child,):
        call(child, "push", gradient_of(one_at(0)))
        call(child, "wait_applied")
        before = status(job_name)
        stop = cli.start("stop", job_name)
        eventually(lambda: status(job_name)["phase"] == "draining")
        watchdog.signal(signal.SIGKILL)
        stop.wait()
        (cli.directory / f"{job_name}.toml").write_text(text.replace("1.0", "0.5"))
        watchdog = again(cli, job_name)
        assert "finishing the stop" in watchdog.err
        assert call(child, "push", gradient_of(one_at(0))).startswith("JobStopped")
    eventually(lambda: " ready " in watchdog.err, what=lambda: watchdog.err)
    now = status(job_name)
    assert (now["version"], now["checkpoint_version"]) == (1, 1)
    assert now["job_id"] != before["job_id"]
    assert now["learners"] == []
    with Client(job_name) as client:
        client.push(gradient_of(one_at(0)))
        client.wait_applied()
    np.testing.assert_array_equal(live_weights(job_name)[:2], [-1.5, 0])


def test_a_job_without_a_watchdog_is_ended(cli: Cli, job_name: str) -> None:
    """End it as its watchdog would have: all published gradients are in the last checkpoint."""
    watchdog = cli.serve(job_name, "standby = false\n[checkpoint]\n" + TOML)
    with team(job_name, 1) as (child,):
        call(child, "push", gradient_of(one_at(0)))
        call(child, "wait_applied")
        server = status(job_name)["server_pid"]
        assert "is running already" in cli("serve", "--finish", f"{job_name}.toml").error
        assert not gone(server)
        watchdog.signal(signal.SIGKILL)
        call(child, "push", gradient_of(one_at(0)))
        ended = cli("serve", "--finish", f"{job_name}.toml")
        assert ended.code == 0
        assert call(child, "push", gradient_of(one_at(0))).startswith("JobStopped")
    assert gone(server)
    assert not segments(job_name)
    assert "version=2" in ended.err
    nothing = cli("serve", "--finish", f"{job_name}.toml")
    assert nothing.code == 0
    assert not segments(job_name)


@pytest.mark.parametrize("mistake", ["typo", "too deep", "removed", "another rate"])
def test_no_mistake_in_a_job_file_keeps_a_job_from_its_end(
    mistake: str, cli: Cli, job_name: str, tmp_path: Path
) -> None:
    """It ends with the configuration that it has, also one that it got while it ran."""
    text = f"standby = false\n[checkpoint]\ndirectory = '{tmp_path}/kept'\nevery_s = 0\n" + TOML
    watchdog = cli.serve(job_name, text)
    file = cli.directory / f"{job_name}.toml"
    file.write_text(text.replace("1.0", "0.25"))
    cli("reload", file)
    with Client(job_name) as client:
        client.push(gradient_of(one_at(0)))
        client.wait_applied()
    server = status(job_name)["server_pid"]
    watchdog.signal(signal.SIGKILL)
    if mistake == "removed":
        file.unlink()
    else:
        mistakes = {"typo": "slots = \n", "too deep": "slots = " + 10_000 * "["}
        file.write_text(mistakes.get(mistake, text))
    ended = cli("serve", "--finish", "--name", job_name, file)
    assert ended.code == 0, ended.err
    assert ("the job file cannot be used" in ended.err) == (mistake != "another rate")
    assert gone(server)
    assert not segments(job_name)
    snapshot, _, _ = newest(tmp_path / "kept")
    assert snapshot is not None
    assert (snapshot.version, snapshot.weights[0]) == (1, -0.25)
    assert snapshot.config["optimizer"]["lr"] == 0.25
    nothing = cli("serve", "--finish", "--name", job_name, file)
    assert nothing.code == 0, nothing.err


def test_memory_that_cannot_be_ended_stays_without_servers(cli: Cli, job_name: str) -> None:
    """Neither its memory nor its job file shows how it ends."""
    watchdog = cli.serve(job_name, "standby = false\n" + TOML)
    server = status(job_name)["server_pid"]
    watchdog.signal(signal.SIGKILL)
    name = shm.segment_name(job_name, "control")
    record = segment.attach(name, layout.SegmentKind.CONTROL, writable=False).view(layout.CONTROL)
    path = shm.path_of(name)
    with path.open("r+b") as raw:
        raw.seek(recorded.AT)
        raw.write(bytes(path.stat().st_size - recorded.AT))
    file = cli.directory / f"{job_name}.toml"
    own = file.read_text()
    file.write_text("slots = \n")
    refused = cli("serve", "--finish", file)
    assert refused.code == 2
    assert "its servers are ended and its memory stays" in refused.error
    assert gone(server)
    assert (record["phase"], record["stop"]) == (layout.Phase.FAILED, layout.Stop.CLOSED)
    assert segments(job_name)
    file.write_text(own.replace("1.0", "0.5"))
    assert "with another optimizer" in cli("serve", "--finish", file).error
    file.write_text(own)
    assert cli("serve", "--finish", file).code == 0
    assert not segments(job_name)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("_wait_until_serving", MemoryError(), "not enough memory"),
        ("_wait_until_serving", JobStopped("a signal has come"), "was interrupted before its last"),
        ("main_loop", OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        ("_end", MemoryError(), "not enough memory"),
    ],
)
def test_an_end_that_fails_leaves_no_server(
    where: str,
    error: Exception,
    message: str,
    cli: Cli,
    job_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    watchdog = cli.serve(job_name, "standby = false\n[checkpoint]\n" + TOML)
    with team(job_name, 1) as (child,):
        call(child, "push", gradient_of(one_at(0)))
        call(child, "wait_applied")
        server = status(job_name)["server_pid"]
        watchdog.signal(signal.SIGKILL)
        with monkeypatch.context() as failing:
            failing.setattr(supervisor.Supervisor, where, fail)
            if where == "_end":  # after another error
                failing.setattr(supervisor.Supervisor, "main_loop", fail)
            ended = cli("serve", "--finish", f"{job_name}.toml")
        assert (ended.code, message in ended.err.splitlines()[-1]) == (1, True), ended.err
        assert gone(server)
        assert call(child, "push", gradient_of(one_at(0))).startswith("Job")
    assert cli("serve", "--finish", f"{job_name}.toml").code == 0
    assert not segments(job_name)


def test_an_end_without_descriptors_leaves_no_server(cli: Cli, job_name: str) -> None:
    watchdog = cli.serve(job_name, "standby = false\n[checkpoint]\n" + TOML)
    server = status(job_name)["server_pid"]
    watchdog.signal(signal.SIGKILL)
    command = ("prlimit", "--nofile=12", sys.executable, "-m", "gadei_ps")
    ended = subprocess.run(
        [*command, "serve", "--finish", f"{job_name}.toml"],
        cwd=cli.directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "the limit of open files is 12" in ended.stderr
    assert gone(server)
    assert segments(job_name)
    assert cli("serve", "--finish", f"{job_name}.toml").code == 0


def test_an_end_at_once(cli: Cli, job_name: str) -> None:
    """The last resort of the unit: no checkpoint, no server, and all memory."""
    watchdog = cli.serve(job_name, "standby = false\n[checkpoint]\n" + TOML)
    with team(job_name, 1) as (child,):
        call(child, "push", gradient_of(one_at(0)))
        call(child, "wait_applied")
        server = status(job_name)["server_pid"]
        end = ("serve", "--finish", "--keep-memory", f"{job_name}.toml")
        assert "is running already" in cli(*end).error
        assert not gone(server)
        watchdog.signal(signal.SIGKILL)
        assert cli(*end).code == 0
        assert gone(server)
        assert call(child, "push", gradient_of(one_at(0))).startswith("JobFailed")
    again(cli, job_name)
    assert status(job_name)["version"] == 1


def test_what_no_checkpoint_took_stays(cli: Cli, job_name: str) -> None:
    """A stop whose last checkpoint fails leaves the memory, and serve continues from it."""
    watchdog = cli.serve(job_name, "standby = false\n[checkpoint]\n" + TOML)
    with team(job_name, 1) as (child,):
        call(child, "push", gradient_of(one_at(0)))
        call(child, "wait_applied")
        limit = resource.prlimit(watchdog.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(watchdog.pid, resource.RLIMIT_FSIZE, (3000, limit[1]))
        message = cli("stop", job_name).error
        assert call(child, "push", gradient_of(one_at(0))).startswith("JobStopped")
    assert "File too large" in message
    assert f"gadei-ps gc {job_name}" in message
    ended = watchdog.wait()
    assert ended.code == 3, "a service manager must not start again what was stopped"
    assert "its memory stays" in ended.err.splitlines()[-1]
    assert not presence.server_pids(job_name)
    watchdog = again(cli, job_name)
    assert status(job_name)["version"] == 1
    with Client(job_name) as client:
        client.push(gradient_of(one_at(0)))
        client.wait_applied()
    np.testing.assert_array_equal(live_weights(job_name)[:2], [-2, 0])
    assert cli("stop", job_name).code == 0
    assert not segments(job_name)


def _fail(pipe: Connection, job: str) -> None:
    """A watchdog whose waits between the starts of servers are short."""
    delay = restart.delay
    restart.delay = lambda *history: delay(*history) / 20  # type: ignore[assignment]
    with fork_quickly():
        wanted = config(job, tensors=TENSORS, standby=False)
        pipe.send(supervisor.serve(wanted, Options(quiet=True)))


def test_a_job_that_has_failed_is_adopted(
    cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that what it learned is still there after its servers died one after another."""
    die = cli.directory / "die"
    # The watchdog, a fork, inherits it.
    monkeypatch.setattr(quick, "STARTING", [*quick.STARTING, quick.servers_die_once(die)])
    watchdog = Child(_fail, job_name)
    eventually(lambda: is_running(job_name))
    with team(job_name, 1) as (child,):
        call(child, "push", gradient_of(np.ones(VALUES, np.float32)))
        call(child, "wait_applied")
        tell(child, "push", gradient_of(np.ones(VALUES, np.float32)))

        die.touch()
        for server in presence.server_pids(job_name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
        eventually(lambda: watchdog.has_sent)
        assert watchdog.receive() == 1
        watchdog.join()
    assert segments(job_name)
    assert segment.is_kept(job_name)
    die.unlink()
    (cli.directory / f"{job_name}.toml").write_text("standby = false\n" + TOML)
    cli.made(job_name)
    again(cli, job_name)
    assert status(job_name)["version"] >= 1
    settled(job_name)
    assert cli("stop", job_name).code == 0
    assert not segments(job_name)
