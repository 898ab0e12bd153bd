"""Learners that the watchdog starts, and a job that ends with its last learner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from shell import Cli, is_running
from support import (
    eventually,
    gone,
    segments,
    status,
)
from support.supervised import TOML, Watched, again, call, goes_on, gradient_of, one_at, team

from gadei_ps.commands import jobs
from gadei_ps.job.config import LearnersConfig
from gadei_ps.job.faults import Processes
from gadei_ps.learners.client import Client
from gadei_ps.machine import log, process
from gadei_ps.machine.launch import JOB_VARIABLE, NAME_VARIABLE
from gadei_ps.memory.layout import CONTROL
from gadei_ps.watchdog import learners as learners_module
from gadei_ps.watchdog.fork_server import watched
from gadei_ps.watchdog.learners import JobLearners


def test_a_job_that_stops_when_idle(job_name: str) -> None:
    """Not before the first learner has come, nor as long as one is there."""
    with Watched(job_name, when_idle="stop") as job, team(job_name, 2) as (one, other):
        call(one, "push", gradient_of(one_at(0)))
        assert call(one, "detach") is None
        eventually(lambda: len(status(job_name)["learners"]) == 1)
        job.look(0.1)
        assert is_running(job_name)
        other.kill()
        assert job.watchdog.join() == 0
        assert not segments(job_name)


SCRIPT = """
    import os, pathlib, sys, time
    import numpy as np
    from gadei_ps.learners.client import Client

    here, index = pathlib.Path(__file__).parent, os.environ["GADEI_PS_LEARNER"]
    (here / f"started.{index}.{os.getpid()}").touch()
    while (here / "hold").exists():
        time.sleep(0.002)
    with Client() as client:
        while not (here / f"finish.{index}").exists():
            client.push({"w": np.ones(3000, np.float32)})
            time.sleep(0.002)
"""


def with_learners(cli: Cli, count: int, text: str = "", command: list[str] | None = None) -> str:
    """A job file that names its learners."""
    script = cli.directory / "learner.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = command or [sys.executable, str(script)]
    table = f"[learners]\ncommand = {json.dumps(command)}\ncount = {count}\n"
    return f"standby = false\n{text}{TOML}{table}"


def named(job: str) -> dict[str, int]:
    """Return pids of the learners by the names that they have."""
    return {row["name"]: row["pid"] for row in status(job)["learners"] if not row["leaving"]}


def starts(cli: Cli, index: int) -> int:
    return len(list(cli.directory.glob(f"started.{index}.*")))


def all_there(job: str, count: int) -> dict[str, int]:
    wanted = {f"learner-{index}" for index in range(count)}
    eventually(lambda: named(job).keys() == wanted, what=lambda: named(job))
    return named(job)


def test_learners_of_the_job_file(cli: Cli, job_name: str) -> None:
    """Started, started again when killed, but not when they have finished; then the job ends."""
    watchdog = cli.serve(job_name, with_learners(cli, 2, "when_idle = 'stop'\n"))
    first = all_there(job_name, 2)
    os.kill(first["learner-0"], signal.SIGKILL)
    eventually(lambda: named(job_name).get("learner-0", first["learner-0"]) != first["learner-0"])
    goes_on(job_name)
    (cli.directory / "finish.1").touch()
    eventually(lambda: gone(first["learner-1"]))
    eventually(lambda: set(named(job_name)) == {"learner-0"})
    goes_on(job_name)
    (cli.directory / "finish.0").touch()
    assert watchdog.wait().code == 0
    assert "last learner has left" in watchdog.err
    assert (starts(cli, 0), starts(cli, 1)) == (2, 1)
    assert not segments(job_name)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([sys.executable, "-c", "import sys; sys.exit(3)"], "fails again and again"),
        (["/no/such/program"], "cannot start a learner"),
    ],
)
def test_learners_that_fail(command: list[str], message: str, cli: Cli, job_name: str) -> None:
    """They are given up, said so; the job waits for others."""
    text = with_learners(cli, 1, command=command)
    watchdog = cli.serve(job_name, text)
    eventually(lambda: message in watchdog.err, what=lambda: watchdog.err)
    if len(command) > 1:
        assert watchdog.err.count("a learner ended") == 5
    with Client(job_name) as client:
        client.push(gradient_of(one_at(0)))
        client.wait_applied()
    assert jobs.stop(job_name, drain=False, timeout_s=5)["gradients_applied"] == 1


def test_learners_are_adopted(cli: Cli, job_name: str) -> None:
    (cli.directory / "hold").touch()
    watchdog = cli.serve(job_name, with_learners(cli, 2))
    server = status(job_name)["server_pid"]
    # Before they have attached: they may need seconds for their imports.
    eventually(lambda: starts(cli, 0) == starts(cli, 1) == 1)
    watchdog.signal(signal.SIGKILL)
    watchdog = again(cli, job_name)
    (cli.directory / "hold").unlink()
    first = all_there(job_name, 2)
    goes_on(job_name)
    watchdog.signal(signal.SIGKILL)
    watchdog = again(cli, job_name)
    assert all_there(job_name, 2) == first
    goes_on(job_name)
    assert status(job_name)["server_pid"] == server
    # And looked after: nobody else reports their deaths to the new watchdog.
    os.kill(first["learner-1"], signal.SIGKILL)
    eventually(lambda: named(job_name).get("learner-1", first["learner-1"]) != first["learner-1"])
    assert (starts(cli, 0), starts(cli, 1)) == (1, 2)
    pids = all_there(job_name, 2)
    assert pids["learner-0"] == first["learner-0"]
    # What has finished is not started again, by the next one neither.
    (cli.directory / "finish.1").touch()
    eventually(lambda: set(named(job_name)) == {"learner-0"})
    eventually(lambda: int(Processes(job_name).control["finished"][0]) == 1 << 1)
    watchdog.signal(signal.SIGKILL)
    watchdog = again(cli, job_name)
    os.kill(pids["learner-0"], signal.SIGKILL)
    eventually(lambda: starts(cli, 0) == 2)
    pids = all_there(job_name, 1)
    assert starts(cli, 1) == 2
    jobs.stop(job_name, drain=False, timeout_s=5)
    assert watchdog.wait().code == 0
    for pid in pids.values():
        assert gone(pid), "they end with the job"


def test_a_learner_that_ends_while_it_is_found_is_not_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Skip it: its pid may be another process' by then, which would be ended for it."""
    with process.spawn(["sleep", "60"]) as child:

        class Found(psutil.Process):
            def environ(self) -> dict[str, str]:
                child.kill()
                child.wait()
                return {JOB_VARIABLE: "job.sock", NAME_VARIABLE: "learner-0"}

        monkeypatch.setattr(psutil, "process_iter", lambda: [Found(child.pid)])
        memory = SimpleNamespace(words=np.zeros(1, CONTROL)[0])
        learners = JobLearners(LearnersConfig(command=["x"]), memory, "job.sock", log.get())  # type: ignore[arg-type]
        learners.adopt()
        assert learners.all[0].pid == 0


