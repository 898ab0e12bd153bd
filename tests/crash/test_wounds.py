"""Servers of which only a part hangs, leases that the kernel does not hand on, standbys that do not
get ready, and a machine that was suspended."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from support import eventually, status
from support.wounds import Held, lose_leases
from team import PATIENT_S, Team, seen, send, stopped, tids

from gadei_ps.job import faults
from gadei_ps.job.faults import Role, Target
from gadei_ps.memory.layout import ServerState
from gadei_ps.watchdog import servers

HANG_S = 0.5


def _threads(server: Target) -> list[int]:
    """Return the threads of a server: the manager's, then those of its shards."""
    return sorted(int(task.name) for task in Path(f"/proc/{server.pid}/task").iterdir())


def _of(team: Team, server: Target, which: str) -> list[int]:
    """Return the threads of the active server."""
    shards = tids(team.control)
    assert set(_threads(server)) >= {server.pid, *shards}
    both = {"manager": [server.pid], "shards": shards, "all": [server.pid, *shards]}
    return both[which] if which in both else [shards[int(which)]]


# -- one thread hangs -----------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["manager", "0", "1"])
def test_one_thread_hangs(which: str, job_name: str, tmp_path: Path) -> None:
    with Team(job_name, tmp_path, hang_s=PATIENT_S) as team:
        team.goes_on()
        server, standby = team.find(Role.SERVER), team.find(Role.STANDBY)
        (thread,) = _of(team, server, which)
        with Held(thread):
            with team.hanging(HANG_S):
                eventually(lambda: not server.alive, what="it is killed")
            team.goes_on()
        assert team.find(Role.SERVER).pid == standby.pid
        team.settle()
        assert status(job_name)["server_deaths"] == 1


def test_threads_that_go_on_in_time(job_name: str, tmp_path: Path) -> None:
    with Team(job_name, tmp_path, hang_s=PATIENT_S) as team:
        server, standby = team.find(Role.SERVER), team.find(Role.STANDBY)
        for thread in [*_of(team, server, "all"), *_threads(standby)]:
            with Held(thread):
                version = team.version
                seen(lambda version=version: team.version > version + 5, 0.2)
            team.goes_on()
        assert server.alive
        assert standby.alive
        team.settle()
        assert status(job_name)["server_deaths"] == 0


def test_the_manager_of_a_standby_hangs(
    job_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for it, so it is given more time."""
    monkeypatch.setattr(servers, "STANDBY_LIMIT_S", HANG_S)
    with Team(job_name, tmp_path, hang_s=PATIENT_S) as team:
        server, standby = team.find(Role.SERVER), team.find(Role.STANDBY)
        with Held(standby.pid):
            with team.hanging(HANG_S):
                eventually(lambda: not standby.alive, what="it is killed")
            team.goes_on()
        eventually(lambda: team.find(Role.STANDBY).pid != standby.pid)
        assert server.alive
        team.settle()
        assert status(job_name)["server_deaths"] == 1


def test_a_thread_of_the_standby_hangs_when_it_is_needed(job_name: str, tmp_path: Path) -> None:
    """The lease of its shard is its own: it is killed, and a third server has new leases."""
    with Team(job_name, tmp_path, hang_s=PATIENT_S) as team:
        team.goes_on()
        server, standby = team.find(Role.SERVER), team.find(Role.STANDBY)
        with Held(_threads(standby)[1]):
            send(server)
            with team.hanging(HANG_S):
                eventually(lambda: not standby.alive, what="it is killed")
            team.goes_on()
        team.find(Role.STANDBY)
        team.settle()
        assert status(job_name)["server_deaths"] == 2


# -- leases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["shards", "1", "manager", "all"])
def test_leases_that_are_not_handed_on(which: str, job_name: str, tmp_path: Path) -> None:
    """The standby gets some of them or none, does not serve as a whole, and is killed for it."""
    with Team(job_name, tmp_path, hang_s=PATIENT_S) as team:
        team.goes_on()
        server, standby = team.find(Role.SERVER), team.find(Role.STANDBY)
        lose_leases(server.pid, _of(team, server, which))
        send(server)
        with team.hanging(HANG_S):
            eventually(lambda: not standby.alive, what="it is killed")
        team.goes_on()
        team.find(Role.STANDBY)
        team.settle()
        assert status(job_name)["server_deaths"] == 2


# -- starts ---------------------------------------------------------------------------------------


def test_a_standby_that_does_not_get_ready(
    job_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped in the middle of its start, and another one is started."""
    monkeypatch.setattr(servers, "SERVER_SILENT_S", 2 * HANG_S)
    with Team(job_name, tmp_path) as team:
        late = _stopped_at_its_start(team)
        eventually(lambda: not late.alive, what="it is killed")
        team.goes_on()
        assert team.find(Role.STANDBY).pid != late.pid
        team.settle()


def _stopped_at_its_start(team: Team) -> Target:
    """A standby that is not ready yet, and is stopped."""
    while True:
        old = team.find(Role.STANDBY)
        line = next(line for line in team.control["server"] if int(line["pid"]) == old.pid)
        send(old)
        assert seen(lambda line=line, old=old: int(line["pid"]) not in (0, old.pid))
        new = Target(Role.STANDBY, int(line["pid"]), int(line["start"]))
        if faults.send(new, signal.SIGSTOP) is None:
            continue
        if int(line["state"]) == ServerState.STARTING:
            return new
        faults.send(new, signal.SIGCONT)


# -- all of them are stopped ----------------------------------------------------------------------


def _looks(job: str) -> None:
    """The watchdog has looked at the servers: it does so after each answer."""
    for _ in range(2):
        status(job)


def test_a_machine_that_was_suspended(job_name: str, tmp_path: Path) -> None:
    """The watchdog did not look for longer than a server may hang, and blames none."""
    with Team(job_name, tmp_path, hang_s=PATIENT_S) as team:
        team.goes_on()
        everyone = [team.find(role) for role in (Role.SERVER, Role.STANDBY, Role.WATCHDOG)]
        server, standby, watchdog = everyone
        with team.hanging(3 * HANG_S), stopped(server), stopped(standby):
            _looks(job_name)
            with stopped(watchdog):
                time.sleep(4 * HANG_S)
            _looks(job_name)
        team.goes_on()
        assert all(one.alive for one in everyone)
        team.settle()
        assert status(job_name)["server_deaths"] == 0
