"""Adoption of the words that a dead watchdog has left, at each of its lines."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import support
from support.memory import create_model, create_ring
from support.words import at_each_line, words

from gadei_ps import sync
from gadei_ps.commands import jobs
from gadei_ps.errors import JobInUse, JobNotFound
from gadei_ps.job import lock_file
from gadei_ps.job.lock_file import NameLock
from gadei_ps.machine import process
from gadei_ps.memory import holds, layout, segment, shm
from gadei_ps.memory.layout import CONTROL, Kept, Phase, ServerState, Stop
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.watchdog import entry, job_memory
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.serve_options import Options
from gadei_ps.watchdog.servers import Servers
from gadei_ps.watchdog.supervisor import Supervisor

THERE = 1  # another pid namespace
MODEL = place([Tensor("w", (10,))])


@pytest.fixture
def dead() -> tuple[int, int]:
    """Pid and start time of a process that is no more."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        start = process.start_ticks(child.pid)
        child.kill()
    return child.pid, start


@pytest.fixture
def left(job_name: str, dead: tuple[int, int]) -> Iterator[JobMemory]:
    """A job with learners in rows 0 and 1, and one in row 2 that has left; no server is alive."""
    made = JobMemory(support.config(job_name))
    made.create_control(sync.parse("asp"))
    try:
        create_model(made, MODEL, np.zeros(MODEL.elements, np.float32))
        control = made.control.view(CONTROL)
        control["model_ready"] = 1
        control["phase"] = Phase.SERVING
        for row in range(3):
            ring = create_ring(made, row, row + 1)
            entry = control["roster"][row]
            entry["generation"] = entry["wanted"] = row + 1
            control["ring_inode"][row] = ring.inode
        entry["wanted"], entry["retired"] = 0, 3
        control["watchdog_pid"], control["watchdog_start"] = dead
        for part in parts(made):
            part.header["owner_pid"], part.header["owner_start"] = dead
        made.release()
        yield made
    finally:
        made.remove()


def parts(job: JobMemory) -> list[segment.Segment]:
    assert job.weights and job.state
    return [job.control, job.weights, job.state, *job.rings.values()]


def adopted(left: JobMemory) -> JobMemory:
    made = JobMemory(left.config)
    assert made.adopt()
    made.release()
    made.close()
    return made


def nonzero(expected: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in expected.items() if value}