def test_a_process_with_the_pid_of_an_adopted_learner_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let another process get its pid: an adopted process has no waiting parent here."""
    control = np.zeros(1, CONTROL)[0]
    memory = SimpleNamespace(words=control)
    learners = JobLearners(LearnersConfig(command=["x"]), memory, "job.sock", log.get())  # type: ignore[arg-type]
    with process.spawn(["sleep", "60"]) as learner, process.spawn(["sleep", "60"]) as other:
        environ = {JOB_VARIABLE: "job.sock", NAME_VARIABLE: "learner-0"}
        monkeypatch.setattr(psutil.Process, "environ", lambda _: environ)
        monkeypatch.setattr(psutil, "process_iter", lambda: [psutil.Process(learner.pid)])
        learners.adopt()
        assert learners.all[0].pid == learner.pid
        learner.kill()
        learner.wait()
        learners.all[0].pid = other.pid
        monkeypatch.setattr(process, "alive", lambda pid, start: True)  # as just before its end
        learners.close()
        assert other.poll() is None
        other.kill()


def own(learners: JobLearners, child: subprocess.Popen[bytes]) -> None:
    """Make a process the child of learner 0."""
    one = learners.all[0]
    one.child, one.pid = child, child.pid
    one.pidfd, one.start = watched(child)


@pytest.mark.parametrize("adopted", [False, True])
def test_children_of_a_learner_end_with_it(monkeypatch: pytest.MonkeyPatch, adopted: bool) -> None:
    control = np.zeros(1, CONTROL)[0]
    memory = SimpleNamespace(words=control)
    script = "sleep 60 & echo $!; read stop; exit 1"
    learners = JobLearners(LearnersConfig(command=["x"]), memory, "job.sock", log.get())  # type: ignore[arg-type]
    with process.spawn(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdin
        assert one.stdout
        child = int(one.stdout.readline())
        if adopted:
            environ = {JOB_VARIABLE: "job.sock", NAME_VARIABLE: "learner-0"}
            monkeypatch.setattr(psutil.Process, "environ", lambda _: environ)
            monkeypatch.setattr(psutil, "process_iter", lambda: [psutil.Process(one.pid)])
            learners.adopt()
        else:
            own(learners, one)
        one.stdin.close()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        learners.all[0].exits = ()
        learners.tick(time.monotonic(), stopping=True)
        assert learners.all[0].pid == 0
        eventually(lambda: not process.start_ticks(child))


def test_a_learner_that_the_kernel_does_not_end_holds_up_no_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SimpleNamespace()
    learners = JobLearners(LearnersConfig(command=["x"]), memory, "job.sock", log.get())  # type: ignore[arg-type]
    with process.spawn(["sh", "-c", "trap '' TERM; echo; sleep 60"], stdout=subprocess.PIPE) as one:
        assert one.stdout
        one.stdout.readline()
        own(learners, one)
        monkeypatch.setattr(process, "kill_group_of", lambda *leader: None)
        monkeypatch.setattr(learners_module, "LEARNERS_KILL_S", 0.1)
        learners.close()
        assert one.poll() is None
        os.killpg(one.pid, signal.SIGKILL)
