"""Each process of a job dies or is stopped, alone and with others, at the worst moment."""

from __future__ import annotations

import ctypes
import os
import random
import signal
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support import FORK, PATIENCE_S, Child, eventually, quick, segments, spin, status
from team import PATIENT_S, Team, asking, seen, send, stopped, tids, writer_of

from gadei_ps.commands.daemon import Daemon
from gadei_ps.job import faults
from gadei_ps.job.control import Checkpoint, ask
from gadei_ps.job.faults import Role, Target
from gadei_ps.machine import process
from gadei_ps.memory import segment
from gadei_ps.storage import checkpoint
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.restart import Policy

SERVERS = (Role.SERVER, Role.STANDBY)
VALUES = 2_000_000  # so that copying them takes a while


def _known(team: Team, roles: tuple[Role, ...]) -> list[Target]:
    return [team.find(role) for role in roles]


TOGETHER: list[tuple[Role, ...]] = [
    (Role.SERVER,),
    (Role.STANDBY,),
    (Role.WATCHDOG,),
    (Role.SERVER, Role.WATCHDOG),
    (Role.WATCHDOG, Role.SERVER),
    SERVERS,
    (*SERVERS, Role.WATCHDOG),
]


class Restarted(Daemon):
    """A daemon that is restarted after any number of kills."""

    policy = Policy(limit=10_000)


def test_deaths_alone_and_together(job_name: str, tmp_path: Path) -> None:
    with Team(job_name, tmp_path, start=Restarted) as team:
        for roles in TOGETHER * (team.rounds(10) // 10):
            for target in _known(team, roles):
                send(target)
            if Role.STANDBY not in roles:
                team.goes_on()  # the other server takes over without the watchdog
            team.watch()
            team.goes_on()
        team.find(Role.STANDBY)
        team.settle()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGRTMIN + 6])  # the second has no name
@pytest.mark.parametrize("role", SERVERS)
def test_server_that_ends_by_itself(role: Role, number: int, job_name: str, tmp_path: Path) -> None:
    """End it by SIGTERM or an error of its own: its leases are released, as after SIGKILL."""
    with Team(job_name, tmp_path) as team:
        team.find(Role.STANDBY)
        ended = team.find(role)
        os.kill(ended.pid, number)
        eventually(lambda: not process.alive(ended.pid, ended.start), what="its end")
        team.watch()
        team.goes_on()
        eventually(lambda: team.find(Role.STANDBY).pid != ended.pid, what="another standby")
        send(team.find(Role.SERVER))
        team.goes_on()
        team.find(Role.STANDBY)
        team.settle()


def test_killed_again_while_it_takes_over(job_name: str, tmp_path: Path) -> None:
    chance = random.Random(1)
    with Team(job_name, tmp_path, values=300_000) as team:
        for number in range(team.rounds(4)):
            server, standby = _known(team, SERVERS)
            before, generation = tids(team.control), int(team.control["lease_generation"])
            send(server)
            assert seen(
                lambda before=before, generation=generation: (
                    tids(team.control) != before
                    or int(team.control["lease_generation"]) != generation
                )
            )
            if number % 2:
                spin(chance, 0.005)
            send(standby)
            team.goes_on()
        team.settle()


def test_stopped_for_a_while(job_name: str, tmp_path: Path) -> None:
    with Team(job_name, tmp_path, hang_s=PATIENT_S) as team:
        everyone = [team.processes.learners()[0], *_known(team, (*SERVERS, Role.WATCHDOG))]
        for target in everyone * 2:
            with stopped(target):
                if target.role is not Role.SERVER:
                    team.goes_on()
            team.goes_on()
        assert all(target.alive for target in everyone)
        team.settle()
        assert status(job_name)["server_deaths"] == 0


def test_a_server_that_hangs_is_replaced(job_name: str, tmp_path: Path) -> None:
    with Team(job_name, tmp_path, hang_s=PATIENT_S) as team:
        team.goes_on()
        server, standby = _known(team, SERVERS)
        with stopped(server):
            with team.hanging(0.5):
                eventually(lambda: not server.alive, what="it is killed")
            team.goes_on()
        assert team.find(Role.SERVER).pid == standby.pid
        team.settle()
        assert status(job_name)["server_deaths"] == 1


