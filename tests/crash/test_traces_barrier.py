"""Stores of killed servers about supersteps, compared with the model `barrier`."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support import Rig, eventually, fork, ring_of
from support.steered import TENSORS, all_granted, push_when_told
from team import Team, send
from traces import Recorder, Trace, accepts, load, swapped, traced, with_one_more

from gadei_ps.job.faults import Role
from gadei_ps.memory import layout, segment, shm
from gadei_ps.memory.layout import (
    ALL_APPLIED,
    CHUNK,
    CONTROL,
    ENTRY,
    IDLE,
    RECORD,
    RING,
    STATE,
    Action,
    SegmentKind,
)
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Tensor

SUPERSTEPS, LEARNERS = 2, 2
Words = list[tuple[int, int]]


# -- a shard, instruction by instruction ----------------------------------------------------------

CURSOR, FINISHED, STEPS, APPLIED = range(4)
IN_SHARD = (
    *("cursor[0]", "finished[0]", "steps[0]", "applied[0]", "applied[1]", "superstep"),
    *("action[0]", "action[1]", "upto[0]", "upto[1]", "head[0]", "head[1]"),
)
SHARD = "S=1 LEARNER_LIVES"


def _words_of_a_shard(rig: Rig) -> Words:
    assert rig.memory.state
    control, state = rig.memory.control, rig.memory.state
    record = state.word(STATE, "record")
    return [
        *((record + layout.offset(RECORD, one), 8) for one in ("cursor", "supersteps", "steps")),
        *((state.word(STATE, "applied") + 8 * row, 8) for row in range(LEARNERS)),
        (control.word(CONTROL, "superstep"), 8),
        *((control.word(CONTROL, "superstep_action") + 4 * row, 4) for row in range(LEARNERS)),
        *((control.word(CONTROL, "superstep_upto") + 8 * row, 8) for row in range(LEARNERS)),
        *((rig.memory.rings[row].word(RING, "head"), 8) for row in range(LEARNERS)),
    ]


def _run_a_shard(rig: Rig, record: Recorder, chance: random.Random) -> Trace:
    """Run supersteps of two learners by two servers, of which the first is killed."""
    cursor = rig.state["record"]["cursor"]
    death = chance.randrange(1, 24)
    child = traced(rig, record)
    try:
        for _ in range(SUPERSTEPS):
            for row in chance.sample(range(LEARNERS), LEARNERS):
                rig.publish(row, rig.ones())
                record.sample()
            rig.control["superstep_action"] = Action.SKIP
            record.sample()
            rig.superstep(dict.fromkeys(range(LEARNERS), Action.APPLY))
            record.sample()
            while not rig.superstep_done() or cursor[0] != IDLE:
                if death and len(record.rows) >= death:
                    death = 0
                    record.go_on(child.pid, chance.randrange(1, 300))
                    child.kill()
                    child = traced(rig, record)
                    continue  # its last store may have been the last of the superstep
                record.go_on(child.pid)
    finally:
        child.kill()
    names = {IDLE: 0, ALL_APPLIED: 2}
    found = [(names.get(row[CURSOR], 1), *row[1:]) for row in record.rows]
    return [row for row, _ in itertools.groupby(found)]


def test_a_superstep_is_stored_as_in_its_model(
    job_name: str, recorder: Callable[..., Recorder]
) -> None:
    for number in range(Team.rounds(1)):
        name, seed = f"{job_name}-{number}", secrets.randbits(32)
        print(f"seed {seed}")  # shown if anything below fails
        tensors = [Tensor("w", (3 * CHUNK,))]
        with Rig(name, tensors, slots=2, shards=1, learners=LEARNERS, collect=True) as rig:
            load(rig)
            record = recorder(_words_of_a_shard(rig))
            trace = _run_a_shard(rig, record, random.Random(seed))
        assert trace[-1] == (0, 2, 2, 2, 2, 2, 1, 1, 2, 2, 2, 2), f"seed {seed}: {trace}"
        assert accepts("barrier", f"{SHARD} K={SUPERSTEPS}", IN_SHARD, trace), (
            f"seed {seed}: {trace}"
        )


# One superstep that nobody kills, seen after each store.
EACH_STORE_OF_A_SHARD: Trace = [
    *[(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0)],
    *[(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1), (0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1)],
    *[(1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1), (2, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1)],
    *[(2, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1), (2, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1)],
    *[(2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1), (0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)],
]


def test_a_superstep_that_is_stored_in_another_order_is_seen() -> None:
    model, each = f"{SHARD} K=1", EACH_STORE_OF_A_SHARD
    assert accepts("barrier", model, IN_SHARD, each)
    stores = (CURSOR, 2), (APPLIED, 1), (FINISHED, 1), (STEPS, 1), (CURSOR, 0)
    for first, then in itertools.pairwise(stores):
        assert not accepts("barrier", model, IN_SHARD, swapped(each, first, then)), (first, then)


# -- a job ----------------------------------------------------------------------------------------

IN_JOB = (
    *("head[0]", "head[1]", "grant[0]", "grant[1]", "wanted[0]", "wanted[1]"),
    *("member[0]", "member[1]", "superstep", "upto[0]", "upto[1]"),
    *("applied[0]", "applied[1]", "applied[2]", "applied[3]"),
    *("finished[0]", "finished[1]", "steps[0]", "steps[1]"),
)
JOB = f"K={SUPERSTEPS} LEARNER_LIVES"
WANTED = IN_JOB.index("wanted[0]")


def _words_of_a_job(team: Team, rings: list[Segment], state: Segment) -> Words:
    control = team.processes.segment
    roster, record = control.word(CONTROL, "roster"), state.word(STATE, "record")

    def entries(field: str, size: int = 8) -> Words:
        at = roster + layout.offset(ENTRY, field)
        return [(at + row * ENTRY.itemsize, size) for row in range(LEARNERS)]

    def records(field: str) -> Words:
        at = record + layout.offset(RECORD, field)
        return [(at + shard * RECORD.itemsize, 8) for shard in range(2)]

    applied = state.word(STATE, "applied")
    return [
        *((ring.word(RING, "head"), 8) for ring in rings),
        *entries("grant"),
        *entries("wanted"),
        *entries("member", 4),
        (control.word(CONTROL, "superstep"), 8),
        *((control.word(CONTROL, "superstep_upto") + 8 * row, 8) for row in range(LEARNERS)),
        *(
            (applied + 8 * (layout.MAX_LEARNERS * shard + row), 8)
            for shard in range(2)
            for row in range(LEARNERS)
        ),
        *records("supersteps"),
        *records("steps"),
    ]


def _run_a_job(team: Team, record: Callable[..., Recorder], chance: random.Random) -> Trace:
    """Two learners push and leave; the server is killed meanwhile."""
    with fork(LEARNERS, push_when_told, team.name) as pushers:
        all_granted(pushers)
        rings = [ring_of(team.name, row) for row in range(LEARNERS)]
        state = segment.attach(
            shm.segment_name(team.name, "state"), SegmentKind.STATE, writable=False
        )
        server = team.find(Role.SERVER)
        found = record(_words_of_a_job(team, rings, state))
        roster = team.control["roster"]
        with found.watching():
            for number in range(SUPERSTEPS):
                for one in pushers:
                    one.send(1)
                if number == 0:
                    time.sleep(chance.choice([0, 0, 0.0005, 0.001]))
                    send(server)
                all_granted(pushers)
            for one in pushers:
                one.send(None)
                one.join()
            eventually(lambda: not roster["member"][:LEARNERS].any())
    before = (0,) * len(IN_JOB)  # as the model begins: before they have their first grants
    return [before, *(_in_the_model(row) for row in found.rows)]


def _in_the_model(row: list[int]) -> tuple[int, ...]:
    found = list(row)
    for word in (WANTED, WANTED + 1):
        found[word] = int(row[word] != 0)
    return tuple(found)


def test_a_job_stores_what_the_model_of_its_barrier_stores(
    job_name: str, tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    for number in range(Team.rounds(1)):
        seed = secrets.randbits(32)
        print(f"seed {seed}")  # shown if anything below fails
        directory = tmp_path / str(number)
        values = np.prod(TENSORS[0]["shape"])
        with Team(f"{job_name}-{number}", directory, values, learners=0, sync="bsp") as team:
            trace = _run_a_job(team, recorder, random.Random(seed))
        ends = dict(zip(IN_JOB, trace[-1], strict=True))
        assert [ends["superstep"], ends["head[0]"], ends["member[0]"]] == [2, 2, 0], trace
        assert accepts("barrier", JOB, IN_JOB, trace, gaps=True), f"seed {seed}: {trace}"


# One superstep that nobody kills, seen after each store.
EACH_STORE_OF_A_JOB: Trace = [
    (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    (0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    (1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 0),
    (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0),
    (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    (1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
]


def test_a_job_that_stores_in_another_order_is_seen() -> None:
    each = EACH_STORE_OF_A_JOB
    assert accepts("barrier", JOB, IN_JOB, each, gaps=True)
    head, grant, superstep, finished = map(
        IN_JOB.index, ("head[1]", "grant[0]", "superstep", "finished[1]")
    )
    granted_early = with_one_more(each, (finished, 1), {grant: 2})
    carried_out_early = with_one_more(each, (head, 1), {superstep: 1})
    for wrong in (granted_early, carried_out_early):
        assert not accepts("barrier", JOB, IN_JOB, wrong, gaps=True), wrong
