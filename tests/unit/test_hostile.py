"""Files in /dev/shm and in the runtime directory that are not what their names say.

Every user can make files in /dev/shm. What is not this user's own is not read, adopted, killed for
or removed; it makes nothing wait; and what is said of it is one clear line.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shell import Cli
from support import config
from support.hostile import DAMAGED, FOREIGN, NOBODY, OF_OTHERS, Kind, control, file, naming

from gadei_ps.commands import jobs
from gadei_ps.errors import (
    ControlError,
    DirectoryMistake,
    GadeiError,
    JobInUse,
    JobNotFound,
    NotOurs,
    SegmentError,
)
from gadei_ps.job import lock_file, paths
from gadei_ps.job.control import Connection
from gadei_ps.job.diagnosis import diagnose
from gadei_ps.job.faults import Processes
from gadei_ps.job.lock_file import NameLock
from gadei_ps.machine import ownership
from gadei_ps.memory import presence, segment
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.shm import SHM, segment_name
from gadei_ps.watchdog.cleanup import clear_dead
from gadei_ps.watchdog.job_memory import JobMemory

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another's files")
OTHERS = [pytest.param(name, id=name, marks=needs_root) for name in OF_OTHERS]
PARTS = ("control", "weights", "state", "ring.3")


@pytest.fixture
def place(job_name: str) -> Iterator[Callable[[str], Path]]:
    """Yield where a part of the job lies; what is there is removed after the test."""

    def path_of(part: str) -> Path:
        return SHM / segment_name(job_name, part)[1:]

    yield path_of
    for path in SHM.glob(f"gadei-ps.*.{job_name}.*"):
        _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


@pytest.fixture(autouse=True)
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command hang that waits for the end of what is not ours, as of a killed watchdog."""
    monkeypatch.setattr(lock_file, "DYING_S", math.inf)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process that no job has started."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        yield child
        child.kill()


def identity(path: Path) -> tuple[int, ...]:
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_uid, found.st_size, found.st_mtime_ns


def line(call: Callable[[], object]) -> str:
    """Return the message of a failure, which is one line; empty if the call succeeds."""
    try:
        call()
    except GadeiError as error:
        assert str(error)
        assert "\n" not in str(error)
        return str(error)
    return ""


def look_at_all(job: str) -> None:
    """Everything that reads the memory of jobs, or removes it."""
    for part, kind in zip(PARTS, SegmentKind, strict=True):
        name = segment_name(job, part)
        for writable in (False, True):
            with contextlib.suppress(FileNotFoundError):
                line(lambda n=name, k=kind, w=writable: segment.attach(n, k, writable=w))
    presence.find(job)
    presence.peek(job)
    presence.server_pids(job)
    segment.is_kept(job)
    segment.other_build(job)
    line(lambda: Processes(job))
    diagnose(job)
    jobs.jobs()
    line(lambda: jobs.stop(job, drain=False, timeout_s=1.0, discard=True))
    jobs.collect(dry_run=True)
    memory = JobMemory(config(job))
    try:
        line(memory.adopt)
        assert not memory.adopted
    finally:
        memory.close()
    jobs.collect([job])
    line(lambda: clear_dead(job))
    line(lambda: jobs.drop(job))


@pytest.mark.parametrize("kind", [*FOREIGN, *OTHERS])
@pytest.mark.parametrize("part", ["control", "weights"])
def test_what_is_not_ours_is_left_alone(
    place: Callable[[str], Path], job_name: str, kind: str, part: str
) -> None:
    (FOREIGN | OF_OTHERS)[kind](place(part))
    if part == "weights":
        file(control(job_name))(place("control"))
    before = identity(place(part))
    with pytest.raises(SegmentError) as info:
        segment.attach(segment_name(job_name, part), SegmentKind.CONTROL, writable=False)
    assert str(place(part)) in str(info.value)
    assert "\n" not in str(info.value)
    look_at_all(job_name)
    assert identity(place(part)) == before
    with pytest.raises(JobInUse, match="left alone"):
        clear_dead(job_name)
    (found,) = (one for one in jobs.jobs() if one.name == job_name)
    assert part == "weights" or (found.state, found.segments) == ("foreign", ())
    assert any(str(place(part)) in why for why in jobs.foreign([job_name]))
    assert not segment.unlink(segment_name(job_name, part))
    assert identity(place(part)) == before


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_memory_is_not_adopted(
    place: Callable[[str], Path], job_name: str, kind: str
) -> None:
    """Nothing is raised that is not one line; another job of this name can begin."""
    DAMAGED[kind](place("control"))
    look_at_all(job_name)
    assert not place("control").exists()


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_parts_are_not_adopted(
    place: Callable[[str], Path], job_name: str, kind: str
) -> None:
    for part in PARTS:
        (file(control(job_name)) if part == "control" else DAMAGED[kind])(place(part))
    look_at_all(job_name)
    assert not list(SHM.glob(f"gadei-ps.*.{job_name}.*"))


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_nobody_is_killed_for_another_users_memory(
    place: Callable[[str], Path], job_name: str, victim: subprocess.Popen[bytes], mode: int
) -> None:
    file(naming(job_name, victim.pid), mode, NOBODY)(place("control"))
    assert presence.server_pids(job_name) == []
    look_at_all(job_name)
    assert victim.poll() is None


