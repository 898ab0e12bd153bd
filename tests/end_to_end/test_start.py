"""Starts that take long, and starts that hang."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from shell import is_running
from support import Child, config, eventually
from support.quick import without_fork_server

from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import JobFailed
from gadei_ps.job.control import StopJob, ask
from gadei_ps.watchdog import server_starter, supervisor
from gadei_ps.watchdog.serve_options import Options

SILENT_S = 2.5  # a process that computes gets a core within it, on a busy machine
COMPILED_S = 500.0  # the kernels, if no test has needed them before
COMPUTE = "while time.monotonic() < begin + 2 * {silent}: sum(range(1000))"
HANG = "time.sleep(1000)"
IDLE = "while True: time.sleep(0.1)"
# The server's main loop turns ten times a second, and it never gets its leases.
NEVER_READY = """
    from gadei_ps import _native
    _native.lease_take = lambda *given: _native.PS_TIMEOUT
"""
# Python runs a module of this name at its start.
HOOK = """
import sys, time
begin = time.monotonic()
if {module!r} in sys.orig_argv:
    {what}
"""
Before = Callable[[str, str], None]
SERVER, DAEMON = "gadei_ps.server.manager", "gadei_ps.watchdog"
FORK_SERVER = "gadei_ps.server.fork_server"


class Impatient(Daemon):
    """A daemon whose start fails soon."""

    start_silent_s = SILENT_S


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Before:
    """before(module, what): processes of ours that run the module do that first."""

    def set_up(module: str, what: str) -> None:
        hook = HOOK.format(module=module, what=what.format(silent=SILENT_S))
        (tmp_path / "sitecustomize.py").write_text(hook)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return set_up


def _serve(pipe: Connection, job: str, fork_server: bool) -> None:
    options = Options(fresh=True, quiet=True, start_silent_s=SILENT_S * (6 if fork_server else 1))
    server_starter.FORK_SERVER_SILENT_S = SILENT_S / 3
    try:
        with nullcontext() if fork_server else without_fork_server():
            supervisor.serve(config(job, standby=False), options)
        pipe.send("stopped")
    except JobFailed as error:
        pipe.send(str(error))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("module", "what"),
    [(SERVER, COMPUTE), (FORK_SERVER, COMPUTE), (FORK_SERVER, HANG), (FORK_SERVER, "sys.exit(1)")],
    ids=["server", "fork-server", "fork-server-hangs", "fork-server-dies"],
)
def test_a_server_may_take_long_to_start(
    before: Before, job_name: str, module: str, what: str
) -> None:
    """Start on a busy machine, where compiling takes longer than any limit."""
    before(module, what)
    watchdog = Child(_serve, job_name, module == FORK_SERVER)
    try:
        eventually(lambda: is_running(job_name) or watchdog.has_sent, COMPILED_S)
        ask(job_name, StopJob())
        assert watchdog.receive() == "stopped"
    finally:
        watchdog.signal(signal.SIGTERM)
        watchdog.join()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", [HANG, IDLE, NEVER_READY], ids=["sleeps", "idles", "never-ready"])
def test_a_server_that_hangs_at_its_start(before: Before, job_name: str, what: str) -> None:
    """A loop that sleeps uses the processor, but is not progress."""
    before(SERVER, what)
    watchdog = Child(_serve, job_name, False)
    try:
        eventually(lambda: watchdog.has_sent, COMPILED_S)
        assert f"it made no progress for {SILENT_S:g} s" in watchdog.receive()
    finally:
        watchdog.signal(signal.SIGTERM)
        watchdog.join()


def test_a_watchdog_may_take_long_to_start(before: Before, job_name: str) -> None:
    before(DAEMON, COMPUTE)
    with Impatient(config(job_name, standby=False)):
        assert is_running(job_name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("module", "what"),
    [(DAEMON, HANG), (DAEMON, IDLE), (FORK_SERVER, NEVER_READY)],
    ids=["sleeps", "idles", "server-never-ready"],
)
def test_a_watchdog_that_hangs_at_its_start(
    before: Before, job_name: str, module: str, what: str
) -> None:
    """The watchdog's own loop, in which it waits for servers, is not their progress."""
    before(module, what)
    with (
        pytest.raises(JobFailed, match="did not become ready"),
        Impatient(config(job_name, standby=False)),
    ):
        pass


def test_a_watchdog_that_is_killed_at_its_start(before: Before, job_name: str) -> None:
    """It can say nothing itself."""
    before(DAEMON, "import os; os.kill(os.getpid(), 9)")
    with (
        pytest.raises(JobFailed, match=r"was ended by SIGKILL before it was ready; try again"),
        Impatient(config(job_name, standby=False)),
    ):
        pass
