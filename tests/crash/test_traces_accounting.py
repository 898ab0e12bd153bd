"""Stores of killed servers about statistics and batches, compared with the model `accounting`."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
from support import Rig, eventually
from team import Team
from traces import Recorder, Trace, accepts, load, swapped, traced

from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, IDLE, NO_BATCH, RECORD, RING, STATE, Work
from gadei_ps.memory.weights import Tensor

BATCHES, LEARNERS = 3, 2
MODEL = f"B={BATCHES} AHEAD=1 KILLS=2"
# The processor watches the first four; the others are seen with the next of those.
IN_MODEL = (
    *("open", "now.accounted", "idle", "work_head[0]"),
    *("now.counted[0]", "now.counted[1]", "now.out[0]", "now.out[1]"),
    *("now.handed[0]", "now.handed[1]", "now.next", "now.agains", "now.past"),
    *("applied[0]", "applied[1]", "tail[0]", "tail[1]", "work_head[1]", "drained"),
)
MARK = 7  # in `drained`: the end
OPEN, ACCOUNTED, AT_REST, WORK_HEAD = range(4)
OUT, NEXT = IN_MODEL.index("now.out[0]"), IN_MODEL.index("now.next")


def _words(rig: Rig) -> list[tuple[int, int]]:
    """Return address and size of each word, as in IN_MODEL."""
    assert rig.memory.state
    control, state = rig.memory.control, rig.memory.state
    roster, record = control.word(CONTROL, "roster"), state.word(STATE, "record")

    def entries(field: str) -> list[tuple[int, int]]:
        at = roster + layout.offset(ENTRY, field)
        return [(at + row * ENTRY.itemsize, 4 if field == "drained" else 8) for row in (0, 1)]

    def rings(field: str, size: int) -> list[tuple[int, int]]:
        return [(rig.memory.rings[row].word(RING, field), size) for row in (0, 1)]

    return [
        (state.word(STATE, "journal"), 8),
        (record + layout.offset(RECORD, "accounted"), 8),
        (record + layout.offset(RECORD, "cursor"), 8),
        rings("work_head", 4)[0],
        *entries("applied"),
        *entries("outstanding"),
        *entries("handed"),
        (control.word(CONTROL, "next"), 8),
        (control.word(CONTROL, "requeued"), CONTROL.fields["requeued"][0].itemsize),
        (control.word(CONTROL, "past_applied"), 8),
        *((state.word(STATE, "applied") + 8 * row, 8) for row in (0, 1)),
        *rings("tail", 8),
        rings("work_head", 4)[1],
        entries("drained")[1],
    ]


def _in_the_model(row: list[int]) -> tuple[int, ...]:
    found = list(row)
    found[OPEN] = int(row[OPEN] != 0)
    for word in (OUT, OUT + 1):
        found[word] = 0 if row[word] == NO_BATCH else row[word] + 1
    found[AT_REST] = int(row[AT_REST] == IDLE)
    return tuple(found)


class Learners(threading.Thread):
    """Two learners take the batches that they find in their rings, and answer each of them.

    The second one is killed when it has taken as many as ordered. When all is done, a mark is
    stored, and the server stopped, so that the recorder sees it.
    """

    def __init__(self, rig: Rig, takes: int) -> None:
        super().__init__()
        self.rig, self.takes = rig, takes
        self.server = 0  # its pid
        self.ended = False

    def run(self) -> None:
        lives = [True, True]
        entry = self.rig.roster[1]
        while not self.ended:
            for row in np.flatnonzero(lives):
                lives[row] = self._learn(row, self.takes if row else BATCHES)
            if not lives[1]:
                entry["wanted"] = 0
                self.rig.bell()
            if self.rig.control["work"] == Work.DONE and bool(entry["drained"]) != lives[1]:
                entry["drained"] = MARK
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.server, signal.SIGSTOP)
            time.sleep(0.0005)

    def _learn(self, row: int, takes: int) -> bool:
        """Learn, and return whether it lives on."""
        ring = self.rig.ring(row)
        if int(ring["work_tail"]) < int(ring["work_head"]):
            if int(ring["work_tail"]) == takes:
                return False
            batch = int(ring["work_items"][int(ring["work_tail"]) % layout.AHEAD])
            ring["work_tail"] += 1
            eventually(lambda: ring["head"] == ring["tail"]["value"][0])
            self.rig.publish(row, self.rig.ones(), batch=batch)
        return True


def _run(rig: Rig, record: Recorder, chance: random.Random) -> Trace:
    """All batches are answered; two servers and perhaps a learner are killed meanwhile."""
    deaths = sorted(chance.sample(range(1, 24), 2))
    learners = Learners(rig, takes=chance.randrange(BATCHES))
    server = traced(rig, record)
    learners.server = server.pid
    learners.start()
    try:
        while record.rows[-1][-1] != MARK:
            record.go_on(server.pid)
            if deaths and len(record.rows) >= deaths[0]:
                deaths.pop(0)
                record.go_on(server.pid, chance.randrange(1, 300))
                server.kill()
                server = traced(rig, record)
                learners.server = server.pid
    finally:
        learners.ended = True
        learners.join()
        server.kill()
    found = [_in_the_model(row) for row in record.rows if row[-1] != MARK]
    return [row for row, _ in itertools.groupby(found)]


def _traced_accounting(job: str, record: Callable[..., Recorder], seed: int) -> Trace:
    how = {"slots": 2, "shards": 1, "ahead": 1, "learners": LEARNERS}
    with Rig(job, [Tensor("w", (4,))], **how) as rig:
        load(rig)
        rig.control["batches"], rig.control["epochs"] = BATCHES, 1
        rig.control["work"] = Work.WORKING
        return _run(rig, record(_words(rig)), random.Random(seed))


def test_accounts_change_as_in_their_model(
    job_name: str, recorder: Callable[..., Recorder]
) -> None:
    for number in range(Team.rounds(1)):
        seed = secrets.randbits(32)
        print(f"seed {seed}")  # shown if anything below fails
        trace = _traced_accounting(f"{job_name}-{number}", recorder, seed)
        assert trace[-1][NEXT] == BATCHES, f"seed {seed}: {trace}"
        assert accepts("accounting", MODEL, IN_MODEL, trace, gaps=True), f"seed {seed}: {trace}"


# Until the first gradient is accounted for and the learner has its next batch; nobody is killed.
EACH_STORE: Trace = [
    (0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    (1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    (0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0),
    (0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0),
    (0, 0, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0),
    (1, 0, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0),
    (1, 1, 0, 1, 1, 0, 2, 0, 2, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0),
    (0, 1, 0, 1, 1, 0, 2, 0, 2, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0),
    (0, 1, 1, 1, 1, 0, 2, 0, 2, 0, 2, 0, 0, 1, 0, 0, 0, 0, 0),
    (0, 1, 1, 2, 1, 0, 2, 0, 2, 0, 2, 0, 0, 1, 0, 0, 0, 0, 0),
    (0, 1, 1, 2, 1, 0, 2, 0, 2, 0, 2, 0, 0, 1, 0, 1, 0, 0, 0),
]


def test_accounts_that_change_in_another_order_are_seen() -> None:
    assert accepts("accounting", MODEL, IN_MODEL, EACH_STORE, gaps=True)
    shown_before_commit = swapped(EACH_STORE, (OPEN, 0), (WORK_HEAD, 1))
    accounted_after_commit = swapped(EACH_STORE, (ACCOUNTED, 1), (OPEN, 0))
    shown_before_it_counts = swapped(EACH_STORE, (AT_REST, 1), (WORK_HEAD, 2))
    for wrong in (shown_before_commit, accounted_after_commit, shown_before_it_counts):
        assert not accepts("accounting", MODEL, IN_MODEL, wrong, gaps=True), wrong
