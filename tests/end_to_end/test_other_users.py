"""Another user of the machine: what it tries at a job of ours, and a learner of root at its job."""

from __future__ import annotations

import contextlib
import os
import pwd
import selectors
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from shell import Cli, is_running
from support import (
    Child,
    Pusher,
    config,
    daemon,
    eventually,
    gone,
    live_weights,
    segments,
    status,
)
from support.hostile import NOBODY
from support.quick import fork_quickly
from support.supervised import TENSORS, VALUES

from gadei_ps.cli import app, exits
from gadei_ps.errors import GadeiError
from gadei_ps.job.control import StopJob, ask
from gadei_ps.job.diagnosis import locked
from gadei_ps.job.lock_file import NameLock
from gadei_ps.learners.client import Client
from gadei_ps.memory import presence, segment, shm
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.watchdog import supervisor
from gadei_ps.watchdog.serve_options import Options
from gadei_ps.watchdog.sockets import ControlServer

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def _become_another() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def _push(client: Client) -> None:
    client.push({"w": np.ones(VALUES, np.float32)})


# -- a stranger at our job ------------------------------------------------------------------------


def _tries(path: Path, names: list[str], pids: list[int]) -> Iterator[Callable[[], object]]:
    """Everything that a stranger may try; each raises."""
    for name in names:
        file = shm.SHM / name[1:]
        for flags in (os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            yield lambda file=file, flags=flags: os.open(file, flags)
        yield lambda file=file: os.truncate(file, 0)
        yield lambda file=file: file.unlink()
        yield lambda file=file: file.rename(f"{file}-mine")
        yield lambda file=file: file.chmod(0o666)
        yield lambda name=name: segment.attach(name, SegmentKind.CONTROL, writable=False)
    for pid in pids:
        for number in (0, signal.SIGKILL, signal.SIGSTOP):
            yield lambda pid=pid, number=number: os.kill(pid, number)
        for what in ("mem", "maps", "fd", "map_files"):
            file = Path(f"/proc/{pid}") / what
            yield lambda file=file: list(file.iterdir()) if file.is_dir() else file.read_bytes()
    yield lambda: path.unlink()
    yield lambda: path.rename(f"{path}-mine")
    yield lambda: Client(str(path))


def _strange(pipe: Connection, path: Path, names: list[str], pids: list[int]) -> None:
    _become_another()
    done = 0
    for number, one in enumerate(_tries(path, names, pids)):
        try:
            one()
        except (OSError, GadeiError):
            done += 1
        else:
            pipe.send(f"number {number} was allowed")
            return
    pipe.send(done)
    pipe.recv()  # our runtime directory and its socket are open to everybody now
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(path))
        with contextlib.suppress(OSError):
            raw.sendall(b"\x10\0\0\0" + b"x" * 16)
        try:
            answer = raw.recv(100)
        except ConnectionResetError:
            answer = b""
        pipe.send(answer)


def test_a_stranger_can_do_nothing(job_name: str, runtime_dir: Path) -> None:
    with daemon(job_name, tensors=TENSORS, standby=True):
        one = Pusher(job_name, _push)
        now = status(job_name)
        pids = [now["watchdog_pid"], now["server_pid"], one.child.pid]
        path = runtime_dir / f"{job_name}.sock"
        names = segments(job_name)
        assert len(names) == 4
        child = Child(_strange, path, names, pids)
        assert child.receive() == len(list(_tries(path, names, pids)))
        runtime_dir.chmod(0o777)
        path.chmod(0o777)
        child.send()
        assert child.receive() == b"", "it is refused without a word"
        child.join()
        runtime_dir.chmod(0o700)
        pushed = one.published
        eventually(lambda: one.published > pushed + 20)
        one.kill()
        eventually(lambda: not status(job_name)["learners"])
        end = status(job_name)
        assert (end["server_deaths"], end["learner_deaths"]) == (0, 1)
        np.testing.assert_array_equal(live_weights(job_name)[:VALUES], -one.published)


# -- root at another user's job -------------------------------------------------------------------


def _serve(pipe: Connection, job: str, runtime: Path) -> None:
    os.environ |= {"GADEI_PS_RUNTIME_DIR": str(runtime), "GADEI_PS_STATE_DIR": str(runtime)}
    wanted = config(job, tensors=TENSORS, standby=True)
    with fork_quickly():  # the other user may not read our cache of compiled code
        _become_another()
        pipe.send(supervisor.serve(wanted, Options(fresh=True, quiet=True)))


@pytest.fixture
def runtime() -> Iterator[Path]:
    """The other user's runtime directory."""
    made = Path(tempfile.mkdtemp(prefix="gps-", dir="/tmp"))
    os.chown(made, NOBODY, NOBODY)
    yield made
    shutil.rmtree(made)


def test_root_trains_at_another_users_job(job_name: str, runtime: Path) -> None:
    """Train through a death of the server and of the learner, as at a job of its own."""
    path = str(runtime / f"{job_name}.sock")
    watchdog = Child(_serve, job_name, runtime)
    try:
        eventually(lambda: is_running(path) or not watchdog.alive)
        assert status(path)["watchdog_pid"] == watchdog.pid
        with Client(path) as client:
            assert client.place.weights.owner == NOBODY
            gradient = {"w": np.ones(VALUES, np.float32)}
            client.push(gradient)
            client.wait_applied()
            next_ = eventually(lambda: status(path)["standby_pid"])
            os.kill(status(path)["server_pid"], signal.SIGKILL)
            for _ in range(5):
                client.push(gradient)
            client.wait_applied()
            eventually(lambda: status(path)["server_pid"] == next_)
            np.testing.assert_array_equal(client.weights["w"], -6)
        dies = Child(_dies_at, path)
        assert dies.receive() == "pushed"
        dies.kill()
        eventually(lambda: status(path)["learner_deaths"] == 1)
        eventually(lambda: status(path)["version"] == 7)
        ask(path, StopJob())
        assert watchdog.receive() == 0
    finally:
        watchdog.kill()
    assert gone(watchdog.pid)
    assert not [one for one in presence.find() if one.job == job_name]