@pytest.fixture(params=[True, False], ids=["ends", "lives"])
def dying(
    left: JobMemory, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[list[Callable[[], None]]]:
    """A watchdog that was killed, or not. Yields what releases its locks, one at each wait.

    A child that was just being started has them too: the name's, then the memory's.
    """
    job = left.config.name
    hold = holds.take(job, holds.WATCHDOG)
    assert hold is not None
    ends_of_locks = [NameLock(job).close, hold.release]
    monkeypatch.setattr(lock_file, "DYING_S", support.PATIENCE_S if request.param else 0.01)

    def sleep(_: float) -> None:
        if request.param:
            ends_of_locks.pop(0)()

    monkeypatch.setattr(lock_file, "time", mock.Mock(wraps=time, sleep=sleep))
    yield ends_of_locks if request.param else []
    for end in ends_of_locks:
        end()


Locks = list[Callable[[], None]]


def test_a_watchdog_awaits_the_locks_of_a_dying_one(left: JobMemory, dying: Locks) -> None:
    made = Supervisor(left.config)
    try:
        if dying:
            made._take_over(adopts=True)
            assert made.memory.adopted and made._lock is not None and not dying
        else:
            with pytest.raises(JobInUse, match="is running already"):
                made._take_over(adopts=True)
    finally:
        made._leave = True
        made.shutdown()


def test_an_end_awaits_the_locks_of_a_dying_watchdog(left: JobMemory, dying: Locks) -> None:
    if dying:
        entry.end(left.config.name)
        assert not dying
        assert left.words["phase"] == Phase.FAILED
    else:
        with pytest.raises(JobInUse, match="is running already"):
            entry.end(left.config.name)
        assert left.words["phase"] == Phase.SERVING


def test_a_stop_awaits_the_locks_of_a_dying_watchdog(left: JobMemory, dying: Locks) -> None:
    """End the servers, here a process that has their place in the memory."""
    job = left.config.name
    with subprocess.Popen(["sleep", "1000"]) as server, ExitStack() as at_end:
        at_end.callback(server.kill)
        line = left.words["server"][0]
        line["pid"], line["start"] = server.pid, process.start_ticks(server.pid)
        if dying:
            assert jobs.stop(job, drain=False, timeout_s=0)["phase"] == "stopped"
            assert server.wait() == -signal.SIGKILL and not support.segments(job)
        else:
            with pytest.raises(JobNotFound, match="try again"):
                jobs.stop(job, drain=False, timeout_s=0)
            assert server.poll() is None and support.segments(job)


def test_memory_is_dropped_when_a_dying_watchdog_has_ended(left: JobMemory, dying: Locks) -> None:
    job, ends = left.config.name, bool(dying)
    assert (jobs.drop(job) is not None) == ends
    assert bool(support.segments(job)) != ends


@pytest.mark.parametrize(
    ("phase", "stop", "after"),
    [
        (Phase.SERVING, Stop.GO, (Phase.SERVING, Stop.GO)),
        (Phase.DRAINING, Stop.DRAIN, (Phase.DRAINING, Stop.DRAIN)),
        (Phase.KEPT, Stop.CLOSED, (Phase.STARTING, Stop.GO)),
        (Phase.FAILED, Stop.CLOSED, (Phase.STARTING, Stop.GO)),
    ],
)
def test_every_word_of_an_adopted_job(
    left: JobMemory, phase: Phase, stop: Stop, after: tuple[Phase, Stop]
) -> None:
    """A job that has ended without its last checkpoint, or has failed, begins to serve again."""
    control = left.control.view(CONTROL)
    control["phase"], control["stop"] = phase, stop
    me = os.getpid(), process.start_ticks(os.getpid())
    before = words(control)
    made = adopted(left)
    changed = {
        "watchdog_pid": me[0],
        "watchdog_start": me[1],
        "watchdog_starts": 2,
        "header.owner_pid": me[0],
        "header.owner_start": me[1],
        "phase": after[0],
        "stop": after[1],
    }
    assert words(control) == nonzero(before | changed)
    assert sorted(made.rings) == [0, 1]
    for part in parts(made):
        assert (part.header["owner_pid"], part.header["owner_start"]) == me
    assert [os.path.lexists(shm.path_of(left.rings[row].name)) for row in range(3)] == [1, 1, 0]


def test_the_adopting_command_sets_who_may_continue(
    left: JobMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tick(servers: Servers, now: float) -> None:
        control["lease_state"] = 1

    control = left.control.view(CONTROL)
    control["temporary"] = Kept.NEVER
    monkeypatch.setattr(Servers, "tick", tick)
    monkeypatch.setattr(Servers, "serving", property(lambda _: True))
    made = Supervisor(left.config, Options(resume=True))
    try:
        made.startup()
        assert made.memory.adopted and control["temporary"] == Kept.BY_SERVE
    finally:
        made.shutdown()


def test_never_the_words_of_two_watchdogs(left: JobMemory, dead: tuple[int, int]) -> None:
    """A pid with the start time of another would be that of a dead owner: gc would remove it."""
    me = os.getpid(), process.start_ticks(os.getpid())
    control = left.control.view(CONTROL)
    seen = set()

    def look() -> None:
        seen.add((int(control["watchdog_pid"]), int(control["watchdog_start"])))
        for part in parts(left):
            seen.add((int(part.header["owner_pid"]), int(part.header["owner_start"])))

    with at_each_line(look, job_memory, segment):
        adopted(left)
    assert {dead, me} <= seen
    assert {one for one in seen if one[0]} == {dead, me}


def test_an_adoption_that_has_died(left: JobMemory, dead: tuple[int, int]) -> None:
    """Kill it at any line: the next one ends where this one would have."""
    control = left.control.view(CONTROL)
    control["phase"], control["stop"] = Phase.FAILED, Stop.CLOSED
    images = dict[bytes, None]()  # in order
    with at_each_line(lambda: images.setdefault(bytes(left.control.memory)), job_memory, segment):
        adopted(left)
    whole = words(control)
    assert len(images) >= 10
    for one in images:
        left.control.memory[:] = one
        if control["watchdog_pid"]:
            control["watchdog_pid"], control["watchdog_start"] = dead
        starts = int(control["watchdog_starts"])
        assert sorted(adopted(left).rings) == [0, 1]
        assert words(control) == whole | {"watchdog_starts": starts + 1}


def test_pids_of_another_namespace(left: JobMemory) -> None:
    """Nobody takes them for pids of this one, whenever the watchdog dies that removes them."""
    for row in range(3):  # this process has them mapped for writing
        left.rings[row].view(layout.RING)
        segment.unlink(left.rings[row].name)
    control = left.control.view(CONTROL)
    control["lease_pid"], control["server"]["pid"], control["roster"]["pid"] = 11, 12, 13
    control["server"]["state"] = ServerState.READY
    for part in parts(left):
        part.header["owner_namespace"] = THERE
    names = "watchdog_pid", "lease_pid", "server.pid", "server.state", "roster.pid"
    before = words(control)
    seen = []

    def look() -> None:
        now = words(control)
        seen.append((now.get("header.owner_namespace"), {n: now.get(n) for n in names}))

    with at_each_line(look, job_memory):
        made = adopted(left)
    assert seen[-1] == (process.namespace(), dict.fromkeys(names) | {"watchdog_pid": os.getpid()})
    whole = {name: before[name] for name in names}
    none = dict.fromkeys(names)
    for namespace, pids in seen:
        if namespace == THERE:
            assert pids == whole
        elif namespace == process.namespace():
            assert pids | {"watchdog_pid": None} == none
    assert {one[0] for one in seen} == {THERE, None, process.namespace()}
    assert not made.rings
