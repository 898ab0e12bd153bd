"""gadei_ps.serve(): a job that a script or a notebook serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PATIENCE_S, eventually, fork, gone, segments, status
from support.quick import QuickDaemon

import gadei_ps
from gadei_ps.commands import daemon, jobs, notebook
from gadei_ps.errors import JobFailed, JobInUse, JobNotFound, JobStopped, UsageError
from gadei_ps.job import paths
from gadei_ps.job.in_process import JOB_VARIABLE
from gadei_ps.learners.client import Client
from gadei_ps.memory import presence

W = {"w": np.zeros(10, np.float32)}
ONE = {"w": np.ones(10, np.float32)}
PLAIN: dict[str, Any] = {"lr": 1.0, "standby": False, "history": False}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork processes of jobs from this one."""
    monkeypatch.setattr(notebook, "Daemon", QuickDaemon)


def ended(job: str) -> bool:
    """Return whether nothing of the job is left."""
    return not segments(job) and not paths.socket_path(job).exists()


def pids(job: str) -> list[int]:
    """Return the pids of its watchdog and servers."""
    return [status(job)["watchdog_pid"], *presence.server_pids(job)]


# -- in this process ------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick", "runtime_dir")
def test_a_block() -> None:
    """Find the job, leave it at the end, and keep the weights; nothing else is left."""
    with gadei_ps.serve(**PLAIN) as job:
        assert job.name == f"serve-{os.getpid()}"
        assert repr(job) == f"<gadei_ps job '{job.name}': served by this process>"
        client = Client(tensors=W)
        client.wait_applied(client.push(ONE))
        child = subprocess.run(["printenv", JOB_VARIABLE], capture_output=True, text=True)
        assert child.stdout.strip() == job.socket
        report = job.status()
        assert (report["version"], len(report["learners"])) == (1, 1)
        assert report["sync"] == "asp"
    assert client.left
    assert (client.weights["w"] == -1).all(), "the memory stays as long as it is used"
    assert ended(job.name)
    assert JOB_VARIABLE not in os.environ
    assert repr(job).endswith("has ended>")
    with pytest.raises(JobNotFound):
        job.status()
    job.stop()  # once more, it does nothing
    with pytest.raises(UsageError, match=r"which job\? .* a gadei_ps.serve\(\)"):
        Client(tensors=W)


@pytest.mark.usefixtures("quick")
def test_an_exception_ends_it(job_name: str) -> None:
    with pytest.raises(ZeroDivisionError), gadei_ps.serve(job_name, **PLAIN):
        client = Client(tensors=W)
        1 / 0  # noqa: B018
    assert client.left
    assert ended(job_name)


