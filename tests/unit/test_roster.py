"""Which rows the watchdog watches, lets go and frees, on a job's real segments."""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Iterator

import pytest
import structlog
from support import Rig

from gadei_ps.errors import ControlError, Evicted
from gadei_ps.machine import process
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Gone
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Tensor
from gadei_ps.watchdog.roster import TAKE_S, Roster

ROWS = 4


class Watched:
    """A roster of learners that are one process, which has mapped no ring."""

    def __init__(self, rig: Rig, pid: int) -> None:
        self.rig, self.freed = rig, list[Segment]()
        for entry in rig.roster[:ROWS]:
            entry["pid"], entry["pid_start"] = pid, process.start_ticks(pid)
        log = structlog.get_logger()
        self.roster = Roster(rig.memory, selectors.DefaultSelector(), log, 0.0, self.freed.append)


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as child:
        yield child.pid
        child.kill()


@pytest.fixture
def watched(job_name: str, pid: int) -> Iterator[Watched]:
    with Rig(job_name, [Tensor("w", (10,))], learners=ROWS) as rig:
        made = Watched(rig, pid)
        yield made
        made.roster.close()


def test_who_is_adopted(watched: Watched) -> None:
    entries = watched.rig.roster
    entries[1]["wanted"] = 0  # leaving, though its process lives
    entries[2]["wanted"] = 9  # its row was being given away
    entries[3]["pid_start"] -= 1  # dead, and its pid is another's
    watched.roster.adopt(0.0)
    assert watched.roster.rows == [0]
    assert entries["wanted"][:ROWS].tolist() == [1, 0, 0, 0]
    assert entries["gone"][3] == Gone.DIED
    assert watched.rig.control["learner_deaths"] == 1


def test_a_place_that_was_never_taken(watched: Watched) -> None:
    """Its watchdog died before it answered; the learner lives, and has another place by now."""
    mine = {"pid": os.getpid(), "pid_start": process.start_ticks(os.getpid())}
    for field, value in mine.items():  # this process has all rings mapped
        watched.rig.roster[1][field] = value
    watched.rig.memory.rings[2].view(layout.RING)["detached"] = 1
    watched.roster.adopt(100.0)
    watched.roster.look(100.0 + TAKE_S - 1)
    assert watched.roster.rows == [0, 1, 3]
    watched.roster.look(100.0 + TAKE_S)
    assert watched.roster.rows == [1]
    assert watched.rig.roster["wanted"][:ROWS].tolist() == [0, 2, 0, 0]
    assert watched.rig.control["learner_deaths"] == 0


def test_who_may_leave(watched: Watched, pid: int) -> None:
    watched.roster.adopt(0.0)
    for generation in (0, 2, 9):
        with pytest.raises(Evicted):
            watched.roster.detach(pid, 0, generation)
    with pytest.raises(ControlError, match="only itself"):
        watched.roster.detach(os.getpid(), 0, 1)
    for row in (-1, len(watched.rig.roster)):
        with pytest.raises(ControlError, match="no row"):
            watched.roster.detach(pid, row, 1)
    assert watched.roster.rows == [0, 1, 2, 3]
    watched.roster.detach(pid, 0, 1)
    assert watched.roster.rows == [1, 2, 3]
    assert (watched.rig.roster[0]["wanted"], watched.rig.roster[0]["gone"]) == (0, Gone.DETACHED)
    with pytest.raises(Evicted):
        watched.roster.detach(pid, 0, 1)
    with pytest.raises(Evicted):
        watched.roster.detach(pid, 0, 0)


def test_a_connection_of_an_earlier_learner(watched: Watched) -> None:
    """Its row has another learner by now, which has not mapped its ring yet."""
    watched.roster.adopt(0.0)
    watched.roster.look_at(1, 1)
    assert watched.roster.rows == [0, 1, 2, 3]
    watched.roster.look_at(1, 2)
    assert watched.roster.rows == [0, 2, 3]
    assert watched.rig.control["learner_deaths"] == 1
    watched.roster.look_at(1, 2)
    assert watched.rig.control["learner_deaths"] == 1


def test_what_is_freed(watched: Watched) -> None:
    entries, rings = watched.rig.roster, watched.rig.memory.rings
    watched.roster.adopt(0.0)
    watched.roster.detach(int(entries[0]["pid"]), 0, 1)
    watched.roster.free_rows()
    assert sorted(rings) == [0, 1, 2, 3]
    assert watched.roster.leaving
    for row in (0, 1):  # the server has refused the ring of the second
        entries[row]["retired"] = entries[row]["generation"]
    watched.roster.free_rows()
    assert sorted(rings) == watched.roster.rows == [2, 3]
    assert entries[1]["gone"] == Gone.DAMAGED
    assert len(watched.freed) == 2
