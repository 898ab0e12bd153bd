"""A checkpoint writer that hangs: training continues, whatever it waits for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support import PATIENCE_S, Child, blocked_disk, eventually, status
from support.blocked_disk import BlockedDisk
from team import Team, asking, seen, send, writer_of

from gadei_ps.job import faults
from gadei_ps.job.control import Checkpoint, ask
from gadei_ps.job.faults import Role

WHY_NOT = blocked_disk.why_not()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_disk_that_blocks(job_name: str, tmp_path: Path) -> None:
    """Training and the watchdog continue, and no other checkpoint is begun."""
    with Team(job_name, tmp_path) as team:
        with BlockedDisk(tmp_path) as disk:
            first = Child(asking, job_name)
            disk.waits()
            checkpoint_writer = writer_of(team)
            second = Child(asking, job_name)
            for _ in range(3):
                team.goes_on()
                assert status(job_name)["checkpoint_failures"] == 0
            assert writer_of(team) == checkpoint_writer
            assert not first.has_sent
            assert not second.has_sent
        assert "CheckpointError" in first.receive()["error"]
        assert second.receive()["version"] > 0, "the disk is there again"
        for child in (first, second):
            child.join()
        assert status(job_name)["checkpoint_failures"] == 1
        team.goes_on()
        # A watchdog that adopts the job looks at the directory, and does not wait for it either.
        with BlockedDisk(tmp_path) as disk:
            send(team.find(Role.WATCHDOG))
            team.watch()
            disk.waits()
            team.goes_on()
            assert status(job_name)["checkpoint_warning"] is None
        eventually(lambda: "cannot be written" in str(status(job_name)["checkpoint_warning"]))
        assert ask(job_name, Checkpoint(), PATIENCE_S)["version"] > 0
        assert status(job_name)["checkpoint_warning"] is None
        team.settle()


def test_a_checkpoint_writer_that_stands_still_in_its_pause(job_name: str, tmp_path: Path) -> None:
    """The pause is over when its time is, and the checkpoint writer finds that it has no copy."""
    with Team(job_name, tmp_path, values=500_000) as team:
        while True:
            asker = Child(asking, job_name)
            checkpoint_writer = writer_of(team)
            seen(lambda asker=asker: int(team.control["pause"]) or asker.has_sent)
            sent = faults.send(checkpoint_writer, signal.SIGSTOP)
            if sent is not None and int(team.control["pause"]):
                break
            faults.send(checkpoint_writer, signal.SIGCONT)
            asker.receive()
            asker.join()
        team.goes_on()
        assert int(team.control["pause"]), "nobody has withdrawn it"
        send(checkpoint_writer, signal.SIGCONT)
        assert asker.receive()["version"] > 0
        asker.join()
        eventually(lambda: not int(team.control["pause"]))
        assert ask(job_name, Checkpoint(), PATIENCE_S)["version"] > 0
        team.settle()