@pytest.mark.usefixtures("quick")
def test_two_jobs(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Join the one that was served last, while it is there."""
    monkeypatch.setenv(JOB_VARIABLE, "outside")
    one, two = f"{job_name}-1", f"{job_name}-2"
    first = gadei_ps.serve(one, **PLAIN)
    with gadei_ps.serve(two, sync="bsp", **PLAIN):
        clients = [Client(tensors=W), Client(one, tensors=W)]
        assert [client.job for client in clients] == [two, one]
        with pytest.raises(JobInUse, match=f"this process serves job '{one}' already: call stop"):
            gadei_ps.serve(one, **PLAIN)
    assert [client.left for client in clients] == [True, False]
    with Client() as third:
        assert third.job == one
    first.stop()
    assert clients[1].left
    assert os.environ[JOB_VARIABLE] == "outside"
    assert ended(one)
    assert ended(two)


@pytest.mark.usefixtures("quick")
def test_the_watchdog_is_killed(job_name: str) -> None:
    """The next one adopts the job, though nobody asks for anything."""
    with gadei_ps.serve(job_name, **PLAIN) as job:
        client = Client(tensors=W)
        client.push(ONE)
        before = job.status()["watchdog_pid"]
        os.kill(before, signal.SIGKILL)
        eventually(lambda: gone(before))
        assert job.status()["watchdog_pid"] != before
        client.wait_applied(client.push(ONE))
        assert job.status()["version"] == 2


@pytest.mark.usefixtures("quick")
def test_it_outlives_the_thread_that_has_asked_for_it(job_name: str) -> None:
    made: list[notebook.ServedJob] = []
    thread = threading.Thread(target=lambda: made.append(gadei_ps.serve(job_name, **PLAIN)))
    thread.start()
    thread.join()
    with Client(tensors=W) as client:
        client.wait_applied(client.push(ONE))
    assert made[0].status()["version"] == 1
    made[0].stop()
    assert ended(job_name)


@pytest.mark.usefixtures("quick")
def test_stopped_elsewhere(job_name: str) -> None:
    """The block ends without an error, and the name is free again."""
    with gadei_ps.serve(job_name, **PLAIN) as job:
        client = Client(tensors=W)
        jobs.stop(job_name, drain=False, timeout_s=1)
        eventually(lambda: job.ended)
        with pytest.raises(JobStopped):
            client.push(ONE)
        with gadei_ps.serve(job_name, **PLAIN):
            Client(tensors=W).push(ONE)
    assert ended(job_name)


@pytest.mark.usefixtures("quick")
def test_a_job_that_has_failed(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block raises it, whether or not a learner has noticed."""
    job = gadei_ps.serve(job_name, **PLAIN)
    assert job._keeper is not None
    monkeypatch.setattr(job._keeper._daemon, "check", lambda: daemon.check_code(job_name, 1))
    eventually(lambda: job.ended)
    with pytest.raises(JobFailed, match=f"job '{job_name}' has failed"):
        job.stop()
    assert ended(job_name)


@pytest.mark.usefixtures("runtime_dir")
def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as if the user has too many processes."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    for name in ("_start_new_thread", "_start_joinable_thread"):  # of Python 3.12, 3.13
        if hasattr(threading, name):
            monkeypatch.setattr(threading, name, refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        gadei_ps.serve(**PLAIN)
    assert JOB_VARIABLE not in os.environ


def _serve_again(pipe: Connection, job: str) -> None:
    try:
        gadei_ps.serve(job, **PLAIN)
    except JobInUse as error:
        pipe.send(str(error))


@pytest.mark.usefixtures("quick")
def test_a_fork_of_the_process_that_serves(job_name: str) -> None:
    """It serves nothing itself, though it has the object."""
    with gadei_ps.serve(job_name, **PLAIN) as job, fork(1, _serve_again, job_name) as (child,):
        answer = child.receive()
        assert "this process" not in answer
        assert "is running already" in answer
        assert not job.ended


@pytest.mark.usefixtures("quick")
def test_checkpoints(job_name: str, tmp_path: Path) -> None:
    """A job with checkpoints continues from where it was; fresh=True begins from zero."""
    there = tmp_path / "saved"
    for versions, fresh in (((0, 2), False), ((2, 3), False), ((0, 1), True)):
        with gadei_ps.serve(job_name, checkpoint=there, fresh=fresh, **PLAIN) as job:
            assert job.status()["version"] == versions[0]
            with Client(tensors=W) as client:
                for _ in range(versions[1] - versions[0]):
                    client.wait_applied(client.push(ONE))
    assert ended(job_name)
    file = tmp_path / f"{job_name}.toml"
    file.write_text(f"standby = false\nhistory = false\n[checkpoint]\ndirectory = '{there}'\n")
    with gadei_ps.serve(file) as job:
        assert job.status()["version"] == 1
        job.export(tmp_path / "out.npz")
    assert (np.load(tmp_path / "out.npz")["w"] == -1).all()
    with gadei_ps.serve(file, checkpoint=None) as job:
        assert job.status()["model"] is None


@pytest.mark.usefixtures("quick")
def test_programs_as_learners(job_name: str, capfd: pytest.CaptureFixture[str]) -> None:
    program = "from gadei_ps.learners.client import Client\nprint(Client().job)"
    with gadei_ps.serve(job_name, tensors=[{"name": "w", "shape": [10]}], **PLAIN) as job:
        summary = job.run([sys.executable, "-P", "-c", program], learners=2)
        assert (summary["exit_code"], summary["learners"]) == (0, 2)
        assert capfd.readouterr().out.count(job_name) == 2
        with pytest.raises(UsageError, match="run\\(\\) has no option 'devise'"):
            job.run(["true"], device="cpu", devise="cpu")
        with pytest.raises(UsageError, match="there is no program 'nonesuch'"):
            job.run(["nonesuch"])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"job": "a b"}, "job name 'a b': use 1 to 48 letters"),
    ({"job": 5}, r"takes the job's name or its job file, not a int; the model comes from"),
    ({"job": "nonesuch.toml"}, "nonesuch.toml: No such file"),
    ({"sync": "bps"}, r"serve\(\): sync: "),
    ({"optimizer": "adma"}, r"serve\(\): optimizer.kind: "),
    ({"optimizer": {"rate": 1}}, r"serve\(\): optimizer.rate: there is no such field"),
    ({"lr": -1}, r"serve\(\): optimizer: lr"),
    ({"slot": 3}, r"serve\(\): slot: there is no such field"),
    ({"learners": 2}, r"serve\(\): learners: a table of command and count"),
    ({"checkpoint": {"every": 3}}, r"serve\(\): checkpoint.every: there is no such field"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[str(one) for one, _ in WRONG])
