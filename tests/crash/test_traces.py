"""Stores of killed processes, compared with the models: each is a trace of a model.

The words of the protocol are watched while processes of a job are killed. SPIN then looks for a run
of the model in which the model's words have the same values in the same order (native/verify/run).
So stores that the code does in another order than its model, or that the model lacks, are found.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Pusher, Rig, eventually
from team import Team, push_ones, send
from traces import Recorder, Trace, accepts, load, swapped, traced, with_one_more

from gadei_ps.job.faults import Role
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout, shm
from gadei_ps.memory.layout import ALL_APPLIED, CHUNK, CONTROL, ENTRY, IDLE, RECORD, RING, STATE
from gadei_ps.memory.weights import Tensor

FRAMES, SLOTS, CHUNKS = 3, 2, 3


# -- a shard, instruction by instruction ----------------------------------------------------------

CURSOR, APPLIED, TAIL, TORN, STEPS, HEAD = range(6)
IN_APPLY = ("cursor[0]", "applied[0]", "tail[0]", "torn[0]", "steps[0]", "head")
APPLY = f"N={SLOTS} F={FRAMES} C={CHUNKS} KILLS=2 LOSE LEARNER_LIVES"
MODELS_IDLE, MODELS_APPLIED = 15, 2 * CHUNKS


def _words_of_a_shard(rig: Rig) -> list[tuple[int, int]]:
    assert rig.memory.state
    ring, state = rig.memory.rings[0], rig.memory.state
    record = state.word(STATE, "record")
    cursor, torn, steps = [
        record + layout.offset(RECORD, field) for field in ("cursor", "torn", "steps")
    ]
    applied, tail = state.word(STATE, "applied"), ring.word(RING, "tail")
    # `steps` after what is watched: it is seen to change with the next of those.
    return [(one, 8) for one in (cursor, applied, tail, torn, steps, ring.word(RING, "head"))]


def _run_a_shard(rig: Rig, record: Recorder, chance: random.Random, *, lose: bool) -> Trace:
    """Apply frames by servers, two of which are killed. lose: the last one becomes zeros."""
    memory, at = rig.memory.rings[0], int(rig.ring(0)["slots_at"])
    slots = memory.array(np.uint8, memory.size - at, at)
    tail, cursor = rig.ring(0)["tail"]["value"], rig.state["record"]["cursor"]
    lost_at = chance.choice([0, 1, 3, 5])
    deaths = sorted(chance.sample(range(1, 24), 2))
    published = 0
    child = traced(rig, record)
    try:
        while tail[0] < FRAMES:
            waiting = published - int(tail[0])
            if published < FRAMES and waiting < SLOTS and (not waiting or chance.random() < 0.2):
                rig.publish(0, rig.ones())
                record.sample()
                published += 1
            if lose and (tail[0], cursor[0]) == (FRAMES - 1, lost_at):
                slots[:] = 0
            if deaths and len(record.rows) >= deaths[0]:
                deaths.pop(0)
                record.go_on(child.pid, chance.randrange(1, 300))
                child.kill()
                child = traced(rig, record)
                continue  # its last store may have been the last of all that is published
            record.go_on(child.pid)
    finally:
        child.kill()
    names = {IDLE: MODELS_IDLE, ALL_APPLIED: MODELS_APPLIED}
    return [tuple(names.get(value, value) for value in row) for row in record.rows]


@pytest.mark.parametrize("lose", [False, True])
def test_a_shard_stores_what_its_model_stores(
    lose: bool, job_name: str, recorder: Callable[..., Recorder]
) -> None:
    for number in range(Team.rounds(1)):
        name, seed = f"{job_name}-{number}", secrets.randbits(32)
        print(f"seed {seed}")  # shown if anything below fails
        chance = random.Random(seed)
        with Rig(name, [Tensor("w", (CHUNKS * CHUNK,))], slots=SLOTS, shards=1) as rig:
            load(rig)
            record = recorder(_words_of_a_shard(rig))
            trace = _run_a_shard(rig, record, chance, lose=lose)
        ends = (MODELS_IDLE, FRAMES, FRAMES, lose, FRAMES, FRAMES)
        assert trace[-1] == ends, f"seed {seed}: {trace}"
        assert accepts("apply", APPLY, IN_APPLY, trace), f"seed {seed}: {trace}"


# Two gradients of a shard that nobody kills, seen after each store; the second was published while
# the first was applied.
EACH_STORE_OF_A_SHARD: Trace = [
    *[(15, 0, 0, 0, 0, 0), (15, 0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 1), (1, 0, 0, 0, 0, 1)],
    *[(1, 0, 0, 0, 0, 2), (3, 0, 0, 0, 0, 2), (5, 0, 0, 0, 0, 2), (6, 0, 0, 0, 0, 2)],
    *[(6, 1, 0, 0, 0, 2), (15, 1, 0, 0, 1, 2), (15, 1, 1, 0, 1, 2), (0, 1, 1, 0, 1, 2)],
    *[(1, 1, 1, 0, 1, 2), (3, 1, 1, 0, 1, 2), (5, 1, 1, 0, 1, 2), (6, 1, 1, 0, 1, 2)],
    *[(6, 2, 1, 0, 1, 2), (15, 2, 1, 0, 2, 2), (15, 2, 2, 0, 2, 2)],
]


def test_a_shard_that_stores_in_another_order_is_seen() -> None:
    assert accepts("apply", APPLY, IN_APPLY, EACH_STORE_OF_A_SHARD)
    applied = swapped(EACH_STORE_OF_A_SHARD, (CURSOR, MODELS_APPLIED), (APPLIED, 2))
    assert not accepts("apply", APPLY, IN_APPLY, applied)
    released = swapped(EACH_STORE_OF_A_SHARD, (CURSOR, MODELS_IDLE), (TAIL, 2))
    assert not accepts("apply", APPLY, IN_APPLY, released)


# -- the times of an iteration --------------------------------------------------------------------

OLD, NEW = (7, 1.0, 2.0, 1), (1, 3.0, 4.0, 1)  # sequence, started, finished, action


def test_times_are_never_seen_half_written(
    job_name: str, recorder: Callable[..., Recorder]
) -> None:
    """Replace the times of an older iteration. If the number reads the same twice and is not 0,
    the times read between belong to it."""
    with Rig(job_name, [Tensor("w", (4,))], slots=SLOTS, shards=1) as rig:
        load(rig)
        assert rig.memory.state
        run = rig.state["runs"][0][0]
        run["sequence"], run["started"], run["finished"], run["action"] = OLD
        at = rig.memory.state.word(STATE, "runs")
        words = [
            (at + layout.offset(layout.RUN, field), layout.RUN.fields[field][0].itemsize)
            for field in ("sequence", "started", "finished", "action")
        ]
        record = recorder(words)
        child = traced(rig, record)
        try:
            rig.publish(0, rig.ones(), started=NEW[1], finished=NEW[2])
            while record.rows[-1][0] != NEW[0]:
                record.go_on(child.pid)
        finally:
            child.kill()
    rows = [_times(row) for row in record.rows]
    assert {one for one in rows if one[0]} == {OLD, NEW}


def _times(row: list[int]) -> tuple[int, float, float, int]:
    started, finished = np.array(row[1:3], np.uint64).view(np.float64).tolist()
    return row[0], started, finished, row[3]


# -- a row of the roster --------------------------------------------------------------------------

GENERATION, WANTED, SERVED, RETIRED, DRAINED, BROKEN = range(6)
IN_ROSTER = ("generation", "wanted", "served", "retired", "drained", "broken")
BRIEF = ("wanted", "drained")  # until the watchdog has seen them


def _words_of_a_row(team: Team, row: int) -> list[tuple[int, int]]:
    entry = team.processes.segment.word(CONTROL, "roster") + row * ENTRY.itemsize
    return [
        (entry + layout.offset(ENTRY, field), ENTRY.fields[field][0].itemsize)
        for field in IN_ROSTER
    ]


def _push_some(client: Client) -> None:
    faulthandler.disable()  # if its ring goes, it dies of that
    if client.published < 5:
        push_ones(client)
    else:
        time.sleep(0.01)


@contextlib.contextmanager
def _learner(team: Team) -> Iterator[Pusher]:
    """Push, report that all pushes have returned, and wait for the kill."""
    one = Pusher(team.name, _push_some)
    try:
        eventually(lambda: one.published == 5)
        yield one
    finally:
        one.kill()


def _server_dies(team: Team, entry: np.void) -> None:
    with _learner(team):
        send(team.find(Role.SERVER))
    eventually(lambda: int(entry["retired"]) == 1)
    with _learner(team):
        pass
    eventually(lambda: int(entry["retired"]) == 2)


def _watchdog_dies(team: Team, entry: np.void) -> None:
    with _learner(team):
        send(team.find(Role.WATCHDOG))
    eventually(lambda: int(entry["retired"]) == 1)
    team.watch()
    with _learner(team):
        pass
    eventually(lambda: int(entry["retired"]) == 2)


def _learner_truncates(team: Team, entry: np.void) -> None:
    with _learner(team) as one:
        os.truncate(shm.SHM / one.ring.name[1:], 0)
        eventually(lambda: int(entry["retired"]) == 1)
    with _learner(team):
        pass
    eventually(lambda: int(entry["retired"]) == 2)


@pytest.mark.parametrize(
    ("happens", "defines"),
    [
        (_server_dies, "WHOLE WATCHDOG_LIVES ALL_PUBLISH"),
        (_watchdog_dies, "SERVER_LIVES ALL_PUBLISH"),
        (_learner_truncates, "SERVER_LIVES WATCHDOG_LIVES TRUNCATE"),
    ],
)
def test_a_row_changes_as_in_its_model(
    happens: Callable[[Team, np.void], None],
    defines: str,
    job_name: str,
    tmp_path: Path,
    recorder: Callable[..., Recorder],
) -> None:
    """Two learners use it, one after the other; with the deaths of the model's run."""
    with Team(job_name, tmp_path, learners=0) as team:
        record = recorder(_words_of_a_row(team, 0))
        with record.watching():
            happens(team, team.control["roster"][0])
    trace = [tuple(row) for row in record.rows]
    words = IN_ROSTER if "TRUNCATE" in defines else IN_ROSTER[:BROKEN]
    trace = [state[: len(words)] for state in trace]
    assert trace[-1][RETIRED] == 2
    assert accepts("roster", defines, words, trace, gaps=True, brief=BRIEF), trace