@needs_root
def test_another_users_process_is_not_killed(place: Callable[[str], Path], job_name: str) -> None:
    """Though memory of ours names it, with its start time."""
    with subprocess.Popen(["sleep", "1000"], user=NOBODY) as other:
        try:
            file(naming(job_name, other.pid))(place("control"))
            assert set(presence.server_pids(job_name)) == {other.pid}
            with pytest.raises(JobInUse):
                clear_dead(job_name)
            assert other.poll() is None
        finally:
            other.kill()


@needs_root
def test_root_attaches_to_another_users_job_only_on_purpose(
    place: Callable[[str], Path], job_name: str
) -> None:
    """Attach as a learner that the kernel has shown whose process answers at the socket."""
    file(control(job_name), owner=NOBODY)(place("control"))
    name = segment_name(job_name, "control")
    mapped = segment.attach(name, SegmentKind.CONTROL, writable=False, owner=NOBODY)
    assert mapped.owner == NOBODY
    with pytest.raises(SegmentError, match="another user"):
        segment.attach(name, SegmentKind.CONTROL, writable=False)


@needs_root
@pytest.mark.usefixtures("compiled")
def test_a_ring_whose_name_is_taken_is_passed_over(job_name: str) -> None:
    """Another user who takes names keeps no learner out."""
    import numpy as np
    from support import daemon

    from gadei_ps.learners.client import Client

    taken = [SHM / segment_name(job_name, f"ring.{row}")[1:] for row in (0, 2)]
    file(b"", 0o666, NOBODY)(taken[0])
    assert not _states(job_name), "a ring's name alone makes no job"
    assert any(str(taken[0]) in why for why in jobs.foreign())
    with daemon(job_name, tensors=[{"name": "w", "shape": [4]}]):
        file(b"", 0o666, NOBODY)(taken[1])
        try:
            with Client(job_name) as one, Client(job_name) as other:
                assert (one.row, other.row) == (1, 3)
                one.push(np.ones(one.model.elements, np.float32))
                one.wait_applied()
            assert all(path.exists() for path in taken)
        finally:
            for path in taken:
                path.unlink()


LOCKS: dict[str, Kind] = {
    name: FOREIGN[name]
    for name in ("directory", "FIFO", "socket", "link to nothing", "link to itself", "empty, 0644")
} | {"link to a device": FOREIGN["link to an endless device"]}


@pytest.mark.parametrize("kind", LOCKS)
def test_what_has_a_locks_name_is_no_lock(runtime_dir: Path, job_name: str, kind: str) -> None:
    path = paths.lock_path(job_name)
    LOCKS[kind](path)
    before = identity(path)
    try:
        assert diagnose(job_name) is None
        assert not jobs.collect([job_name])
        assert _states(job_name) == ["foreign"]
        (message,) = jobs.foreign([job_name])
        assert message.startswith(f"{path}: ") and message.endswith(
            "no lock file can be there: remove it"
        )
        with pytest.raises(ControlError) as info:
            NameLock(job_name)
        assert str(path) in str(info.value)
        assert identity(path) == before
    finally:
        _remove(path)


def _states(job_name: str) -> list[str]:
    """Other tests have jobs, too, at the same time."""
    return [one.state for one in jobs.jobs() if one.name == job_name]


@pytest.mark.parametrize("kind", [*LOCKS, "text"])
def test_what_has_a_sockets_name_answers_nothing(
    runtime_dir: Path, job_name: str, kind: str
) -> None:
    path = paths.socket_path(job_name)
    (LOCKS | DAMAGED)[kind](path)
    before = identity(path)
    try:
        with pytest.raises((JobNotFound, ControlError)) as info:
            Connection(job_name)
        assert "\n" not in str(info.value)
        others = {"socket": "stale", "link to itself": "silent"}
        assert _states(job_name) == [others.get(kind, "foreign")]
        messages = jobs.foreign([job_name])
        assert [one.startswith(f"{path}: it is a") for one in messages] == [True] * (
            kind != "socket"
        )
        if kind == "directory":
            with pytest.raises(DirectoryMistake, match="no socket can be there: remove it"):
                NameLock(job_name)
        jobs.collect([job_name])
        if kind == "socket":
            assert not path.exists(), "nobody listens there any more"
        else:
            assert identity(path) == before
    finally:
        _remove(path)