@pytest.mark.usefixtures("runtime_dir")
def test_bad_input(given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and nothing is started."""
    monkeypatch.setattr(notebook, "Daemon", None)
    with pytest.raises(UsageError, match=message) as error:
        gadei_ps.serve(**given)
    assert "\n" not in str(error.value)
    assert JOB_VARIABLE not in os.environ


def test_the_import_stays_cheap() -> None:
    script = "import gadei_ps, sys; assert 'serve' in dir(gadei_ps); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    loaded = set(result.stdout.split())
    assert {one for one in loaded if one.startswith("gadei_ps")} == {"gadei_ps"}
    assert not loaded & {"numpy", "pydantic", "torch", "numba"}
    with pytest.raises(AttributeError, match="module 'gadei_ps' has no attribute 'sreve'"):
        _ = gadei_ps.sreve


# -- other processes ------------------------------------------------------------------------------

SERVES = """
import os, sys, time
import numpy as np
import gadei_ps
from gadei_ps.learners.client import Client

def train(job):
    with Client(tensors={{"w": np.zeros(10, np.float32)}}) as client:
        client.wait_applied(client.push({{"w": np.ones(10, np.float32)}}))
        print("ready", flush=True)
        time.sleep(1000)

print("begins", flush=True)
with gadei_ps.serve({name!r}, standby=False, history=False, lr=1.0, {further}) as job:
    train(job)
"""


@pytest.fixture
def script() -> Iterator[Any]:
    """Start an interpreter that serves a job; return its process."""
    made: list[subprocess.Popen[str]] = []

    def start(name: str, further: str = "") -> subprocess.Popen[str]:
        text = SERVES.format(name=name, further=further)
        made.append(
            subprocess.Popen([sys.executable, "-P", "-c", text], stdout=subprocess.PIPE, text=True)
        )
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.communicate()


def heard(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"it ended: {process.wait()}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_interpreter_is_killed(job_name: str, number: int, script: Any) -> None:
    """Nothing stays behind, however it ends."""
    served = script(job_name)
    heard(served, "ready")
    others = pids(job_name)
    served.send_signal(number)
    assert served.wait(PATIENCE_S) != 0
    for pid in others:
        eventually(lambda pid=pid: gone(pid), what=str(pid))
    eventually(lambda: ended(job_name))


def test_ctrl_c_while_it_starts(job_name: str, script: Any) -> None:
    """The start ends, with what it has begun."""
    served = script(job_name)
    heard(served, "begins")
    children = f"/proc/{served.pid}/task"
    eventually(
        lambda: any(path.read_text() for path in Path(children).glob("*/children")),
        what="a watchdog",
    )
    served.send_signal(signal.SIGINT)
    assert served.wait(PATIENCE_S) != 0
    eventually(lambda: ended(job_name))


def test_a_job_that_is_kept(job_name: str, script: Any, tmp_path: Path) -> None:
    """It outlives the interpreter, is taken up again with what has changed, and is stopped."""
    served = script(job_name, "keep=True")
    heard(served, "ready")
    others = pids(job_name)
    served.kill()
    served.wait()
    eventually(lambda: not status(job_name)["learners"])
    assert pids(job_name) == others
    again = gadei_ps.serve(job_name, keep=True, standby=False, history=False, lr=0.5)
    with again as job:
        assert repr(job) == f"<gadei_ps job '{job_name}': kept>"
        with Client(tensors=W) as client:
            assert client.weights["w"][0] == -1
            client.wait_applied(client.push(ONE))
            assert client.weights["w"][0] == -1.5
        assert gadei_ps.serve(job_name, keep=True, standby=False, history=False, lr=0.5) is job
        with pytest.raises(JobInUse, match="this process serves job"):
            gadei_ps.serve(job_name, keep=True, fresh=True)
    assert pids(job_name) == others
    assert JOB_VARIABLE not in os.environ
    with pytest.raises(JobInUse, match="is running already"):
        gadei_ps.serve(job_name, **PLAIN)
    gadei_ps.serve(job_name, keep=True, standby=False, history=False, lr=0.5).stop()
    for pid in others:
        eventually(lambda pid=pid: gone(pid), what=str(pid))
    assert ended(job_name)
    assert (tmp_path / "state" / f"{job_name}.log").exists()


@pytest.mark.parametrize("keep", [True, False])
def test_a_kept_job_that_was_stopped_elsewhere(job_name: str, keep: bool) -> None:
    """The object says so, and the name is free again."""
    kept = gadei_ps.serve(job_name, keep=True, **PLAIN)
    assert not kept.ended
    jobs.stop(job_name, drain=False, timeout_s=1)
    eventually(lambda: ended(job_name))
    assert kept.ended
    assert repr(kept).endswith("has ended>")
    again = gadei_ps.serve(job_name, keep=keep, **PLAIN)
    assert again is not kept
    kept.stop()  # does nothing to the next one
    with Client(tensors=W) as client:
        client.wait_applied(client.push(ONE))
    again.stop()
    assert ended(job_name)


LEARNS = """
import time
from gadei_ps.learners.client import Client
Client()
try:
    print("learning", flush=True)
    time.sleep(1000)
except KeyboardInterrupt:
    print("saved", flush=True)
"""
RUNS = """
import sys
import gadei_ps
tensors = [{{"name": "w", "shape": [10]}}]
with gadei_ps.serve({name!r}, standby=False, history=False, tensors=tensors) as job:
    try:
        job.run([sys.executable, "-P", "-c", {program!r}], device="host")
    except KeyboardInterrupt:
        print("interrupted", job.status()["learners"], flush=True)
"""


def test_ctrl_c_reaches_learners_that_run(job_name: str) -> None:
    """They may save; the job continues."""
    text = RUNS.format(name=job_name, program=LEARNS)
    command = [sys.executable, "-P", "-c", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        heard(served, "learning")
        served.send_signal(signal.SIGINT)
        heard(served, "saved")
        heard(served, "interrupted []")
        assert served.wait(PATIENCE_S) == 0
    assert ended(job_name)
