"""A watchdog's process that was started before it is known what it is to serve."""

from __future__ import annotations

import os
import signal

import pytest
from shell import Cli, is_running
from support import config, eventually, gone, quick

from gadei_ps.commands import early
from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import JobFailed

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
        assert child.process.wait(60.0) == 0


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
