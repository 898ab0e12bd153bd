"""Segments: made, attached, refused, found stale, and never left behind."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest
from support import FORK, segments
from support.memory import create_model

from gadei_ps import _native
from gadei_ps.errors import JobInUse, NoSharedMemory, SegmentError, UsageError
from gadei_ps.job.config import JobConfig
from gadei_ps.machine import process
from gadei_ps.memory import build, layout, presence, reserve, segment, shm
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.shm import SHM, segment_name
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.sync import parse
from gadei_ps.watchdog.cleanup import clear_dead
from gadei_ps.watchdog.job_memory import JobMemory

JOB_ID = bytes(range(16))


@pytest.fixture
def made(job_name: str) -> Segment:
    """A whole segment, removed with the test."""
    size = layout.CONTROL.itemsize
    one = segment.create(
        job_name, "control", SegmentKind.CONTROL, size, job_id=JOB_ID, generation=3, index=7
    )
    one.publish()
    yield one
    segment.unlink(one.name)


@pytest.fixture
def whole(job_name: str) -> Segment:
    """A control segment of its full size, removed with the test."""
    size = layout.CONTROL.itemsize
    one = segment.create(job_name, "control", SegmentKind.CONTROL, size, job_id=JOB_ID)
    one.publish()
    yield one
    segment.unlink(one.name)


def refused(name: str, kind: SegmentKind = SegmentKind.CONTROL, **how: object) -> str:
    """Return why attaching fails, in one line."""
    with pytest.raises(SegmentError) as info:
        segment.attach(name, kind, writable=False, **how)
    message = str(info.value)
    assert "\n" not in message
    assert name in message
    return message


def dead() -> tuple[int, int]:
    """Pid and start time of a process that is no more, and whose zombie is gone."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process.start_ticks(child.pid)
    assert process.alive(child.pid, start)
    child.kill()
    child.communicate()
    return child.pid, start


def test_attached_as_made(made: Segment, job_name: str) -> None:
    path = SHM / made.name[1:]
    assert path.stat().st_mode & 0o777 == 0o600
    assert made.size % mmap.PAGESIZE == 0
    assert path.stat().st_blocks * 512 >= made.size, "memory is not reserved"
    other = segment.attach(made.name, SegmentKind.CONTROL, writable=True, job_id=JOB_ID)
    assert other.size == made.size == int(other.header["bytes"])
    assert other.header["job_name"] == job_name.encode()
    assert int(other.header["owner_pid"]) == os.getpid()
    assert int(other.header["owner_start"]) == process.start_ticks(os.getpid())
    assert (int(other.header["generation"]), int(other.header["index"])) == (3, 7)
    other.array(np.uint8, 1, 9_999)[0] = 42
    assert made.array(np.uint8, 1, 9_999)[0] == 42


