"""A learner's ring, as the processes that do not trust it map it: server and watchdog.

The learner can write all of the ring, unlink its name and truncate its file. So none of its words
determines its size or its owner: sizes follow from the model and from the control segment, and the
roster holds the generation. A mapping is guarded (native/ps_guard.h): if the file is cut off
under it, zeros take its place, and a word of the caller's is set.

A ring whose name is lost or leads elsewhere is found by the descriptors that its other processes
keep: a mapping holds one.

The native table knows a guard by its address. But an address can be used again before a guard is
ended: Python unmaps without the interpreter's lock, and notifies weak references only afterwards.
So this module keeps the guards of this process too, and the end of an old one leaves a new one
alone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gadei_ps import _native
from gadei_ps.errors import SegmentError
from gadei_ps.machine import ownership
from gadei_ps.memory import layout, segment, shm
from gadei_ps.memory.layout import RING
from gadei_ps.memory.segment import Segment

SLOTS_AT = layout.rounded(RING.itemsize, layout.PAGE)
_guards: dict[int, _Guard] = {}
"""Guards by the address of their mapping."""
_turn = threading.RLock()  # the garbage collector may end a guard in the middle of a call


@dataclass(frozen=True)
class Sizes:
    """Sizes of every ring of a job."""

    slots: int
    capacity: int
    """Payload bytes of a slot."""

    @property
    def slot_bytes(self) -> int:
        return layout.PAYLOAD_AT + self.capacity

    @property
    def bytes(self) -> int:
        """Size of the whole segment (bytes)."""
        return layout.rounded(SLOTS_AT + self.slots * self.slot_bytes, layout.PAGE)


def sizes(payload_bytes: int, slots: int) -> Sizes:
    """payload_bytes: of the largest payload (weights.payload_bytes)."""
    return Sizes(slots, layout.rounded(payload_bytes, layout.PAGE))


@dataclass(eq=False)
class _Guard:
    mapping: weakref.ref[mmap.mmap]
    address: int
    size: int
    word: int
    value: int
    owner: object

    def begin(self) -> None:
        with _turn:
            old = _guards.pop(self.address, None)
            if old is not None:
                _native.unguard(self.address)
            _native.guard(self.address, self.size, self.word, self.value)
            _guards[self.address] = self

    def end(self) -> None:
        """Nothing happens if that has been done, or if another mapping is at this address now."""
        with _turn:
            if _guards.get(self.address) is self:
                del _guards[self.address]
                _native.unguard(self.address)


def guard(ring: Segment, word: int, value: int, owner: object) -> None:
    """Store `value` (64 bits) at the address `word` if the memory of the ring is lost.

    owner: whose memory the word is; it lives as long as the mapping. Raises OSError.
    """
    memory = ring.memory
    made = _Guard(weakref.ref(memory), ring.address, len(memory), word, value, owner)
    made.begin()
    weakref.finalize(memory, made.end).atexit = False


def close(ring: Segment) -> None:
    """Unmap a ring and end its guard; any thread. Nothing happens if an array of it is left."""
    one = next((one for one in list(_guards.values()) if one.mapping() is ring.memory), None)
    if one is not None:
        one.end()
    try:
        ring.memory.close()
    except BufferError:
        if one is not None:
            one.begin()


def attach(name: str, size: int, inode: int, holders: Iterable[int] = ()) -> Segment:
    """Map a ring of this size.

    inode: of its file, from the watchdog; the learner may have given the name to another file.
    holders: pids of processes of the job, of which some may have it mapped; asked in this order
    where the name does not lead to it. Raises FileNotFoundError, SegmentError if there is only a
    file that is another or shorter, or no file of this user's, or OSError without memory or
    descriptors.
    """
    problem: Exception
    try:
        return _map(shm.path_of(name), name, size, inode)
    except FileNotFoundError:
        problem = FileNotFoundError(errno.ENOENT, "no such segment", name)
    except SegmentError as error:
        problem = error
    for path in _kept(inode, holders):
        with contextlib.suppress(OSError, SegmentError):
            return _map(path, name, size, inode, kept=True)
    raise problem


def _map(path: Path, name: str, size: int, inode: int, *, kept: bool = False) -> Segment:
    """kept: the path is a descriptor of another process, which is a link."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if kept else shm.open_segment(name, writable=True)
    try:
        if ownership.foreign(os.fstat(fd), os.geteuid()):
            raise SegmentError(f"{name}: not a file of this user's")
        if os.fstat(fd).st_ino != inode:
            raise SegmentError(f"{name}: another file has taken its place")
        return segment.map_known(fd, name, size)
    finally:
        os.close(fd)


def _kept(inode: int, holders: Iterable[int]) -> list[Path]:
    """Open descriptors of this file, which may be unlinked or renamed."""
    device = shm.SHM.stat().st_dev
    found = []
    for pid in holders:
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    status = path.stat()
                    if (status.st_ino, status.st_dev) == (inode, device):
                        found.append(path)
    return found


def lost(name: str, size: int) -> Segment:
    """Make zeros in place of a ring that cannot be mapped, as if its memory had just been lost."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return Segment(name, memory, _native.address(memory), size, 0, os.geteuid())
