"""Memory that is taken away: a guarded range becomes zeros, and only that."""

from __future__ import annotations

import faulthandler
import os
import selectors
import signal
import subprocess
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.drivers import CC
from support import Child

from gadei_ps import _native
from gadei_ps.errors import SegmentError
from gadei_ps.memory import layout, ring, shm
from gadei_ps.watchdog.worker import Worker

SIZE = 4 * layout.PAGE
NAME = "/gadei-ps.0.guarded.ring.0"


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that stands for a ring, full of ones."""
    monkeypatch.setattr(shm, "SHM", tmp_path)
    made = tmp_path / NAME[1:]
    made.write_bytes(bytes([1]) * SIZE)
    made.chmod(0o600)
    return made


def _touch(pipe: Connection, path: Path, act: Callable[[Any, np.ndarray], object]) -> None:
    """Map two rings, one of which is guarded, and do what the test orders with the guarded one."""
    word = np.zeros(1, np.uint64)
    mapped = ring.attach(NAME, SIZE, path.stat().st_ino)
    ring.guard(mapped, word.ctypes.data, 7, word)
    pipe.send(act(mapped, word))


def _child(path: Path, act: Callable[[Any, np.ndarray], object]) -> Child:
    return Child(_touch, path, act)


def test_what_is_cut_off_becomes_zeros(path: Path) -> None:
    def act(mapped: Any, word: np.ndarray) -> object:
        before = int(mapped.array(np.uint8, SIZE, 0).sum()), int(word[0])
        os.truncate(path, layout.PAGE)
        bytes_ = mapped.array(np.uint8, SIZE, 0)
        first = int(bytes_[0]), int(word[0])  # what is left of the file is read as ever
        last = int(bytes_[-1]), int(word[0])
        bytes_[-1] = 5  # it can be written, too
        return before, first, last, int(bytes_.sum())

    child = _child(path, act)
    assert child.receive() == ((SIZE, 0), (1, 0), (0, 7), 5)
    child.join()


def test_in_a_call_to_c_and_without_the_interpreter(path: Path) -> None:
    def act(mapped: Any, word: np.ndarray) -> object:
        os.truncate(path, 0)
        return _native.load(mapped.address), int(word[0])

    child = _child(path, act)
    assert child.receive() == (0, 7)
    child.join()


@pytest.mark.parametrize("handler", [True, False])
def test_other_memory_is_no_business_of_the_guard(path: Path, handler: bool) -> None:
    """An access elsewhere, a signal that is sent, and memory that is not guarded any more."""

    def elsewhere(mapped: Any, word: np.ndarray) -> object:
        other = ring.attach(NAME, SIZE, path.stat().st_ino)
        os.truncate(path, 0)
        return _native.load(other.address)

    def sent(mapped: Any, word: np.ndarray) -> object:
        signal.raise_signal(signal.SIGBUS)
        return None

    def released(mapped: Any, word: np.ndarray) -> object:
        _native.unguard(mapped.address)
        os.truncate(path, 0)
        return _native.load(mapped.address)

    (faulthandler.enable if handler else faulthandler.disable)()
    try:
        for act in (elsewhere, sent, released):
            path.write_bytes(bytes(SIZE))
            child = _child(path, act)
            with pytest.raises((AssertionError, EOFError)):
                child.receive()
            assert child.join() == -signal.SIGBUS
    finally:
        faulthandler.enable()


def test_guards_are_given_back(path: Path) -> None:
    """More of them than there is room for, one after another."""
    word = np.zeros(1, np.uint64)
    for _ in range(1100):
        ring.guard(ring.attach(NAME, SIZE, path.stat().st_ino), word.ctypes.data, 1, word)
    assert not word[0]


@pytest.mark.parametrize("how", ["released", "dropped"])
def test_a_place_that_is_used_again_stays_guarded(path: Path, how: str) -> None:
    """Another ring may get the address of one that is unmapped before anybody notices."""

    def act(pipe: Connection) -> None:
        word, inode, second = np.zeros(2, np.uint64), path.stat().st_ino, []

        def again() -> None:
            while not second or second[-1].address != address:
                second.append(ring.attach(NAME, SIZE, inode))
            ring.guard(second[-1], word[1:].ctypes.data, 8, word)

        first = ring.attach(NAME, SIZE, inode)
        ring.guard(first, word.ctypes.data, 7, word)
        address = first.address
        if how == "released":
            weakref.finalize(first.memory, again)  # this runs before those that are older
            del first
        else:
            with selectors.DefaultSelector() as selector:
                worker = Worker(selector)
                worker.drop(first)
                del first
                ((bell, _),) = selector.select()
                again()
                bell.data(bell.fd)  # it forgets the task, and what that has unmapped
        os.truncate(path, 0)
        pipe.send((_native.load(address), word.tolist()))

    child = Child(act)
    assert child.receive() == (0, [0, 8])
    child.join()


def test_what_is_still_looked_at_stays_guarded(path: Path) -> None:
    def act(mapped: Any, word: np.ndarray) -> object:
        bytes_ = mapped.array(np.uint8, SIZE, 0)
        ring.close(mapped)
        os.truncate(path, 0)
        return int(bytes_[0]), int(word[0])

    child = _child(path, act)
    assert child.receive() == (0, 7)
    child.join()


# -- finding a ring -----------------------------------------------------------------------------


def test_a_ring_whose_name_is_gone(path: Path) -> None:
    """It is found through a process that has it mapped."""
    kept = ring.attach(NAME, SIZE, path.stat().st_ino)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        ring.attach(NAME, SIZE, kept.inode)
    assert bytes(ring.attach(NAME, SIZE, kept.inode, [2**22, os.getpid()]).memory) == bytes(
        kept.memory
    )


def test_a_ring_that_is_renamed(path: Path) -> None:
    kept = ring.attach(NAME, SIZE, path.stat().st_ino)
    other = path.rename(path.with_name(f"{path.name}-renamed"))
    try:
        found = ring.attach(NAME, SIZE, kept.inode, [os.getpid()])
        assert bytes(found.memory) == bytes(kept.memory)
    finally:
        other.unlink()


@pytest.mark.parametrize("made", ["short", "fifo", "link", "copy"])
def test_a_name_that_leads_elsewhere(made: str, path: Path) -> None:
    kept = ring.attach(NAME, SIZE, path.stat().st_ino)
    path.unlink()
    if made == "short":
        path.write_bytes(b"x")
        path.chmod(0o600)
    elif made == "fifo":
        os.mkfifo(path)
    elif made == "copy":
        path.write_bytes(bytes(kept.memory))
        path.chmod(0o600)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(SegmentError, match=NAME):
        ring.attach(NAME, SIZE, kept.inode)
    found = ring.attach(NAME, SIZE, kept.inode, [os.getpid()])
    assert bytes(found.memory) == bytes(kept.memory)


def test_no_word_of_a_ring_is_believed(path: Path) -> None:
    for content in (bytes(SIZE), os.urandom(SIZE), bytes([255]) * SIZE):
        path.write_bytes(content)
        assert bytes(ring.attach(NAME, SIZE, path.stat().st_ino).memory) == content


def test_guards_change_while_the_handler_looks(tmp_path: Path) -> None:
    """Release another range after each of its loads, and guard a third one in its place."""
    program = tmp_path / "swap"
    source = Path(__file__).with_name("guard_swap.c")
    subprocess.run([*CC, source, "-o", program, "-pthread"], check=True)
    number, loads = 0, 1
    while number < loads:
        done = subprocess.run([program, str(number)], stdout=subprocess.PIPE, check=False)
        assert done.returncode == 0, f"load {number}"
        number, loads = number + 1, int(done.stdout)
    assert loads > 5, "the handler has looked at two entries"