def test_read_only_means_read_only(made: Segment) -> None:
    other = segment.attach(made.name, SegmentKind.CONTROL, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        other.array(np.uint8, 1, 200)[0] = 1


def test_a_name_is_taken_once(made: Segment, job_name: str) -> None:
    with pytest.raises(FileExistsError):
        segment.create(job_name, "control", SegmentKind.CONTROL, 1, job_id=JOB_ID)
    assert presence.find(job_name)


def test_unlink(made: Segment) -> None:
    assert segment.unlink(made.name)
    assert not segment.unlink(made.name)
    with pytest.raises(FileNotFoundError):
        segment.attach(made.name, SegmentKind.CONTROL, writable=False)
    assert made.array(np.uint8, 1, 9_999)[0] == 0, "a mapping outlives the name"


def test_half_made(made: Segment) -> None:
    made.header["magic"] = 0
    assert "half made" in refused(made.name)


def test_foreign(made: Segment) -> None:
    made.array(np.uint8, 8, 0)[:] = np.frombuffer(b"\x7fELF\2\1\1\0", np.uint8)
    assert "not a gadei-ps segment" in refused(made.name)


def test_other_build(made: Segment) -> None:
    """Only the control segment names the build; the others belong to it by the job's id."""
    ours = _native.load(made.word(layout.CONTROL, "build"))
    assert ours == _native.BUILD
    _native.store(made.word(layout.CONTROL, "build"), 0xABC)
    message = refused(made.name)
    assert f"made by build {0xABC:016x}" in message and f"is build {ours:016x}" in message


def test_other_layout_version(made: Segment) -> None:
    made.header["layout_version"] = layout.LAYOUT_VERSION + 1
    message = refused(made.name)
    assert f"version {layout.LAYOUT_VERSION + 1}" in message
    assert "use the same gadei-ps" in message


def test_memory_of_another_build_is_kept(whole: Segment, job_name: str) -> None:
    control = whole.view(layout.CONTROL)
    at = whole.word(layout.CONTROL, "build")
    for theirs in (_native.BUILD, 0xABC):
        _native.store(at, theirs)
        control["phase"] = layout.Phase.SERVING
        control["model_ready"] = 0
        assert not segment.is_kept(job_name)
        control["model_ready"] = 1
        assert segment.is_kept(job_name)
        control["temporary"] = 1
        assert not segment.is_kept(job_name)
        control["temporary"] = 0
        control["phase"] = layout.Phase.STOPPED
        assert not segment.is_kept(job_name)
    whole.header["layout_version"] += 1
    assert segment.is_kept(job_name), "it is unknown"
    whole.header["magic"] = 0
    assert not segment.is_kept(job_name)


def test_the_difference_of_builds(whole: Segment, job_name: str) -> None:
    control = whole.view(layout.CONTROL)
    control["server_build"] = build.of_server()
    assert segment.other_build(job_name) is None
    control["server_build"] = 0xABC
    assert f"servers of build {0xABC:016x}" in (segment.other_build(job_name) or "")
    _native.store(whole.word(layout.CONTROL, "build"), 0xDEF)
    assert f"by build {0xDEF:016x}" in (segment.other_build(job_name) or "")
    whole.header["layout_version"] += 1
    assert "layout version" in (segment.other_build(job_name) or "")
    segment.unlink(whole.name)
    assert segment.other_build(job_name) is None


def test_other_kind(made: Segment) -> None:
    assert "not ring" in refused(made.name, SegmentKind.RING)


def test_other_job_id(made: Segment) -> None:
    assert "another incarnation" in refused(made.name, job_id=secrets.token_bytes(16))


@pytest.mark.parametrize("size", [0, 1, layout.HEADER.itemsize - 1, layout.HEADER.itemsize, 4096])
def test_truncated(made: Segment, size: int) -> None:
    os.truncate(SHM / made.name[1:], size)
    assert "truncated" in refused(made.name) or size == 0


def test_grown(made: Segment) -> None:
    os.truncate(SHM / made.name[1:], made.size + 4096)
    assert "truncated" in refused(made.name)


def test_larger_than_free(job_name: str) -> None:
    space = os.statvfs(SHM)
    size = 10 * space.f_blocks * space.f_frsize  # far more: nothing of it is reserved
    with pytest.raises(NoSharedMemory, match="MiB free") as info:
        segment.create(job_name, "weights", SegmentKind.WEIGHTS, size, job_id=JOB_ID)
    assert "\n" not in str(info.value)
    assert not segments(job_name)


def test_larger_than_the_memory_behind_shm(
    job_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reserving it would make the kernel kill somebody."""
    (tmp_path / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable:    40 kB\n")
    monkeypatch.setattr(reserve, "MEMINFO", tmp_path / "meminfo")
    with pytest.raises(NoSharedMemory, match=r"0\.0 MiB free"):
        segment.create(job_name, "weights", SegmentKind.WEIGHTS, 50_000, job_id=JOB_ID)
    assert not segments(job_name)
    segment.unlink(
        segment.create(job_name, "weights", SegmentKind.WEIGHTS, 30_000, job_id=JOB_ID).name
    )


def test_full_when_it_comes_to_reserving(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let others take it between the look and the reservation."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_native, "populate", lambda *_: errno.EFAULT)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoSharedMemory, match="gadei-ps gc"):
        segment.create(job_name, "weights", SegmentKind.WEIGHTS, 50_000, job_id=JOB_ID)
    assert not segments(job_name)


def test_weights_fit_and_state_does_not(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the model is left then."""
    memory = JobMemory(JobConfig(name=job_name, optimizer={"kind": "adam"}))
    memory.create_control(parse("asp"))
    model = place([Tensor("w", (1000,))])
    sizes = []
    create = segment.create

    def scarce(job: str, part: str, kind: SegmentKind, size: int, **rest: Any) -> Segment:
        sizes.append(part)
        return create(job, part, kind, size << (40 if part == "state" else 0), **rest)

    monkeypatch.setattr(segment, "create", scarce)
    try:
        with pytest.raises(NoSharedMemory):
            create_model(memory, model, np.zeros(model.elements, np.float32))
        assert sizes == ["weights", "state"]
        assert memory.weights is None
        assert memory.state is None
        assert segments(job_name) == [memory.control.name]
    finally:
        memory.remove()


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "a.b", "ä", "a" * 49, "a\n"])
def test_bad_job_names(name: str) -> None:
    with pytest.raises(UsageError):
        shm.check_job_name(name)


def test_stale_by_pid_and_start(made: Segment, job_name: str) -> None:
    (found,) = presence.find(job_name)
    assert not found.stale
    assert (found.name, found.part, found.owner_pid) == (made.name, "control", os.getpid())
    with pytest.raises(JobInUse, match=str(os.getpid())):
        clear_dead(job_name)
    # A pid that has been given to another process.
    made.header["owner_start"] -= 1
    assert presence.find(job_name)[0].stale
    made.header["owner_pid"], made.header["owner_start"] = dead()
    assert presence.find(job_name)[0].stale
    assert clear_dead(job_name) == [made.name]
    assert not segments(job_name)


