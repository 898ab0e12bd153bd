"""Locks on a control segment: who holds one, and when it ends."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support import Child, segments
from support.hostile import SIZE

from gadei_ps.errors import JobInUse
from gadei_ps.job.config import JobConfig
from gadei_ps.job.diagnosis import locked
from gadei_ps.machine import process
from gadei_ps.memory import holds, layout, presence, segment, shm
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.presence import Living
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.shm import segment_name
from gadei_ps.sync import parse
from gadei_ps.watchdog.cleanup import clear_dead
from gadei_ps.watchdog.job_memory import JobMemory


@pytest.fixture
def made(job_name: str) -> Iterator[Segment]:
    """A control segment that this process owns and nobody has locked."""
    one = segment.create(job_name, "control", SegmentKind.CONTROL, SIZE, job_id=bytes(16))
    one.publish()
    yield one
    segment.unlink(one.name)


def held(job: str) -> list[bool]:
    fd = shm.open_segment(segment_name(job, "control"), writable=False)
    try:
        return [holds.held(fd, byte) for byte in (holds.WATCHDOG, *holds.SERVERS)]
    finally:
        os.close(fd)


def take_it(pipe: Connection, job: str) -> None:
    mine = holds.take(job, holds.WATCHDOG)
    pipe.send(mine is not None)
    signal.pause()


def keep_it(pipe: Connection, job: str, mapped: Segment) -> None:
    pipe.send(mapped.size)
    signal.pause()


def test_each_byte_has_one_holder(made: Segment, job_name: str) -> None:
    mine = holds.take(job_name, holds.SERVERS[0])
    assert mine is not None
    assert mine.inode == made.inode
    assert held(job_name) == [False, True, False]
    assert holds.take(job_name, holds.SERVERS[0]) is None
    other = holds.take(job_name, holds.SERVERS[1])
    assert other is not None
    mine.release()
    mine.release()
    assert held(job_name) == [False, False, True]


@pytest.mark.parametrize("why", [errno.EACCES, errno.EMFILE])
def test_nobody_is_taken_for_dead_because_a_file_cannot_be_opened(
    made: Segment, job_name: str, monkeypatch: pytest.MonkeyPatch, why: int
) -> None:
    def refuse(where: Path | str, *how: object, **more: object) -> int:
        raise OSError(why, os.strerror(why), str(where))

    calls: list[Callable[[], object]] = [
        lambda: presence.living(job_name),
        lambda: presence.peek(job_name),
        lambda: locked(shm.path_of(made.name)),
    ]
    with monkeypatch.context() as here:
        here.setattr(os, "open", refuse)
        for call in calls:
            with pytest.raises(OSError, match="control"):
                call()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(OSError, match=str(shm.SHM)):
        presence.find(job_name)


def test_a_killed_process_holds_nothing(made: Segment, job_name: str) -> None:
    child = Child(take_it, job_name)
    try:
        assert child.receive()
        assert held(job_name) == [True, False, False]
        assert holds.take(job_name, holds.WATCHDOG) is None
        with holds.alone(job_name) as alone:
            assert not alone
    finally:
        child.kill()
    assert held(job_name) == [False, False, False]
    with holds.alone(job_name) as alone:
        assert alone
        assert held(job_name) == [True, False, False]


def test_a_mapping_in_a_fork_keeps_no_lock(job_name: str) -> None:
    """A lock goes with the last reference to its open file, and a mapping is such a reference."""
    memory = JobMemory(JobConfig(name=job_name))
    memory.create_control(parse("asp"))
    child = Child(keep_it, job_name, segment_of(job_name))
    try:
        assert child.receive() == memory.control.size
        assert held(job_name)[holds.WATCHDOG]
    finally:
        child.kill()
    memory.remove()
    assert not segments(job_name)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_look_at_memory_just_made_refuses_no_start(
    job_name: str, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """Start two: one looks for memory to adopt just as the other has made its own."""
    looks: list[holds.Hold] = []
    create, tries = segment.create, []

    def and_look(job: str, *args: Any, **kwargs: Any) -> Segment:
        made = create(job, *args, **kwargs)
        hold = holds.take(job, holds.WATCHDOG)
        assert hold is not None
        looks.append(hold)
        return made

    def goes_on(seconds: float) -> None:
        tries.append(seconds)
        if replaced:
            segment.unlink(segment_name(job_name, "control"))
            create(job_name, "control", SegmentKind.CONTROL, SIZE, job_id=bytes(16))
        looks.pop().release()

    monkeypatch.setattr(segment, "create", and_look)
    monkeypatch.setattr("gadei_ps.watchdog.job_memory.time.sleep", goes_on)
    memory = JobMemory(JobConfig(name=job_name))
    try:
        if replaced:
            with pytest.raises(JobInUse, match="just been started by another"):
                memory.create_control(parse("asp"))
            assert segments(job_name), "not ours to remove"
        else:
            memory.create_control(parse("asp"))
            assert held(job_name)[holds.WATCHDOG]
        assert len(tries) == 1
    finally:
        segment.unlink(segment_name(job_name, "control"))


def segment_of(job: str) -> Segment:
    return segment.attach(segment_name(job, "control"), SegmentKind.CONTROL, writable=True)


@pytest.mark.parametrize("byte", [holds.WATCHDOG, *holds.SERVERS])
def test_pids_of_another_namespace_tell_nothing(made: Segment, job_name: str, byte: int) -> None:
    """Neither that a process lives, as ours has that pid, nor that it is dead."""
    control = made.view(layout.CONTROL)
    control["watchdog_pid"], control["watchdog_start"] = os.getpid(), made.header["owner_start"]
    control["server"]["pid"], control["server"]["start"] = os.getpid(), made.header["owner_start"]
    assert presence.living(job_name) == Living(watchdog=True, servers=True)
    assert set(presence.server_pids(job_name)) == {os.getpid()}
    made.header["owner_namespace"] += 1
    os.utime(shm.path_of(made.name), (1e9, 1e9))
    assert presence.living(job_name) == Living()
    assert presence.server_pids(job_name) == []
    (found,) = presence.find(job_name)
    assert found.stale and not found.owned
    hold = holds.take(job_name, byte)
    assert hold is not None
    watchdog = byte == holds.WATCHDOG
    assert presence.living(job_name) == Living(watchdog, not watchdog, elsewhere=True)
    (found,) = presence.find(job_name)
    assert found.elsewhere and not found.stale
    with pytest.raises(JobInUse, match="elsewhere"):
        clear_dead(job_name)
    hold.release()
    assert clear_dead(job_name) == [made.name]


def test_a_server_that_the_watchdog_has_not_named_keeps_no_lock(job_name: str) -> None:
    """So one that starts while its job is adopted from another namespace does not serve."""
    from gadei_ps.server.manager import Asked, Server

    memory = JobMemory(JobConfig(name=job_name))
    memory.create_control(parse("asp"))
    try:
        lines = memory.control.view(layout.CONTROL)["server"]
        servers = [Server(Asked(job_name, number, 10.0, [])) for number in range(2)]
        assert not servers[0]._take_hold()
        assert held(job_name) == [True, False, False]
        for line in lines:
            line["start"] = process.start_ticks(os.getpid())
            line["pid"] = os.getpid()
        assert servers[1]._take_hold()
        assert held(job_name) == [True, False, True]
        memory.control.header["owner_namespace"] += 1
        assert not servers[0]._take_hold()
        assert all(one._replaced() for one in servers)
        assert held(job_name) == [True, False, True]
    finally:
        memory.remove()


def test_a_ring_is_written_while_somebody_has_it_mapped(made: Segment) -> None:
    assert holds.is_written(made.name)
    child = Child(keep_it, "", made)
    child.receive()
    name = made.name
    made.memory = None  # type: ignore[assignment]
    assert holds.is_written(name), "by the child"
    child.kill()
    assert not holds.is_written(name)
    reader = segment.attach(name, SegmentKind.CONTROL, writable=False)
    assert not holds.is_written(reader.name)


def hold_it(pipe: Connection, job: str, byte: int) -> None:
    mine = holds.take(job, byte)
    pipe.send(mine is not None)
    signal.pause()


def hold_and_open_files(pipe: Connection, job: str, byte: int) -> None:
    first = os.open("/", os.O_RDONLY)
    mine = holds.take(job, byte)
    pipe.send(mine is not None)
    while True:  # files whose numbers are before that of the lock
        os.close(first)
        first = os.open("/", os.O_RDONLY)


def test_a_server_that_opens_files_is_seen(job_name: str) -> None:
    """Open files while /proc is read: a server that is missed would be started again."""
    made = segment.create(job_name, "control", SegmentKind.CONTROL, SIZE, job_id=bytes(16))
    server = Child(hold_and_open_files, job_name, holds.SERVERS[0])
    try:
        assert server.receive()
        segment.unlink(made.name)
        for _ in range(50):
            assert holds.nameless(job_name) == {server.pid: holds.SERVERS[0]}
    finally:
        server.kill()


def test_no_process_is_ended_for_the_pid_of_another(
    job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose memory has lost its names may end right before it is killed for that; its pid
    may then be a process' that has no lock."""
    made = segment.create(job_name, "control", SegmentKind.CONTROL, SIZE, job_id=bytes(16))
    stranger = Child(keep_it, "", made)
    server = Child(hold_it, job_name, holds.SERVERS[0])
    try:
        assert stranger.receive() and server.receive()
        segment.unlink(made.name)
        found = holds.nameless(job_name)
        assert found == {server.pid: holds.SERVERS[0]}
        looks = [found | {stranger.pid: holds.SERVERS[1]}]
        look = holds.nameless
        monkeypatch.setattr(holds, "nameless", lambda job: looks.pop() if looks else look(job))
        assert clear_dead(job_name) == []
        assert server.join() == -signal.SIGKILL
        assert stranger.alive
    finally:
        stranger.kill()
        server.kill()