@pytest.mark.parametrize("kind", ["FIFO", pytest.param("forged", marks=needs_root), "one byte"])
def test_commands_end_with_a_line(
    cli: Cli,
    place: Callable[[str], Path],
    job_name: str,
    victim: subprocess.Popen[bytes],
    kind: str,
) -> None:
    forged = file(naming(job_name, victim.pid), 0o666, NOBODY)
    (FOREIGN | DAMAGED | {"forged": forged})[kind](place("control"))
    before = identity(place("control"))
    assert job_name in cli("ls").out
    assert cli("status", job_name).error
    result = cli("gc", job_name)
    assert result.code == 0
    if kind == "one byte":
        assert not place("control").exists()
        return
    assert str(place("control")) in result.err
    (cli.directory / "job.toml").write_text(f"name = '{job_name}'")
    for flags in ((), ("--fresh",)):
        assert "left alone" in cli("serve", "job.toml", *flags).error
    assert "left alone" in cli("run", job_name, "--device", "host", "--", "true").error
    assert identity(place("control")) == before
    assert victim.poll() is None


def test_no_name_at_all_is_not_every_name(
    cli: Cli, place: Callable[[str], Path], job_name: str
) -> None:
    """A list of names that is empty removes nothing; `gadei-ps gc` without names means all."""
    DAMAGED["one byte"](place("control"))
    assert not jobs.collect([])
    assert not jobs.foreign([])
    assert place("control").exists()
    every = cli("gc", "--dry-run", "--json").json["removed"]
    assert job_name in {one["job"] for one in every}


ODD = (
    *("\n", "\r", "\t", "\x1b[31m", "\x7f", " ", "$(id)", "`id`", "%n%s", "\\", "'", '"', ";"),
    *("*", "?", "[a]", "\u202e", "\u0660", "\udcff", "--", "-rf", "..", "0" * 100, "x" * 200),
)


def odd_names(job: str) -> list[str]:
    """Beside the names of a job's segments, lock and socket, and in their place."""
    uid, control = os.getuid(), segment_name(job, "control")[1:]
    return [
        name
        for odd in ODD
        for name in (
            f"{control}{odd}",
            f"gadei-ps.{uid}{odd}.{job}.control"[:255],
            f"gadei-ps.{uid}.{odd}.control",
            f"gadei-ps.{uid}.{job}.ring.{odd}",
            f"{odd}.lock",
            f"{job}{odd}.sock",
        )
    ]


@needs_root
def test_odd_names_of_another_user(
    cli: Cli, runtime_dir: Path, job_name: str, victim: subprocess.Popen[bytes]
) -> None:
    """Each with memory that names a process of ours as the job's server."""
    data = file(naming(job_name, victim.pid), 0o666, NOBODY)
    made = {place / name: data for name in odd_names(job_name) for place in (SHM, runtime_dir)}
    try:
        for path, make in made.items():
            make(path)
        before = {path: identity(path) for path in made}
        look_at_all(job_name)
        jobs.collect([job_name])
        everyones = ("gc", "--dry-run")  # a real one would take what other tests have left
        for command in (("ls",), everyones, ("gc", job_name), ("status", job_name)):
            result = cli(*command)
            assert result.code in (0, 1), result
            assert (result.out + result.err).replace("\n", "").isprintable(), result
        assert {path: identity(path) for path in made} == before
        assert victim.poll() is None
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def _refuse(path: Path, flags: int, mode: int) -> int:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_an_own_file_that_cannot_be_opened_is_not_taken_for_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy of the kernel forbids it for now, say: its job is not started again in its place."""
    path = tmp_path / "segment"
    path.touch(0o600)
    monkeypatch.setattr(os, "open", _refuse)
    with pytest.raises(PermissionError, match="segment"):
        ownership.open_file(path, os.O_RDWR)
    path.chmod(0o666)
    with pytest.raises(NotOurs, match="other users may open it"):
        ownership.open_file(path, os.O_RDWR)


def test_a_file_of_another_user_is_foreign_although_its_owner_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "segment"
    path.touch(0o600)
    monkeypatch.setattr(os, "open", _refuse)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    with pytest.raises(NotOurs, match="belongs to another user"):
        ownership.open_file(path, os.O_RDWR, owner=path.stat().st_uid)