def test_everything_dies_and_goes_on_from_memory(job_name: str, tmp_path: Path) -> None:
    with Team(job_name, tmp_path) as team:
        team.goes_on()
        for _ in range(2):
            everyone = _known(team, (Role.WATCHDOG, *SERVERS))
            job = status(job_name)["job_id"]
            for target in everyone:
                send(target)
            team.fire()
            team.serve_again()
            assert status(job_name)["job_id"] == job
            team.hire()
            team.goes_on()
        team.settle()


def test_watchdogs_die_while_they_adopt(job_name: str, tmp_path: Path) -> None:
    """The launcher starts one after the other, and the job keeps its memory."""
    doomed = FORK.Value(ctypes.c_int)

    def doom(program: str) -> None:
        if program == "gadei_ps.watchdog" and doomed.value:
            doomed.value -= 1
            JobMemory.adopt = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore

    with mock.patch.object(quick, "STARTING", [doom]), Team(job_name, tmp_path) as team:
        team.goes_on()
        job = status(job_name)["job_id"]
        send(team.find(Role.WATCHDOG))
        doomed.value = 3
        team.watch()
        assert not doomed.value
        assert status(job_name)["job_id"] == job
        team.goes_on()
        team.settle()


def test_everything_dies_and_goes_on_from_a_checkpoint(job_name: str, tmp_path: Path) -> None:
    with Team(job_name, tmp_path) as team:
        team.goes_on()
        saved = ask(job_name, Checkpoint())
        team.goes_on()
        for target in _known(team, (Role.WATCHDOG, *SERVERS)):
            send(target)
        team.fire()
        for name in segments(job_name):
            segment.unlink(name)
        team.forget()
        team.serve_again()
        assert team.version == saved["version"]
        team.hire()
        team.goes_on()
        team.settle(before=saved["version"])


# -- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["checkpoint-writer", Role.SERVER, Role.WATCHDOG])
def test_death_during_the_pause(victim: str, job_name: str, tmp_path: Path) -> None:
    """Training continues, and each checkpoint has the contents that its manifest states."""
    with Team(job_name, tmp_path, values=VALUES) as team:
        hits = tries = 0
        while hits < team.rounds(1):
            tries += 1
            assert tries < 20 * team.rounds(1), "the pause ends before the test sees it"
            target = None if victim == "checkpoint-writer" else team.find(Role(victim))
            asker = Child(asking, job_name)
            target = target or writer_of(team)
            seen(lambda asker=asker: int(team.control["pause"]) or asker.has_sent)
            hit = bool(int(team.control["pause"])) and faults.send(target, signal.SIGKILL)
            answer = asker.receive()
            asker.join()
            if hit and victim == "checkpoint-writer":
                assert "CheckpointError" in answer["error"]
                eventually(lambda: not int(team.control["pause"]))
            if victim == Role.WATCHDOG:
                team.goes_on()  # its checkpoint writer has died with it: the pause ends by itself
            team.watch()
            team.goes_on()
            hits += bool(hit)
        last = ask(job_name, Checkpoint(), PATIENCE_S)
        snapshot = checkpoint.read(Path(last["path"]))
        assert snapshot.version == last["version"]
        np.testing.assert_array_equal(snapshot.weights[:VALUES], -last["version"])
        team.settle()


def test_a_checkpoint_taken_under_fire(job_name: str, tmp_path: Path) -> None:
    """Each checkpoint is the job between two gradients, whichever process dies meanwhile."""
    chance = random.Random(1)
    with Team(job_name, tmp_path, values=500_000) as team:
        whole = 0
        for _ in range(team.rounds(3)):
            server = team.find(Role.SERVER)
            asker = Child(asking, job_name)
            spin(chance, 0.4)
            send(server)
            answer = asker.receive()
            asker.join()
            if "error" in answer:
                continue
            whole += 1
            snapshot = checkpoint.read(Path(answer["path"]))
            np.testing.assert_array_equal(snapshot.weights[:500_000], -snapshot.version)
            assert snapshot.counts["applied"] == snapshot.version
        assert whole
        team.goes_on()
        team.settle()


def test_learners_outlive_the_signals(job_name: str, tmp_path: Path) -> None:
    """The watchdog takes only dead learners for dead."""
    with Team(job_name, tmp_path, learners=3) as team:
        team.goes_on()
        victim = team.learners[1]
        row, generation = victim.row, victim.generation
        victim.child.signal(signal.SIGSTOP)
        server = team.find(Role.SERVER)
        send(server)
        team.goes_on()
        assert int(team.control["roster"][row]["wanted"]) == generation
        victim.kill()
        eventually(lambda: int(team.control["roster"][row]["retired"]) == generation)
        team.settle()
