"""A watchdog's process that was started before it is known what it is to serve."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from shell import Cli, is_running
from support import PATIENCE_S, config, eventually, gone, quick

from gadei_ps.commands import daemon as daemons
from gadei_ps.commands import early
from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import JobFailed, JobNotFound, JobStopped
from gadei_ps.job.control import Status

pytestmark = pytest.mark.usefixtures("compiled")


def test_it_serves_what_it_is_told(job_name: str) -> None:
    with quick.fork_quickly():
        child = early.start()
        with Daemon(config(job_name, standby=False), child=child) as daemon:
            assert is_running(job_name)
            assert daemon._process is child.process
    assert gone(child.process.pid)


def test_it_ends_if_nobody_needs_it(job_name: str) -> None:
    with quick.fork_quickly():
        with early.for_job(job_name) as child:
            assert child is not None
        assert gone(child.process.pid)
        child = early.start()
        os.close(child.end)  # its command has died
        assert child.process.wait(PATIENCE_S) == 0


def test_it_is_killed_before_it_is_told(job_name: str) -> None:
    with quick.fork_quickly():
        child = early.start()
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        with (
            pytest.raises(JobFailed, match=r"was ended by SIGKILL before it was ready; try again"),
            Daemon(config(job_name, standby=False), child=child),
        ):
            pass


def test_a_running_job_needs_none(cli: Cli, job_name: str) -> None:
    cli.serve(job_name)
    eventually(lambda: is_running(job_name))
    with early.for_job(job_name) as child:
        assert child is None


@pytest.fixture
def watchdogs(tmp_path: Path) -> Iterator[Callable[[], list[int]]]:
    """Return the pids of the watchdogs that have been started in this test."""
    file = tmp_path / "watchdogs"
    file.touch()

    def note(program: str) -> None:
        if program == "gadei_ps.watchdog":
            with file.open("a") as out:
                out.write(f"{os.getpid()}\n")

    with mock.patch.object(quick, "STARTING", [note]):
        yield lambda: [int(line) for line in file.read_text().split()]


def test_run_uses_it(cli: Cli, job_name: str, watchdogs: Callable[[], list[int]]) -> None:
    ran = cli("run", job_name, "--", "/bin/sh", "-c", 'test -S "$GADEI_PS_JOB"')
    assert "no learner joined" in ran.err, "it ended with 0"
    assert len(watchdogs()) == 1  # for a second one there was no need


def test_run_fails_before_it_is_used(
    cli: Cli, job_name: str, watchdogs: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends the process, which would not end by itself: it has been stopped."""
    which = shutil.which

    def begun(program: str) -> str | None:
        eventually(watchdogs)
        return which(program)

    def stop(program: str) -> None:
        if program == "gadei_ps.watchdog":
            os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(shutil, "which", begun)  # what the command asks when it fails
    monkeypatch.setattr(quick, "STARTING", [*quick.STARTING, stop])
    assert "no program" in cli("run", job_name, "--", "no-such-program").error
    (one,) = watchdogs()
    ended = gone(one)
    if not ended:
        os.kill(one, signal.SIGKILL)
    assert ended


def test_a_request_waits_for_a_watchdog_that_ends(
    job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep its socket away, and let it end later than that."""
    monkeypatch.setattr(daemons, "WATCHDOG_GONE_S", 0.0)
    with quick.fork_quickly(), Daemon(config(job_name, standby=False)) as daemon:
        assert daemon._process is not None
        daemon.socket.unlink()
        asked = threading.Event()

        def ask(*words: Any) -> dict[str, Any]:
            asked.set()
            raise JobNotFound("its socket is gone")

        monkeypatch.setattr(daemons.control, "ask", ask)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(daemon.request, Status())
            assert asked.wait(PATIENCE_S)
            daemon._process.terminate()
            with pytest.raises(JobStopped):
                answer.result(PATIENCE_S)
