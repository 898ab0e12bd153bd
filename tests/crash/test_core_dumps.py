"""A server that crashes: no core dump delays the next one, unless the job file asks for it."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import eventually
from team import Team

from gadei_ps.job.faults import Role

PATTERN = Path("/proc/sys/kernel/core_pattern").read_text().strip()


@pytest.fixture
def unlimited() -> Iterator[int]:
    """The tests' processes may write cores, as far as the hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def _kept_out(pid: int) -> dict[str, bool]:
    """Return which mapped segments of the job are excluded from core dumps."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    found = re.findall(r"/dev/shm/gadei-ps\.\S+\.(\w+).*?VmFlags: ([^\n]*)", text, re.DOTALL)
    return {part: "dd" in flags.split() for part, flags in found}


@pytest.mark.parametrize("signal_", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_is_taken_over(
    signal_: signal.Signals,
    unlimited: int,
    job_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with Team(job_name, tmp_path / "saved", learners=1) as team:
        team.goes_on()
        server, standby = team.find(Role.SERVER), team.find(Role.STANDBY)
        for one in (server, standby, team.find(Role.WATCHDOG)):
            assert all(_kept_out(one.pid).values()), _kept_out(one.pid)
        assert _kept_out(server.pid).keys() >= {"control", "weights", "state"}
        assert resource.prlimit(server.pid, resource.RLIMIT_CORE)[0] in (0, 1)
        os.kill(server.pid, signal_)
        eventually(lambda: not server.alive)
        team.goes_on()
        assert team.find(Role.SERVER).pid == standby.pid
        team.settle()
    assert not list(tmp_path.glob("core*"))


def test_a_core_that_is_asked_for(
    unlimited: int, job_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Team(job_name, tmp_path / "saved", learners=1, core_dumps=True) as team:
        server = team.find(Role.SERVER)
        assert resource.prlimit(server.pid, resource.RLIMIT_CORE) == (unlimited, unlimited)
        assert all(_kept_out(server.pid).values())
        if PATTERN == "core" and unlimited:  # the test knows only then where it will be
            os.kill(server.pid, signal.SIGSEGV)
            eventually(lambda: not server.alive)
            (core,) = tmp_path.glob("core*")
            assert core.read_bytes()[:4] == b"\x7fELF"
            core.unlink()
        team.goes_on()
        team.settle()
