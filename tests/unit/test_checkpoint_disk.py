"""Checkpoints while writers are killed, and on disks that do not take them.

Real files, real SIGKILLs, a file system that is really full.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import support
from support.snapshots import names, one, same, sha256sum

from gadei_ps.errors import CheckpointError, CheckpointMistake
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.storage import files
from gadei_ps.storage.checkpoint import check, found, newest, read, write
from gadei_ps.storage.export import export

# -- kills ----------------------------------------------------------------------------------------

BIG = place([Tensor("a", (300, 1000)), Tensor("b", (1000,), Role.BUFFER)])


def _write_on(pipe: Connection, directory: Path, first: int) -> None:
    """Every third version is written twice."""
    for count in itertools.count(first):
        version = count - count // 3
        write(directory, one(version, BIG), keep=2)
        pipe.send(version)


def test_kills_at_random_instants(tmp_path: Path) -> None:
    first, written, left = 1, 0, 0
    for round_ in range(25):
        with support.fork(1, _write_on, tmp_path, first) as (child,):
            child.receive()
            time.sleep(random.Random(round_).random() * 0.1)
            child.signal(signal.SIGKILL)
            support.eventually(lambda child=child: not child.alive)
            with contextlib.suppress(EOFError):
                while True:
                    written = max(written, child.receive())
        left += any(name.startswith(".tmp") for name in names(tmp_path))
        snapshot, path, problems = newest(tmp_path)
        assert problems == []
        assert snapshot is not None
        assert path is not None
        assert snapshot.version >= written, "what was reported as written is there"
        same(snapshot, one(snapshot.version, BIG))
        sha256sum(path)
        first = snapshot.version * 3 // 2 + 1
    assert left, "some kills hit a write"
    write(tmp_path, one(10**6, BIG), keep=1)
    assert names(tmp_path) == ["checkpoint-000001000000"]


STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


def _die_at(pipe: Connection, directory: Path, version: int, step: int) -> None:
    """Write a checkpoint and be killed at the step-th operation on files."""
    steps = itertools.count()

    def hook(event: str, args: object) -> None:
        if event in STEPS and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    write(directory, one(version), keep=2)


@pytest.mark.parametrize("version", [15, 20, 30], ids=["superseding", "replacing", "pruning"])
def test_a_kill_before_each_step(tmp_path: Path, version: int) -> None:
    """The newest before is the newest after, or the new one is; others are whole as well."""
    start = tmp_path / "start"
    for old in (10, 20):
        write(start, one(old), keep=2)
    seen = set()
    for step in range(200):
        directory = tmp_path / str(step)
        shutil.copytree(start, directory)
        with support.fork(1, _die_at, directory, version, step) as (child,):
            code = child.join()
        snapshot, path, problems = newest(directory)
        assert not problems
        assert snapshot is not None
        assert path is not None
        same(snapshot, one(snapshot.version))
        seen.add(path.name)
        assert all(read(each.path).version == each.version for each in found(directory))
        write(directory, one(40), keep=1)
        assert [name for name in names(directory) if name[:10] != "superseded"] == [
            "checkpoint-000000000040"
        ]
        shutil.rmtree(directory)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert step > 12
    again = ".2" if version == 20 else ""
    assert seen == {"checkpoint-000000000020", f"checkpoint-{version:012}{again}"}


# -- disks that do not take it --------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A small file system of its own, which may be mounted again with other options."""
    path = tmp_path / "mounted"
    path.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "gadei-ps-test", path]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr}")
        return path

    yield mount
    if path.is_mount():
        subprocess.run(["umount", path], check=True)


def kept(directory: Path, before: list[str]) -> None:
    """Check that the old one is there, whole, and nothing else."""
    assert names(directory) == before
    for each in found(directory):
        same(read(each.path), one(each.version, BIG))


def test_a_full_disk(mount: Callable[[str], Path]) -> None:
    directory = mount("size=10m") / "checkpoints"
    write(directory, one(1, BIG), keep=5)
    write(directory, one(2, BIG), keep=5)
    before = names(directory)
    with pytest.raises(CheckpointError) as info:
        write(directory, one(3, BIG), keep=5)
    assert str(info.value) == (
        f"{directory}: no checkpoint written (No space left on device); "
        "free some space or name another place"
    )
    assert info.value.exit_code == 1, "space may come back: a service manager tries again"
    kept(directory, before)
    shutil.rmtree(directory / before[0])
    (directory / ".tmp-1-dead").write_bytes(bytes(5 << 20))  # swept, or there is no room
    write(directory, one(3, BIG), keep=5)
    assert [version for _, version in found(directory)] == [3, 2]


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt"])
def test_exports_to_a_full_disk(mount: Callable[[str], Path], suffix: str) -> None:
    if suffix == ".pt":
        pytest.importorskip("torch")
    out = mount("size=600k") / f"out{suffix}"
    out.write_text("old")
    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)"):
        export(one(1, BIG), out)
    assert names(out.parent) == [out.name]
    assert out.read_text() == "old"