def test_zombies_own_nothing(made: Segment, job_name: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    made.header["owner_pid"] = child.pid
    made.header["owner_start"] = process.start_ticks(child.pid)
    assert not presence.find(job_name)[0].stale
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert presence.find(job_name)[0].stale
    child.communicate()


def test_a_segment_being_made_is_not_stale(job_name: str) -> None:
    """However far its creator has come with the header."""
    path = SHM / segment_name(job_name, "control")[1:]
    raw = np.zeros(1, layout.HEADER)
    path.touch(0o600)
    try:
        assert not presence.find(job_name)[0].stale
        path.write_bytes(raw.tobytes())
        assert not presence.find(job_name)[0].stale
        with pytest.raises(JobInUse, match="half made"):
            clear_dead(job_name)
        long_ago = time.time() - 2 * presence.HALF_MADE_S
        os.utime(path, (long_ago, long_ago))
        assert presence.find(job_name)[0].stale
        assert clear_dead(job_name) == [f"/{path.name}"]
    finally:
        path.unlink(missing_ok=True)


def test_the_owner_is_named_last(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid without its start time would look like a dead owner."""
    looks = []

    def ticks(pid: int) -> int:
        looks.append([one.stale for one in presence.find(job_name)])
        return start_ticks(pid)

    start_ticks = process.start_ticks
    monkeypatch.setattr(process, "start_ticks", ticks)
    made = segment.create(job_name, "control", SegmentKind.CONTROL, 1, job_id=JOB_ID)
    segment.unlink(made.name)
    assert looks
    assert not any(any(stale) for stale in looks)


def test_only_names_of_the_project_are_found(job_name: str) -> None:
    others = [f"{job_name}.control", f"gadei-ps.{os.getuid()}.{job_name}.thing"]
    others.append(f"gadei-ps.{os.getuid() + 1}.{job_name}.control")
    for name in others:
        (SHM / name).touch()
    try:
        assert presence.find(job_name) == []
        assert [one.uid for one in presence.find() if one.job == job_name] == [os.getuid() + 1]
    finally:
        for name in others:
            (SHM / name).unlink()


def _claim_name(job: str, results: object, go: object) -> None:
    memory = JobMemory(JobConfig(name=job))
    go.wait()
    try:
        clear_dead(job)
        memory.create_control(parse("asp"))
    except JobInUse:
        results.put("in use")
        return
    results.put("won")
    signal.pause()


def test_two_claim_one_name(job_name: str) -> None:
    """Two processes that start the same job at once; the lock file's help is not needed."""
    for _ in range(10):
        results, go = FORK.SimpleQueue(), FORK.Event()
        claimers = [
            FORK.Process(target=_claim_name, args=(job_name, results, go), daemon=True)
            for _ in range(2)
        ]
        for claimer in claimers:
            claimer.start()
        go.set()
        answers = sorted(results.get() for _ in claimers)
        for claimer in claimers:
            claimer.kill()
            claimer.join()
        assert answers == ["in use", "won"]
        assert len(clear_dead(job_name)) == 1


def test_names_fit_in_shm(job_name: str) -> None:
    long = "a" * 48
    assert len(Path(segment_name(long, "ring.255")).name) < 255


def _limited(kind: int, size: int, job: str, pipe: Any) -> None:
    resource.setrlimit(kind, (size, size))
    try:
        segment.create(job, "weights", SegmentKind.WEIGHTS, 64 << 20, job_id=JOB_ID)
    except NoSharedMemory as error:
        pipe.send(str(error))


@pytest.mark.parametrize(
    ("kind", "size", "name"),
    [(resource.RLIMIT_FSIZE, 1 << 20, "ulimit -f"), (resource.RLIMIT_AS, 1 << 20, "ulimit -v")],
    ids=["file sizes", "address space"],
)
def test_a_limit_of_the_process_is_named(kind: int, size: int, name: str, job_name: str) -> None:
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=_limited, args=(kind, size, job_name, theirs))
    child.start()
    child.join()
    assert ours.poll()
    answer = ours.recv()
    assert name in answer
    assert "1.0 MiB" in answer
    assert not segments(job_name)


def test_the_limit_of_address_space_is_named_where_there_is_one() -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 46, limit[1]))
        assert reserve.address_space() == (
            "the limit of address space is 67108864.0 MiB: raise it (ulimit -v, LimitAS=)"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert limit[0] != resource.RLIM_INFINITY or not reserve.address_space()


def test_a_directory_that_takes_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """posix_ipc's error is no OSError; another user's /dev/shm of a container may be like that."""

    def refuse(*_: object) -> None:
        raise posix_ipc.PermissionsError("No permission to access this segment")

    monkeypatch.setattr(posix_ipc, "SharedMemory", refuse)
    with pytest.raises(NoSharedMemory, match="in /dev/shm: Permission denied"):
        segment.create("nobody", "control", SegmentKind.CONTROL, 4096, job_id=bytes(16))


def test_a_directory_that_does_not_tell(
    job_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends no watchdog: nothing counts as lost, and nothing can be removed."""
    made = segment.create(job_name, "control", SegmentKind.CONTROL, 4096, job_id=bytes(16))
    (tmp_path / "file").touch()
    with monkeypatch.context() as broken:
        broken.setattr(shm, "SHM", tmp_path / "file")
        assert segment.is_named(made)
        assert not segment.unlink(made.name)
    assert segment.unlink(made.name)
    assert not segment.is_named(made)