# Two learners of a row, one after the other, seen after each store; as test_a_row_changes_... sees
# them where it misses none.
EACH_STORE: Trace = [
    *[(0, 0, 0, 0, 0), (0, 1, 0, 0, 0), (1, 1, 0, 0, 0), (1, 1, 1, 0, 0), (1, 0, 1, 0, 0)],
    *[(1, 0, 1, 0, 1), (1, 0, 1, 1, 1), (1, 0, 1, 1, 0), (1, 2, 1, 1, 0), (2, 2, 1, 1, 0)],
    *[(2, 2, 2, 1, 0), (2, 0, 2, 1, 0), (2, 0, 2, 1, 1), (2, 0, 2, 2, 1)],
]


@pytest.mark.parametrize(
    ("store", "values"),
    [
        ((GENERATION, 2), {GENERATION: 2, WANTED: 0}),
        ((RETIRED, 1), {RETIRED: 1, DRAINED: 0}),
    ],
    ids=["generation before wanted", "retired before drained"],
)
def test_a_row_that_changes_otherwise_is_noticed(
    store: tuple[int, int], values: dict[int, int]
) -> None:
    words, defines = IN_ROSTER[:BROKEN], "SERVER_LIVES WATCHDOG_LIVES"
    how: dict[str, Any] = {"gaps": True, "brief": BRIEF}
    assert accepts("roster", defines, words, EACH_STORE, **how)
    unseen = [state for number, state in enumerate(EACH_STORE) if number not in (5, 6)]
    assert accepts("roster", defines, words, unseen, **how), "nobody looked while it was drained"
    wrong = with_one_more(EACH_STORE, store, values)
    assert not accepts("roster", defines, words, wrong, **how)