def test_a_read_only_file_system(mount: Callable[[str], Path]) -> None:
    directory = mount("size=12m")
    write(directory, one(1, BIG), keep=1)
    before = names(directory)
    mount("remount,ro")
    with pytest.raises(CheckpointMistake, match=r"Read-only file system.*ReadWritePaths"):
        write(directory, one(2, BIG), keep=1)
    kept(directory, before)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        export(one(1), directory / "x.npz")


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    """Limit it like a disk that fills up during a write; Python ignores SIGXFSZ."""
    write(tmp_path, one(1, BIG), keep=1)
    before = names(tmp_path)
    _, hard = limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_001, hard))
    try:
        with pytest.raises(CheckpointError, match=r"File too large\); raise the limit"):
            write(tmp_path, one(2, BIG), keep=1)
        with pytest.raises(CheckpointError, match="File too large"):
            export(one(2, BIG), tmp_path / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    kept(tmp_path, before)


def _as_nobody(pipe: Connection, directory: Path) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    messages: list[str] = []
    attempts: list[Callable[[], object]] = [
        lambda: write(directory, one(2, BIG), keep=1),
        lambda: write(directory / "new", one(2, BIG), keep=1),
        lambda: export(one(2, BIG), directory / "x.npz"),
        lambda: found(directory / "closed"),
        lambda: newest(directory),
    ]
    for attempt in attempts:
        try:
            attempt()
            messages.append("done")
        except CheckpointMistake as error:
            messages.append(str(error))
    pipe.send(messages)


def test_no_permission() -> None:
    base = Path(tempfile.mkdtemp(prefix="gps-", dir="/tmp"))
    base.chmod(0o755)
    directory = base / "checkpoints"
    try:
        write(directory, one(1, BIG), keep=1)
        before = names(directory)
        (directory / "closed").mkdir(mode=0)
        write(directory, one(3, BIG), keep=2)
        closed = found(directory)[0].path
        (closed / "SHA256SUMS").chmod(0)  # whole, but not for us: not to be passed over
        directory.chmod(0o555)
        with support.fork(1, _as_nobody, directory) as (child,):
            lines = child.receive()
        assert len(lines) == 5
        for line in lines:
            assert "Permission denied" in line
            assert "\n" not in line
        directory.chmod(0o755)
        (directory / "closed").rmdir()
        shutil.rmtree(closed)
        kept(directory, before)
    finally:
        shutil.rmtree(base)


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointMistake, match="Not a directory"):
            write(directory, one(1), keep=1)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointMistake, match="File exists"):
        write(tmp_path / "link", one(1), keep=1)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "lasts"),
    [
        *((one, True) for one in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.ELOOP)),
        *((one, False) for one in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)),
        *((one, False) for one in (errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)),
    ],
)
def test_mistakes_and_what_may_pass(
    number: int, lasts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check directories to write and to read; only mistakes are shown to a user."""
    write(tmp_path, one(1), keep=2)
    write(tmp_path, one(2), keep=2)

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    kind = CheckpointMistake if lasts else CheckpointError
    with monkeypatch.context() as failing:
        failing.setattr(files, "sync", fail)
        with pytest.raises(CheckpointError) as wrote:
            check(tmp_path / "new")
    monkeypatch.setattr(io, "FileIO", fail)
    if number in (errno.EACCES, errno.EMFILE, errno.ENOMEM):  # it says nothing of the file
        with pytest.raises(CheckpointError) as found_:
            newest(tmp_path)
        assert type(found_.value) is kind
    else:
        assert len(newest(tmp_path)[2]) == 2, "an older one may do"
    assert type(wrote.value) is kind


def test_an_old_one_that_cannot_be_removed(mount: Callable[[str], Path]) -> None:
    """The new one is written all the same."""
    directory = mount("size=12m")
    write(directory, one(1), keep=1)
    stuck = directory / "checkpoint-000000000001"
    subprocess.run(["mount", "--bind", stuck, stuck], check=True)  # a mount cannot be renamed
    try:
        made = write(directory, one(2), keep=1)
    finally:
        subprocess.run(["umount", stuck], check=True)
    assert made.problem is not None
    assert "older checkpoints cannot be removed" in made.problem
    same(read(made.path), one(2))
    assert write(directory, one(3), keep=1).problem is None
    assert names(directory) == ["checkpoint-000000000003"]
