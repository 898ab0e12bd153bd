"""Stores of a job's processes during a global pause, compared with the model `pause`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from support import eventually, fork, ring_of
from team import Team, push_ones, send
from traces import Recorder, Trace, accepts, with_one_more

from gadei_ps.job.faults import Role
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout, segment, shm
from gadei_ps.memory.layout import CONTROL, ENTRY, RING, STATE, SegmentKind
from gadei_ps.memory.segment import Segment

SHARDS = 2
VALUES = SHARDS * layout.CHUNK  # a shard is one chunk: a gradient is applied in one step
PUSHER, ASKER = range(2)  # rows
GRADIENTS = 2
WHO_DIES = "WHOLE LEARNER_LIVES ASKER_LIVES"
NOBODY = "SERVER_LIVES LEARNER_LIVES ASKER_LIVES"
# Not when a shard has finished a superstep: barrier.pml has these stores one by one.
WORDS = (
    *("head[0]", "head[1]", "ask[0]", "pause[0]", "pauses", "superstep"),
    *("applied[0]", "applied[1]", "applied[2]", "applied[3]"),
)
ASK, PAUSE = 2, 3


def _push(pipe: Connection, job: str) -> None:
    """The first one alone, and the others in their turns."""
    with Client(job) as client:
        pipe.send("here")
        for number in range(GRADIENTS):
            if number < 2:
                pipe.recv()
            client.wait_turn()
            push_ones(client)
            pipe.send("pushed")


def _pause(pipe: Connection, job: str) -> None:
    """Assign in each pause what was copied."""
    with Client(job) as client:
        pipe.send("here")
        while pipe.recv():
            with client.exclusive():
                pipe.send("pauses")
                pipe.recv()
                client.assign({"w": np.array(client.pull())})
            pipe.send("over")


def _words(team: Team, rings: list[Segment], state: Segment) -> list[tuple[int, int]]:
    control = team.processes.segment
    applied = state.word(STATE, "applied")
    entry = control.word(CONTROL, "roster") + ASKER * ENTRY.itemsize
    return [
        *((ring.word(RING, "head"), 8) for ring in rings),
        (rings[ASKER].word(RING, "exclusive"), 8),
        (entry + layout.offset(ENTRY, "exclusive"), 8),
        *((control.word(CONTROL, name), 8) for name in ("pauses", "superstep")),
        *(
            (applied + 8 * (layout.MAX_LEARNERS * shard + row), 8)
            for shard in range(SHARDS)
            for row in (PUSHER, ASKER)
        ),
    ]


def _in_the_model(row: list[int]) -> tuple[int, ...]:
    """Return the pause that is requested or has begun; 0: none."""
    found = list(row)
    for word in (ASK, PAUSE):
        found[word] = row[word] >> 32 if row[word] % 2**32 else 0
    return tuple(found)


def _see(found: Recorder, word: int, value: int) -> None:
    """Wait for a sample with it: of a word that changes back unseen, the trace would be none."""
    eventually(lambda: _in_the_model(found.rows[-1])[word] == value)


@pytest.mark.parametrize(("pauses", "dies"), [(2, False), (1, True)])
def test_a_job_stores_what_the_model_of_its_pauses_stores(
    pauses: int, dies: bool, job_name: str, tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    """The learner pushes all the time; perhaps the server is killed during the pause."""
    with (
        Team(job_name, tmp_path, VALUES, learners=0) as team,
        fork(1, _push, job_name) as (pusher,),
    ):
        pusher.receive()
        with fork(1, _pause, job_name) as (asker,):
            asker.receive()
            server = team.find(Role.SERVER)
            rings = [ring_of(job_name, row) for row in (PUSHER, ASKER)]
            name = shm.segment_name(job_name, "state")
            state = segment.attach(name, SegmentKind.STATE, writable=False)
            found = recorder(_words(team, rings, state))
            with found.watching():
                pusher.send("begin")
                assert pusher.receive() == "pushed"
                for number in range(1, 1 + pauses):
                    asker.send("ask")
                    if number == 1:
                        _see(found, ASK, 1)
                        pusher.send("continue")
                    assert asker.receive() == "pauses"
                    _see(found, PAUSE, number)
                    if dies:
                        send(server, signal.SIGKILL)
                    asker.send("assign")
                    assert asker.receive() == "over"
                    _see(found, PAUSE, 0)
                    _see(found, ASK, 0)
                eventually(lambda: team.version == GRADIENTS + pauses)
            asker.send(None)
            assert asker.join() == pusher.join() == 0
    trace = [_in_the_model(row) for row in found.rows]
    ends = dict(zip(WORDS, trace[-1], strict=True))
    assert (ends["head[0]"], ends["head[1]"], ends["pauses"]) == (GRADIENTS, pauses, pauses)
    # A learner whose grant has not run out takes no turns.
    model = f"K={GRADIENTS} N={pauses} NO_TURNS {WHO_DIES if dies else NOBODY}"
    assert accepts("pause", model, WORDS, trace, gaps=True), f"{trace}"


def test_a_pause_that_is_stored_in_another_order_is_seen() -> None:
    each: Trace = [
        *[(0, 0, 0, 0, 0, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0, 0, 0, 0, 0)],
        *[(1, 0, 1, 0, 0, 0, 1, 0, 0, 0), (1, 0, 1, 0, 0, 0, 1, 0, 1, 0)],
        *[(1, 0, 1, 0, 1, 0, 1, 0, 1, 0), (1, 0, 1, 1, 1, 0, 1, 0, 1, 0)],
        *[(2, 0, 1, 1, 1, 0, 1, 0, 1, 0), (2, 1, 1, 1, 1, 0, 1, 0, 1, 0)],
        *[(2, 1, 1, 1, 1, 1, 1, 0, 1, 0), (2, 1, 1, 1, 1, 1, 1, 1, 1, 1)],
        *[(2, 1, 0, 1, 1, 1, 1, 1, 1, 1), (2, 1, 0, 0, 1, 1, 1, 1, 1, 1)],
        *[(2, 1, 0, 0, 1, 1, 2, 1, 1, 1), (2, 1, 0, 0, 1, 1, 2, 1, 2, 1)],
    ]
    model = f"K={GRADIENTS} N=1 NO_TURNS {NOBODY}"
    assert accepts("pause", model, WORDS, each, gaps=True)
    pause, pauses, applied = map(WORDS.index, ("pause[0]", "pauses", "applied[0]"))
    notified_early = with_one_more(each, (pauses, 1), {pause: 1})
    begins = each.index((2, 0, 1, 1, 1, 0, 1, 0, 1, 0))
    applied_in_it = [  # the gradient that is published in the pause
        row if number <= begins else (*row[:applied], 2, *row[applied + 1 :])
        for number, row in enumerate(each)
    ]
    for wrong in (notified_early, applied_in_it):
        assert not accepts("pause", model, WORDS, wrong, gaps=True), wrong
