"""Stores of a job's processes, compared with the models `learner`, `sleep` and `closing`."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from support import eventually, fork, ring_of
from support.processes import Stopped
from team import Team, push_ones, send
from traces import Recorder, Trace, accepts, with_one_more

from gadei_ps.commands import jobs
from gadei_ps.errors import GadeiError
from gadei_ps.job.faults import Role
from gadei_ps.learners import devices
from gadei_ps.learners.client import Client
from gadei_ps.learners.pipeline import Pipeline
from gadei_ps.memory import layout, segment, shm
from gadei_ps.memory.layout import CONTROL, ENTRY, RING, STATE, SegmentKind, Stop
from gadei_ps.memory.segment import Segment

VALUES = 300  # in one chunk: a gradient is applied in one step, as in the models
FRAMES = 4


def _state(team: Team) -> Segment:
    """Map the state; it stays mapped as long as it is kept."""
    return segment.attach(shm.segment_name(team.name, "state"), SegmentKind.STATE, writable=False)


def _tails(ring: Segment, shards: int) -> list[tuple[int, int]]:
    at, size = ring.word(RING, "tail"), RING.fields["tail"][0].base.itemsize
    return [(at + size * shard, 8) for shard in range(shards)]


def _applied(state: Segment, shards: int) -> list[tuple[int, int]]:
    """Return the applied count of the first row."""
    at = state.word(STATE, "applied")
    return [(at + 8 * layout.MAX_LEARNERS * shard, 8) for shard in range(shards)]


# -- the threads of the paper's learner -----------------------------------------------------------

IN_LEARNER = "head", "tail", "writes", "version"


def _compute_and_push(pipe: Connection, job: str) -> None:
    """Push, and request weights until all of that is in them."""
    with Client(job) as client, Pipeline(client, devices.choose("host")) as pipeline:
        pipe.send("here")
        pipe.recv()
        for _ in range(FRAMES):
            pipeline.weights()
            pipeline.push({"w": np.ones(VALUES, np.float32)})
        eventually(lambda: pipeline.weights() and pipeline.version == FRAMES)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_pipeline_and_its_server(
    slots: int, job_name: str, tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    with (
        Team(job_name, tmp_path, VALUES, learners=0, shards=1, slots=slots) as team,
        fork(1, _compute_and_push, job_name) as (one,),
    ):
        one.receive()
        control, ring = team.processes.segment, ring_of(job_name, 0)
        sequence = control.word(CONTROL, "shard") + layout.offset(layout.SHARD, "sequence")
        words = [
            *((ring.word(RING, "head"), 8), *_tails(ring, 1)),
            *((sequence, 8), (control.word(CONTROL, "version"), 8)),
        ]
        found = recorder(words)
        with found.watching():
            one.send("go")
            assert one.join() == 0
    trace = [tuple(row) for row in found.rows]
    assert trace[-1] == (FRAMES, FRAMES, 2 * FRAMES, FRAMES)
    assert accepts("learner", f"N={slots} F={FRAMES}", IN_LEARNER, trace, gaps=True), trace


def test_weights_that_are_written_in_another_order_are_seen() -> None:
    head, tail, writes, version = range(4)
    each: Trace = [(0, 0, 0, 0), (1, 0, 0, 0), (1, 0, 1, 0), (1, 0, 2, 0), (1, 0, 2, 1)]
    each += [(1, 1, 2, 1), (2, 1, 2, 1)]
    model = "N=1 F=2"
    assert accepts("learner", model, IN_LEARNER, each, gaps=True)
    for store, values in (
        ((writes, 1), {version: 1}),  # a gradient counts before it is in the weights
        ((writes, 2), {version: 1}),
        ((version, 1), {tail: 1}),  # a slot is free before its gradient counts
        ((writes, 1), {head: 2}),  # a slot is used twice
    ):
        wrong = with_one_more(each, store, values)
        assert not accepts("learner", model, IN_LEARNER, wrong, gaps=True), wrong


# -- sleep and wake -------------------------------------------------------------------------------

IN_SLEEP = "head", "released", "tail[0]", "tail[1]", "applied[0]", "applied[1]"


def _push_and_wait(pipe: Connection, job: str) -> None:
    """The last one of three waits for a slot."""
    with Client(job) as client:
        push_ones(client)
        pipe.send("here")
        pipe.recv()
        for _ in range(2):
            push_ones(client)
        pipe.send("pushed")
        pipe.recv()


def test_a_learner_that_sleeps_is_woken_as_in_its_model(
    job_name: str, tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    with (
        Team(job_name, tmp_path, 2 * layout.CHUNK, learners=0, shards=2, slots=1) as team,
        fork(1, _push_and_wait, job_name) as (one,),
    ):
        one.receive()
        ring, state = ring_of(job_name, 0), _state(team)
        words = [
            *((ring.word(RING, "head"), 8), (ring.word(RING, "released"), 4)),
            *(*_tails(ring, 2), *_applied(state, 2)),
        ]
        sleeps, control = ring.view(RING), team.processes.segment.view(CONTROL)
        # Shards that look up the ring wake its learner, which the model does only after a death.
        eventually(lambda: (sleeps["tail"]["value"][:2] == 1).all() and control["sleepers"] == 3)
        found = recorder(words)  # behind the first gradient: this takes the first sample
        with found.watching():
            with Stopped(team.find(Role.SERVER).pid):
                one.send("go")
                eventually(lambda: sleeps["waits_slot"])
            assert one.receive() == "pushed"
            eventually(lambda: (sleeps["tail"]["value"][:2] == 3).all())
        one.send("leave")
    rows = np.array(found.rows)
    trace = [tuple(row) for row in (rows - rows[0]).tolist()]
    assert trace[-1][0] == 2 and trace[-1][1], trace
    assert accepts("sleep", "SHARD_LIVES", IN_SLEEP, trace, gaps=True), trace


def test_wakes_in_another_order_are_seen() -> None:
    head, released, tail, _, applied, _ = range(6)
    each: Trace = [(0, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0), (1, 0, 0, 0, 1, 0), (1, 0, 1, 0, 1, 0)]
    each += [(1, 1, 1, 0, 1, 0), (1, 1, 1, 0, 1, 1), (1, 1, 1, 1, 1, 1), (1, 2, 1, 1, 1, 1)]
    each += [(2, 2, 1, 1, 1, 1)]
    assert accepts("sleep", "SHARD_LIVES", IN_SLEEP, each, gaps=True)
    for store, values in (
        ((applied, 1), {released: 1}),  # woken before the slot is free
        ((tail, 1), {released: 1}),
        ((applied, 1), {tail: 1}),
        ((tail, 1), {head: 2}),
    ):
        wrong = with_one_more(each, store, values)
        assert not accepts("sleep", "SHARD_LIVES", IN_SLEEP, wrong, gaps=True), wrong


# -- the end of a job -----------------------------------------------------------------------------

IN_CLOSING = "stop", "wanted", "retired", "head", "applied", "checkpoint"
STOP, WANTED, RETIRED = range(3)
STOPS = {Stop.GO: 0, Stop.DRAIN: 1, Stop.NOW: 1, Stop.CLOSED: 2}


def _in_closing(row: list[int]) -> tuple[int, ...]:
    found = list(row)
    found[STOP] = STOPS[Stop(row[STOP])]
    found[WANTED] = int(row[WANTED] != 0)
    found[RETIRED] = int(row[RETIRED] != 0)
    return tuple(found)


def _push_three(pipe: Connection, job: str) -> None:
    """The last one while the job stops."""
    client = Client(job)
    pipe.send("here")
    for _ in range(3):
        pipe.recv()
        try:
            push_ones(client)
        except GadeiError:
            break
        pipe.send("pushed")
    signal.pause()  # it does other things


@pytest.mark.parametrize("watchdogs", [1, 2])
def test_a_job_ends_as_in_its_model(
    watchdogs: int, job_name: str, tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    """A learner pushes while it is stopped; the first of two watchdogs dies meanwhile."""
    with (
        Team(job_name, tmp_path, VALUES, learners=0, shards=1) as team,
        fork(1, _push_three, job_name) as (one,),
    ):
        one.receive()
        control, ring, state = team.processes.segment, ring_of(job_name, 0), _state(team)
        roster = control.word(CONTROL, "roster")
        words = [
            (control.word(CONTROL, "stop"), 4),
            (roster + layout.offset(ENTRY, "wanted"), 8),
            (roster + layout.offset(ENTRY, "retired"), 8),
            (ring.word(RING, "head"), 8),
            *_applied(state, 1),
            (control.word(CONTROL, "checkpoint_version"), 8),
        ]
        watchdog = team.find(Role.WATCHDOG)
        found = recorder(words)
        asked = threading.Thread(target=_stop, args=(job_name,))
        with found.watching():
            for _ in range(2):
                one.send("push")
                assert one.receive() == "pushed"
            asked.start()
            one.send("push")
            if watchdogs == 2:
                eventually(lambda: int(team.control["stop"]) != Stop.GO)
                send(watchdog)
                asked.join()
                team.watch()
            asked.join()
            eventually(
                lambda: team.daemon._process is None or team.daemon._process.poll() is not None
            )
    trace = [_in_closing(row) for row in found.rows]
    ends = dict(zip(IN_CLOSING, trace[-1], strict=True))
    assert ends["checkpoint"] == ends["applied"] == ends["head"] >= 2, trace
    assert accepts("closing", "", IN_CLOSING, trace, gaps=True), trace


def _stop(job: str) -> None:
    with contextlib.suppress(GadeiError):  # its watchdog has died
        jobs.stop(job, drain=False, timeout_s=10.0)


def test_an_end_in_another_order_is_seen() -> None:
    stop, wanted, retired, head, _, checkpoint = range(6)
    each: Trace = [(0, 1, 0, 0, 0, 0), (0, 1, 0, 1, 0, 0), (1, 1, 0, 1, 0, 0), (1, 1, 0, 2, 0, 0)]
    each += [(2, 1, 0, 2, 0, 0), (2, 1, 0, 2, 1, 0), (2, 0, 0, 2, 1, 0), (2, 0, 0, 2, 2, 0)]
    each += [(2, 0, 1, 2, 2, 0), (2, 0, 1, 2, 2, 2)]
    assert accepts("closing", "", IN_CLOSING, each, gaps=True)
    for store, values in (
        ((stop, 2), {wanted: 0}),  # detached while it may push
        ((wanted, 0), {checkpoint: 1}),  # saved before it is detached
        ((wanted, 0), {retired: 1}),
        ((checkpoint, 2), {head: 3}),  # published in a ring that is released
    ):
        wrong = with_one_more(each, store, values)
        assert not accepts("closing", "", IN_CLOSING, wrong, gaps=True), wrong
