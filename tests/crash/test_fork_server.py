"""The fork server dies, hangs or fails at any instant, with servers or alone: the job continues."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
from support import QuickDaemon, eventually, gone, quick, spin, status
from team import Team, send, stopped

from gadei_ps.job import fork_server_messages as words
from gadei_ps.job.faults import Role
from gadei_ps.job.fork_server_messages import Started
from gadei_ps.watchdog import server_starter
from gadei_ps.watchdog.restart import Policy

start = functools.partial(QuickDaemon, fork_server=True)
FORK_SERVER = "gadei_ps.server.fork_server"
SOON = Policy(first_s=0.02, longest_s=0.5)


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """Restart fork servers that were of no use after shorter times than those of users."""
    with mock.patch.object(server_starter, "POLICY", SOON):
        yield


@pytest.fixture
def in_fork_servers() -> Iterator[Callable[[Callable[[], None]], None]]:
    """in_fork_servers(what): each fork server that starts from now on does that first."""
    calls: list[Callable[[], None]] = []

    def begin(program: str) -> None:
        for call in calls:
            if program == FORK_SERVER:
                call()

    with mock.patch.object(quick, "STARTING", [begin]):
        yield calls.append


def unknown(team: Team) -> set[int]:
    """Return pids of forks that are servers of the job, or were about to be, and are unknown."""
    found = set()
    for one in psutil.process_iter(["pid", "name"]):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{one.info['pid']}/maps").read_text()
            if one.info["name"] == "gadei-server" and f"{team.name}.control" in maps:
                found.add(one.info["pid"])
    return found - set(team.control["server"]["pid"].tolist())


def test_it_dies_with_servers(job_name: str, tmp_path: Path) -> None:
    chance = random.Random(1)
    with Team(job_name, tmp_path, start=start) as team:
        rounds = team.rounds(8)
        for number in range(rounds):
            fork_server, server, standby = (
                team.find(role) for role in (Role.FORK_SERVER, Role.SERVER, Role.STANDBY)
            )
            victims = [fork_server, server, standby][: 1 + number % 3]
            chance.shuffle(victims)
            for one in victims:
                send(one)
                spin(chance, 0.01)  # also while it forks
            team.goes_on()
            team.watch()
        team.find(Role.FORK_SERVER)
        team.find(Role.STANDBY)
        eventually(lambda: not unknown(team), what="no server but the two")
        assert status(job_name)["fork_server_deaths"] >= rounds
        team.settle()


def test_it_hangs(job_name: str, tmp_path: Path) -> None:
    with Team(job_name, tmp_path, start=start) as team:
        fork_server, server, standby = (
            team.find(role) for role in (Role.FORK_SERVER, Role.SERVER, Role.STANDBY)
        )
        with stopped(fork_server):
            send(server)
            send(standby)
            eventually(lambda: not fork_server.alive, what="it is killed")
            team.goes_on()
        assert team.find(Role.FORK_SERVER).pid != fork_server.pid
        team.find(Role.STANDBY)
        team.settle()


def test_it_ends_with_the_watchdog(job_name: str, tmp_path: Path) -> None:
    """Check that its servers live on, and that the next watchdog has its own."""
    with Team(job_name, tmp_path, start=start) as team:
        servers = {team.find(role).pid for role in (Role.SERVER, Role.STANDBY)}
        fork_server = team.find(Role.FORK_SERVER)
        send(team.find(Role.WATCHDOG))
        eventually(lambda: not fork_server.alive, what="its end")
        team.goes_on()
        team.watch()
        assert team.find(Role.FORK_SERVER).pid != fork_server.pid
        assert {team.find(role).pid for role in (Role.SERVER, Role.STANDBY)} == servers
        send(team.find(Role.SERVER))
        team.goes_on()
        team.find(Role.STANDBY)
        team.settle()


def test_it_dies_before_it_tells_of_a_fork(
    job_name: str, tmp_path: Path, in_fork_servers: Callable[[Callable[[], None]], None]
) -> None:
    """Nobody knows of that server; it ends, and another one is started."""
    once = tmp_path / "once"

    def forget() -> None:
        tell = words.send

        def send_all_but_one(end: object, message: words.Message, *descriptors: int) -> None:
            if isinstance(message, Started) and once.exists():
                (tmp_path / "forked").write_text(str(message.pid))
                once.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            tell(end, message, *descriptors)  # type: ignore[arg-type]

        words.send = send_all_but_one

    in_fork_servers(forget)
    with Team(job_name, tmp_path, start=start) as team:
        standby = team.find(Role.STANDBY)
        once.touch()
        send(standby)
        eventually(lambda: not once.exists())
        forked = int((tmp_path / "forked").read_text())
        assert forked not in team.control["server"]["pid"]
        team.goes_on()
        team.find(Role.STANDBY)
        eventually(lambda: gone(forked), what="the unknown one has ended")
        team.settle()


def test_it_cannot_fork(
    job_name: str,
    tmp_path: Path,
    in_fork_servers: Callable[[Callable[[], None]], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The watchdog says so, and asks again."""
    full = tmp_path / "full"

    def refuse() -> None:
        fork = os.fork

        def refused() -> int:
            if full.exists():
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return fork()

        os.fork = refused

    in_fork_servers(refuse)
    with Team(job_name, tmp_path, start=start) as team:
        team.find(Role.STANDBY)
        full.touch()
        send(team.find(Role.SERVER))
        team.goes_on()
        assert not status(job_name)["standby_pid"]
        eventually(lambda: capfd.readouterr().err.count("cannot start a server"))
        full.unlink()
        team.find(Role.STANDBY)
        team.settle()