def test_root_looks_at_another_users_job(cli: Cli, job_name: str, runtime: Path) -> None:
    """Check that root may do all but leave files of root in its runtime directory."""
    there = {"GADEI_PS_RUNTIME_DIR": str(runtime)}
    watchdog = Child(_serve, job_name, runtime)
    try:
        path = runtime / f"{job_name}.sock"
        eventually(lambda: is_running(str(path)) or not watchdog.alive)
        hint = cli("status", job_name).error
        assert f"user {pwd.getpwuid(NOBODY).pw_name}" in hint
        assert f"GADEI_PS_RUNTIME_DIR={runtime}" in hint
        assert cli("status", job_name, "--json", **there).json["watchdog_pid"] == watchdog.pid
        found = cli("ls", "--json", **there).json["jobs"]
        (job,) = (one for one in found if one["name"] == job_name)  # a test beside has one, too
        assert (job["state"], job["watchdog_pid"]) == ("running", watchdog.pid)
        assert job["shared_bytes"] > 0
        exported = cli("export", job_name, "out.npz", "--json", **there).json
        assert exported["from"] == f"memory of job {job_name}"
        (cli.directory / f"{job_name}.toml").write_text("standby = false\n")
        for command in (("serve", f"{job_name}.toml"), ("gc", job_name)):
            assert "sudo -u" in cli(*command, **there).error
        left = {one.name for one in runtime.iterdir() if one.stat().st_uid == os.getuid()}
        assert not left, "files of root"
        assert {path.name, f"{job_name}.lock"} <= {one.name for one in runtime.iterdir()}
        assert cli("stop", job_name, **there).code == 0
        assert watchdog.receive() == 0
    finally:
        watchdog.kill()


def _ends_without_removing(pipe: Connection, runtime: Path) -> None:
    os.environ["GADEI_PS_RUNTIME_DIR"] = str(runtime)
    _become_another()
    lock = NameLock("a-job")
    with selectors.DefaultSelector() as selector:
        path = runtime / "a-job.sock"
        server = ControlServer(path, selector, lambda *_: None, lambda _: None)
        runtime.chmod(0o500)
        server.shut_down()
    lock.release()
    pipe.send(locked(runtime / "a-job.lock"))


def test_a_runtime_directory_that_cannot_be_written_any_more(runtime: Path) -> None:
    """The end of a watchdog still removes the memory, and frees the name."""
    assert Child(_ends_without_removing, runtime).receive() is False


ONCE = (
    "import os, numpy as np\n"
    "from gadei_ps.learners.client import Client\n"
    "with Client(os.environ['GADEI_PS_JOB']) as client:\n"
    "    client.push(np.ones(client.model.elements, np.float32))\n"
)


def test_root_acts_on_another_users_job(cli: Cli, job_name: str, runtime: Path) -> None:
    """Use its name with its runtime directory, or its socket alone."""
    there = {"GADEI_PS_RUNTIME_DIR": str(runtime)}
    learner = ("--json", "--device", "host", "--", sys.executable, "-c", ONCE)
    watchdog = Child(_serve, job_name, runtime)
    try:
        path = str(runtime / f"{job_name}.sock")
        eventually(lambda: is_running(path) or not watchdog.alive)
        for command in (("attach", job_name), ("run", job_name), ("run", path)):
            done = cli(*command, *learner, **({} if path in command else there))
            assert (done.code, done.json["gradients_applied"]) == (0, 1), done
        file = cli.directory / "trace.csv"
        recorded = cli("trace", job_name, "--for", "1ms", "--out", file, "--json", **there)
        assert recorded.json["file"] == str(file)
        assert cli("set", job_name, "sync=ssp:2", "--json", **there).json["changed"]
        assert cli("gc", job_name, "--dry-run", "--json", **there).json["removed"] == []
        hit = ("--targets", "server", "--every", "10ms", "--for", "100ms")
        assert cli("chaos", job_name, *hit, "--json", **there).code == 0
        before = eventually(lambda: (now := status(path))["standby_pid"] and now)
        killed = cli("kill", job_name, "--server", "--json", **there).json
        assert killed["pid"] == before["server_pid"]
        with Client(path) as client:  # what the other user's memory names is not hit for that
            refused = cli("kill", path, "--learner", client.row).error
            assert f"process {os.getpid()}, the learner, is not of the job's user" in refused
        cli("kill", path, "--watchdog", "--signal", "TERM")
        assert watchdog.receive() == 0
    finally:
        watchdog.kill()


def _dies_at(pipe: Connection, path: str) -> None:
    client = Client(path)
    _push(client)
    pipe.send("pushed")
    pipe.recv()


def _finishes(pipe: Connection, job: str, file: Path) -> None:
    _become_another()
    pipe.send(exits.execute(app.command_tree, ["serve", "--finish", "--name", job, str(file)]))


def test_a_job_file_that_its_user_cannot_read(
    job_name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It keeps no job from its end; there is nothing to be ended here."""
    directory = Path(tempfile.mkdtemp(prefix="gps-", dir="/tmp"))
    try:
        os.chown(directory, NOBODY, NOBODY)
        monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(directory))
        file = directory / f"{job_name}.toml"
        file.write_text("")
        file.chmod(0o600)
        with fork_quickly():
            child = Child(_finishes, job_name, file)
        assert child.receive() == 0, capfd.readouterr().err
        child.join()
    finally:
        shutil.rmtree(directory)
