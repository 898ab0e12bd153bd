"""Memory for segments: looked for before it is taken, and taken piece by piece."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import config, segments
from support.memory import create_ring

from gadei_ps import _native
from gadei_ps.errors import ControlError, NoSharedMemory
from gadei_ps.machine import cgroups
from gadei_ps.machine.cgroups import Limit
from gadei_ps.memory import reserve
from gadei_ps.memory.reserve import Cancelled, Progress, Room
from gadei_ps.memory.weights import Tensor, data, place
from gadei_ps.sync import parse
from gadei_ps.watchdog import model_segments
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.model_segments import InitialModel

PIECE = mmap.PAGESIZE
MB = 1 << 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "PIECE", PIECE)
    monkeypatch.setattr(reserve.process, "cores", lambda: 3)


@pytest.fixture
def file() -> Iterator[tuple[int, mmap.mmap]]:
    """Ten and a half pieces, mapped, of which nothing is there."""
    fd = os.memfd_create("test")
    size = 10 * PIECE + PIECE // 2
    os.ftruncate(fd, size)
    yield fd, mmap.mmap(fd, size)
    os.close(fd)


def blocks(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_every_piece_once_and_filled(file: tuple[int, mmap.mmap]) -> None:
    fd, memory = file
    seen: list[tuple[int, int, int]] = []
    progress = Progress(len(memory))

    def fill(at: int, size: int) -> None:
        memory[at : at + size] = bytes([at // PIECE + 1]) * size
        seen.append((at, size, threading.get_ident()))

    reserve.take(fd, _native.address(memory), len(memory), progress, fill)
    assert sorted(one[:2] for one in seen) == [
        *((number * PIECE, PIECE) for number in range(10)),
        (10 * PIECE, PIECE // 2),
    ]
    assert progress.done == len(memory)
    assert blocks(fd) == 11 * PIECE
    assert memory[5 * PIECE : 5 * PIECE + 2] == b"\6\6"


def test_a_kernel_without_populate(
    file: tuple[int, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "populate", lambda *_: errno.EINVAL)
    fd, memory = file
    reserve.take(fd, _native.address(memory), len(memory))
    assert blocks(fd) == 11 * PIECE


def test_cancelled_in_the_middle(file: tuple[int, mmap.mmap]) -> None:
    fd, memory = file
    progress = Progress(len(memory))

    def fill(at: int, size: int) -> None:
        progress.cancel()

    with pytest.raises(Cancelled):
        reserve.take(fd, _native.address(memory), len(memory), progress, fill)
    assert blocks(fd) <= 3 * PIECE, "one piece of each thread"


def test_an_error_of_one_thread_ends_all(file: tuple[int, mmap.mmap]) -> None:
    fd, memory = file

    def fill(at: int, size: int) -> None:
        raise ControlError(f"at {at}")

    with pytest.raises(ControlError):
        reserve.take(fd, _native.address(memory), len(memory), None, fill)
    assert blocks(fd) <= 3 * PIECE


# -- how much there is ----------------------------------------------------------------------------


def scarce(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, meminfo: int, limit: int) -> None:
    """A machine with so many bytes available, in a group whose limit leaves so many."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {meminfo >> 10} kB\n")
    monkeypatch.setattr(reserve, "MEMINFO", tmp_path / "meminfo")
    found = Limit(Path("/box/memory.max"), 2 * limit, limit)
    monkeypatch.setattr(cgroups, "tightest", lambda: found)


def test_the_least_room_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scarce(monkeypatch, tmp_path, 3 * MB, 2 * MB)
    assert reserve.room().free == 2 * MB
    with pytest.raises(NoSharedMemory) as info:
        reserve.check({"weights": MB, "optimizer": MB, "2 rings": 4 * MB}, "job 'x'")
    assert str(info.value) == (
        "the memory limit /box/memory.max has 2.0 MiB free and job 'x' needs 6.0 MiB "
        "(weights 1.0, optimizer 1.0, 2 rings 4.0): free some (gadei-ps gc), raise it "
        "(docker run --memory=..., MemoryMax= of systemd), or use fewer ring slots"
    )
    scarce(monkeypatch, tmp_path, MB, 2 * MB)
    with pytest.raises(
        NoSharedMemory, match=r"^this machine's memory has 1\.0 MiB free and .* end"
    ):
        reserve.check({"": 2 * MB}, "x")
    scarce(monkeypatch, tmp_path, 1 << 60, 1 << 60)
    monkeypatch.setattr(reserve, "SHM", tmp_path)
    space = os.statvfs(tmp_path)
    assert reserve.room() == Room(
        pytest.approx(space.f_bavail * space.f_frsize, rel=0.1),
        str(tmp_path),
        "enlarge it (mount -o remount,size=...)",
    )


def test_all_of_a_job_is_counted_before_anything_is_made(
    job_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = JobMemory(config(job_name), learners=2)
    memory.create_control(parse("asp"))
    try:
        first = InitialModel(place([Tensor("w", (1 << 18,))]), None)
        needs = memory.needs(first.model, 0)
        assert list(needs) == ["weights", "optimizer", "2 rings"]
        scarce(monkeypatch, tmp_path, 1 << 40, sum(needs.values()) - 4096)
        with pytest.raises(NoSharedMemory, match=f"job '{job_name}' needs"):
            memory.make_model(first)
        assert segments(job_name) == [memory.control.name]
        scarce(monkeypatch, tmp_path, 1 << 40, sum(needs.values()))
        memory.enter_model(first, memory.make_model(first))
        made = [create_ring(memory, row, row + 1).size for row in range(2)]
        assert memory.weights and memory.state
        assert [memory.weights.size, memory.state.size, sum(made)] == [
            -(-size // 4096) * 4096 for size in needs.values()
        ]
    finally:
        memory.remove()


# -- what a model is filled with ------------------------------------------------------------------


def test_values_of_a_file(job_name: str) -> None:
    """The segment's pieces do not begin where the values do."""
    model = place([Tensor("w", (3000,)), Tensor("b", (7,))])
    values = np.arange(model.elements, dtype=np.float32)
    memory = JobMemory(config(job_name))
    memory.create_control(parse("asp"))
    fd = os.memfd_create("test")
    try:
        os.write(fd, values.tobytes())
        progress = Progress()
        first = InitialModel(model, model_segments.read_from(fd, model))
        made = memory.make_model(first, progress=progress)
        np.testing.assert_array_equal(data(made[0]), values)
        assert progress.done >= progress.total > values.nbytes
        memory.enter_model(first, made)
        memory._drop_model()
        with pytest.raises(ControlError, match="a file of 12096 bytes, not"):
            model_segments.read_from(fd, place([Tensor("w", (5,))]))
        os.ftruncate(fd, values.nbytes // 2)  # after it has been looked at
        with pytest.raises(ControlError, match="the file ends at"):
            memory.make_model(first)
        assert segments(job_name) == [memory.control.name]
    finally:
        os.close(fd)
        memory.remove()
