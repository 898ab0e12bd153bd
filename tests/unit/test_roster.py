"""Rows that the watchdog watches, evicts and frees, on a job's real segments."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Iterator

import pytest
import structlog
from support import PATIENCE_S, Rig
from support.words import at_each_line, words

from gadei_ps.errors import ControlError, Evicted
from gadei_ps.machine import process
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Gone
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Tensor
from gadei_ps.watchdog import roster
from gadei_ps.watchdog.roster import RING_TIMEOUT_S, Roster

ROWS = 4


class Watched:
    """A roster of learners that are one process, which has mapped no ring."""

    def __init__(self, rig: Rig, pid: int) -> None:
        self.rig, self.freed = rig, list[Segment]()
        self.selector = selectors.DefaultSelector()
        for entry in rig.roster[:ROWS]:
            entry["pid"], entry["pid_start"] = pid, process.start_ticks(pid)
        log = structlog.get_logger()
        self.roster = Roster(rig.memory, self.selector, log, 0.0, self.freed.append)

    def hear(self) -> None:
        """Handle what the selector reports."""
        for key, mask in self.selector.select(PATIENCE_S):
            key.data(mask)


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


def test_a_row_without_a_ring(watched: Watched) -> None:
    """Refuse it: its dead watchdog has given it away or was about to."""
    entries = watched.rig.roster
    for row in (0, 1):
        watched.rig.memory.remove_ring(row)
    entries[1]["wanted"] = 9
    watched.roster.adopt(0.0)
    assert watched.roster.rows == [2, 3]
    assert entries["wanted"][:ROWS].tolist() == [0, 0, 3, 4]


def test_a_new_learner(watched: Watched) -> None:
    """Check that its row never counts as its own with words of the learner before."""
    entries, memory = watched.rig.roster, watched.rig.memory
    watched.roster.adopt(0.0)
    row = ROWS  # of a learner that has left
    used = entries[row]
    for field in ("generation", "served", "retired"):
        used[field] = 3
    for field in ("gone", "drained", "grant", "obsolete", "handed", "pid", "pid_start", "applied"):
        used[field] = 8
    for field in ("dropped", "refused", "samples", "version", "clock", "unasked", "loss"):
        used[field] = 8
    for field in ("staleness_sum", "staleness_max", "histogram", "reason", "outstanding"):
        used[field] = 8
    used["name"] = b"before"
    watched.rig.control["ring_inode"][row] = 8
    watched.rig.control["has_buffers"][row] = 1
    coming = watched.roster.begin(os.getpid(), "a" * 40)
    assert (coming.row, coming.generation) == (row, ROWS + 1)
    ring = memory.make_ring(row, coming.generation)
    seen = []

    def look() -> None:
        control = watched.rig.control
        found = words(used) | {"loss": str(used["loss"])}
        inode, buffers = int(control["ring_inode"][row]), int(control["has_buffers"][row])
        seen.append((found, inode, buffers, int(ring.header["magic"])))

    with at_each_line(look, roster):
        watched.roster.admit(coming, ring)
    entry = {
        "generation": ROWS + 1,
        "wanted": ROWS + 1,
        "pid": os.getpid(),
        "pid_start": process.start_ticks(os.getpid()),
        "name": b"a" * 31,
        "served": 3,
        "retired": 3,
        "outstanding": layout.NO_BATCH,
        "loss": "nan",  # it comes with the first gradient
    }
    whole = entry, ring.inode, 0, layout.MAGIC
    assert seen[-1] == whole
    assert all(one == whole for one in seen if one[0]["generation"] == ROWS + 1)
    assert {one[0]["generation"] for one in seen} == {3, ROWS + 1}
    assert watched.roster.rows == [0, 1, 2, 3, row]
    assert memory.rings[row] is ring


def test_a_learner_dies(watched: Watched, pid: int) -> None:
    watched.roster.adopt(0.0)
    os.kill(pid, signal.SIGKILL)
    while watched.roster.rows:
        watched.hear()
    assert watched.rig.control["learner_deaths"] == ROWS
    assert (watched.rig.roster["wanted"] == 0).all()
    assert (watched.rig.roster["gone"][:ROWS] == Gone.DIED).all()


def test_a_place_that_was_never_taken(watched: Watched) -> None:
    """Free it: its watchdog died before it answered, and the learner has another place by now."""
    mine = {"pid": os.getpid(), "pid_start": process.start_ticks(os.getpid())}
    for field, value in mine.items():  # this process has all rings mapped
        watched.rig.roster[1][field] = value
    watched.rig.memory.rings[2].view(layout.RING)["detached"] = 1
    watched.roster.adopt(100.0)
    watched.roster.tick(100.0 + RING_TIMEOUT_S - 1)
    assert watched.roster.rows == [0, 1, 3]
    watched.roster.tick(100.0 + RING_TIMEOUT_S)
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
    """Ignore it: its row has another learner by now, which has not mapped its ring yet."""
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
