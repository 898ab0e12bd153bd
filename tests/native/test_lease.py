"""Leases between processes, in shared memory without a job."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support import PATIENCE_S, Child, eventually

from gadei_ps import _native

CLEAN, DIED = 0, 1
LINE = 64  # bytes of a lease
ASLEEP = 1 << 31  # in the mutex's first word: a process sleeps until it is free
LONG_NS = int(PATIENCE_S * 1e9)


class Lease:
    """Lease in a line of memory that is full of old contents."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.memory[:] = b"\xff" * mmap.PAGESIZE
        self.at = _native.address(self.memory)
        _native.lease_make(self.at)

    def take(self, timeout_ns: int = 0) -> int:
        return _native.lease_take(self.at, timeout_ns)

    def release(self) -> None:
        _native.lease_release(self.at)

    @property
    def is_awaited(self) -> bool:
        return bool(_native.load32(self.at) & ASLEEP)


def obey(pipe: Connection, lease: Lease) -> None:
    while True:
        name, *what = pipe.recv()
        pipe.send(getattr(lease, name)(*what))


@pytest.fixture
def lease() -> Lease:
    return Lease()


@pytest.fixture
def other(lease: Lease) -> Iterator[Child]:
    """Another process that has the lease, and follows orders."""
    child = Child(obey, lease)
    child.send(("take",))
    assert child.receive() == CLEAN
    yield child
    child.kill()


@pytest.fixture
def waiting(lease: Lease) -> Iterator[Child]:
    """Another process that follows orders."""
    child = Child(obey, lease)
    yield child
    child.kill()


def test_a_new_lease_has_nothing_of_what_was_there(lease: Lease) -> None:
    whole = mmap.mmap(-1, mmap.PAGESIZE)
    _native.lease_make(_native.address(whole))
    assert lease.memory[:LINE] == whole[:LINE]
    assert lease.memory[LINE:] == b"\xff" * (mmap.PAGESIZE - LINE)


def test_one_has_it_at_a_time(lease: Lease, other: Child) -> None:
    assert lease.take() == _native.PS_TIMEOUT
    other.send(("release",))
    other.receive()
    assert lease.take() == CLEAN
    other.send(("take",))
    assert other.receive() == _native.PS_TIMEOUT
    lease.release()
    other.send(("take",))
    assert other.receive() == CLEAN


@pytest.mark.parametrize("asleep", [False, True])
def test_the_next_hears_of_a_death_once(
    lease: Lease, other: Child, waiting: Child, asleep: bool
) -> None:
    if asleep:
        waiting.send(("take", LONG_NS))
        eventually(lambda: lease.is_awaited)
    os.kill(other.pid, signal.SIGKILL)
    other.kill()
    if not asleep:
        waiting.send(("take",))
    assert waiting.receive() == DIED
    assert lease.take() == _native.PS_TIMEOUT
    waiting.send(("release",))
    waiting.receive()
    assert lease.take() == CLEAN
    lease.release()


def test_who_sleeps_for_it_is_woken(lease: Lease, other: Child, waiting: Child) -> None:
    waiting.send(("take", LONG_NS))
    eventually(lambda: lease.is_awaited)
    other.send(("release",))
    other.receive()
    assert waiting.receive() == CLEAN


def test_a_clock_that_is_set_back_does_not_prolong_a_wait(tmp_path: Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    name, _, version = os.confstr("CS_GNU_LIBC_VERSION").partition(" ")
    if name != "glibc" or tuple(map(int, version.split("."))) < (2, 30):
        pytest.skip("needs pthread_mutex_clocklock()")
    library = tmp_path / "clock_set_back.so"
    source = Path(__file__).with_name("clock_set_back.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    script = (
        "import mmap, threading\n"
        "from gadei_ps import _native\n"
        "memory = mmap.mmap(-1, mmap.PAGESIZE)\n"
        "lease, taken, done = _native.address(memory), threading.Event(), threading.Event()\n"
        "_native.lease_make(lease)\n"
        "def hold(): _native.lease_take(lease, 0), taken.set(), done.wait()\n"
        "threading.Thread(target=hold, daemon=True).start()\n"
        "taken.wait()\n"
        "print(_native.lease_take(lease, 50_000_000) == _native.PS_TIMEOUT)\n"
        "done.set()\n"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (result.stdout, result.stderr) == ("True\n", "")
