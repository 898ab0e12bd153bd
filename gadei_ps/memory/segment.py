"""POSIX shared-memory segments: create, attach, validate, unlink.

Uses posix_ipc, because the resource tracker of multiprocessing.shared_memory unlinks segments that
other processes still use.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import posix_ipc

from gadei_ps import _native
from gadei_ps.errors import NoSharedMemory, OtherVersion, SegmentError, in_words
from gadei_ps.machine import ownership, process
from gadei_ps.memory import build, layout, presence, reserve, shm
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.reserve import Progress

LARGE_PAGE = 2 << 20  # of most processors
# What begins a segment of each kind: it cannot be shorter.
LEAST = {
    SegmentKind.CONTROL: layout.CONTROL.itemsize,
    SegmentKind.WEIGHTS: layout.WEIGHTS.itemsize,
    SegmentKind.STATE: layout.STATE.itemsize,
    SegmentKind.RING: layout.RING.itemsize,
}


@dataclass(eq=False)
class Segment:
    """A mapped segment. It stays mapped until its last NumPy view is deleted."""

    name: str
    memory: mmap.mmap
    address: int
    size: int
    inode: int
    owner: int
    """The user whose file it is."""

    def view(self, dtype: np.dtype[np.void], at: int = 0) -> np.void:
        """A struct in the segment, as a NumPy record that reads and writes through."""
        record: np.void = np.frombuffer(self.memory, dtype, 1, at)[0]
        return record

    def array(self, dtype: object, count: int, at: int) -> np.ndarray:
        """`count` values. at: bytes from the segment's begin to the first one."""
        return np.frombuffer(self.memory, np.dtype(dtype), count, at)  # type: ignore[call-overload]

    def word(self, struct: np.dtype[np.void], field: str) -> int:
        """The address of a field of the struct that begins the segment."""
        return self.address + layout.offset(struct, field)

    @property
    def header(self) -> np.void:
        return self.view(layout.HEADER)

    def publish(self) -> None:
        """Watchdog: stores the magic; from then on other processes may attach."""
        _native.store(self.address, layout.MAGIC)  # SYNC POINT: made whole


Fill = Callable[[Segment, int, int], None]
"""Writes bytes `at` to `at + size` of a new segment, whose pages are there; (segment, at, size)."""


def create(
    job: str,
    part: str,
    kind: layout.SegmentKind,
    size: int,
    *,
    job_id: bytes,
    generation: int = 0,
    index: int = 0,
    progress: Progress | None = None,
    fill: Fill | None = None,
) -> Segment:
    """Watchdog: makes a segment of `size` bytes and reserves its memory; call publish() at the end.

    fill: is called for each piece of it, in several threads; it leaves the header alone.
    Raises NoSharedMemory if /dev/shm is missing, full or too small or a memory limit forbids it,
    FileExistsError if the name is taken, reserve.Cancelled, and what `fill` raises; then nothing is
    left of it.
    """
    name = shm.segment_name(job, part)
    size = layout.rounded(size, layout.PAGE)
    try:
        shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, 0o600)
    except posix_ipc.ExistentialError:
        raise FileExistsError(errno.EEXIST, "segment exists", name) from None
    except posix_ipc.PermissionsError:  # no OSError
        denied = OSError(errno.EACCES, os.strerror(errno.EACCES))
        raise NoSharedMemory(f"cannot make {name} in {shm.SHM}: {in_words(denied)}") from None
    except OSError as error:
        raise NoSharedMemory(f"cannot make {name} in {shm.SHM}: {in_words(error)}") from None
    memory: mmap.mmap | None = None
    try:
        # Otherwise reserving could make the kernel kill a process.
        reserve.check({"": size}, name[1:])
        try:
            os.ftruncate(shared.fd, size)
            memory = _map(shared.fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
            inode = os.fstat(shared.fd).st_ino
            address = _native.address(memory)
            segment = Segment(name, memory, address, size, inode, os.geteuid())
            # Its first page names the owner before the rest is made, which may take long: what a
            # dead watchdog has left half made differs from what a living one is making.
            reserve.take(shared.fd, segment.address, layout.PAGE)
            _write_header(segment, job, kind, job_id, generation, index)
            # Without this, a full /dev/shm would cause SIGBUS in the middle of training.
            filling = None if fill is None else functools.partial(fill, segment)
            reserve.take(shared.fd, segment.address, size, progress, filling)
        except OSError as error:
            if error.filename:  # it was not the segment's memory
                raise NoSharedMemory(f"cannot make {name}: {in_words(error)}") from None
            if limit := reserve.own_limit(error, size):
                what = f"cannot reserve {reserve.mib(size)} MiB for {name}: {limit}"
                raise NoSharedMemory(what) from None
            room = reserve.room()
            full = error.errno in (errno.ENOSPC, errno.EFBIG)
            if full or (error.errno == errno.ENOMEM and room.free < size):
                raise reserve.no_space({"": size}, name[1:], room) from None
            what = f"cannot reserve {reserve.mib(size)} MiB for {name}: {error.strerror}"
            raise NoSharedMemory(what) from None
    except BaseException:
        posix_ipc.unlink_shared_memory(name)
        if (
            memory is not None
        ):  # now: the error's traceback would keep it, for another thread to free
            with contextlib.suppress(BufferError):
                memory.close()
        raise
    finally:
        shared.close_fd()
    return segment


def _write_header(
    segment: Segment, job: str, kind: layout.SegmentKind, job_id: bytes, generation: int, index: int
) -> None:
    header = segment.header
    header["layout_version"] = layout.LAYOUT_VERSION
    header["kind"] = kind
    header["job_id"] = np.frombuffer(job_id, np.uint8)
    header["bytes"] = segment.size
    header["generation"] = generation
    header["index"] = index
    header["job_name"] = job.encode()
    enter_owner(header)
    if kind == layout.SegmentKind.CONTROL:
        _native.store(segment.word(layout.CONTROL, "build"), _native.BUILD)


def enter_owner(header: np.void) -> None:
    """Watchdog: enters this process as the owner of a segment."""
    namespace, start = process.namespace(), process.start_ticks(os.getpid())
    header["owner_pid"] = 0  # so that at no instant the words of two owners stand together
    header["owner_namespace"] = namespace
    # Start time before pid: an owner without a start time would count as dead.
    header["owner_start"] = start
    header["owner_pid"] = os.getpid()


def _map(fd: int, size: int, protection: int) -> mmap.mmap:
    """A new shared mapping, with large pages if the system grants them on request (see doctor).

    It is in no core dump: the memory outlives the process, and writing it would delay a failover.
    """
    memory = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    memory.madvise(mmap.MADV_DONTDUMP)
    if size >= LARGE_PAGE:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def attach(
    name: str,
    kind: layout.SegmentKind,
    *,
    writable: bool,
    job_id: bytes | None = None,
    owner: int | None = None,
) -> Segment:
    """Map an existing segment and validate its header.

    owner: user whose it must be, by default ours. Raises FileNotFoundError, or SegmentError if the
    segment is not ours, foreign, truncated, half made, or of another layout version, or if a
    control segment is of another build, or OSError without memory or descriptors.
    """
    fd = shm.open_segment(name, writable=writable, owner=owner)
    try:
        return attach_file(fd, name, kind, writable=writable, job_id=job_id)
    finally:
        os.close(fd)


def attach_file(
    fd: int, name: str, kind: layout.SegmentKind, *, writable: bool, job_id: bytes | None = None
) -> Segment:
    """Map a segment that is open already, even if its name is lost.

    Raises SegmentError, or OSError without memory.

    fd: stays open.
    """
    status = os.fstat(fd)
    size = status.st_size
    if size < layout.HEADER.itemsize:
        raise SegmentError(f"{name}: truncated ({size} bytes)")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        memory = _map(fd, size, protection)
    except OverflowError as error:
        raise SegmentError(f"{name}: {size} bytes cannot be mapped: {error}") from None
    except OSError as error:  # of the machine: the segment may be whole, and must not be given up
        why = reserve.own_limit(error, size) or error.strerror
        raise OSError(error.errno, f"cannot be mapped: {why}", name) from None
    segment = Segment(name, memory, _native.address(memory), size, status.st_ino, status.st_uid)
    header = segment.header
    if _native.load(segment.address) != layout.MAGIC:  # SYNC POINT: made whole
        raise SegmentError(f"{name}: not a gadei-ps segment, or only half made")
    version = int(header["layout_version"])
    if version != layout.LAYOUT_VERSION:
        raise OtherVersion(
            name, f"made with layout version {version}, this program speaks {layout.LAYOUT_VERSION}"
        )
    if int(header["kind"]) != kind:
        raise SegmentError(f"{name}: is of kind {int(header['kind'])}, not {kind.name.lower()}")
    if int(header["bytes"]) != size or size < LEAST[kind]:
        whole = max(int(header["bytes"]), LEAST[kind])
        raise SegmentError(f"{name}: truncated ({size} bytes of {whole})")
    if kind == layout.SegmentKind.CONTROL:
        theirs = _native.load(segment.word(layout.CONTROL, "build"))
        if theirs != _native.BUILD:
            raise OtherVersion(name, build.difference(theirs, _native.BUILD))
    if job_id is not None and header["job_id"].tobytes() != job_id:
        raise SegmentError(f"{name}: belongs to another incarnation of the job")
    return segment


def map_known(fd: int, name: str, size: int) -> Segment:
    """Map `size` bytes of an open file, writable, whatever stands in them.

    For a segment whose header another process may have written over. fd: stays open. Raises
    SegmentError if the file is shorter.
    """
    status = os.fstat(fd)
    if status.st_size < size:
        raise SegmentError(f"{name}: truncated ({status.st_size} bytes of {size})")
    memory = _map(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
    return Segment(name, memory, _native.address(memory), size, status.st_ino, status.st_uid)


def unlink(name: str) -> bool:
    """Remove the name; the memory stays until its last mapping goes. False without such a name.

    What is not ours, or cannot be removed, stays and counts as no such name. Raises nothing.
    """
    try:
        if ownership.foreign(shm.path_of(name).lstat(), os.geteuid()):
            return False
        posix_ipc.unlink_shared_memory(name)
    except (posix_ipc.ExistentialError, posix_ipc.PermissionsError, OSError):
        return False
    return True


def is_named(mapped: Segment) -> bool:
    """Return whether the segment's name still leads to it. True even if that is unknown."""
    try:
        return shm.path_of(mapped.name).lstat().st_ino == mapped.inode
    except FileNotFoundError:
        return False
    except OSError:
        return True


def is_kept(job: str, uid: int | None = None) -> bool:
    """Return whether the next `serve` or `run` of this job, by its own build, would continue it.

    Memory of another layout version cannot be read, and counts as kept.
    """
    control: np.void | None
    try:
        name = shm.segment_name(job, "control", uid)
        found = attach(name, layout.SegmentKind.CONTROL, writable=False, owner=uid)
        control = found.view(layout.CONTROL)
    except OtherVersion:
        control = presence.peek(job, uid)
        if control is None:
            return True
    except (FileNotFoundError, SegmentError):
        return False
    stopped = int(control["phase"]) == layout.Phase.STOPPED
    temporary = int(control["temporary"]) == layout.Kept.NEVER
    return not stopped and bool(int(control["model_ready"])) and not temporary


def other_build(job: str, uid: int | None = None) -> str | None:
    """Describe how the job's build differs from this program's; None if equal, or without a job."""
    try:
        name = shm.segment_name(job, "control", uid)
        found = attach(name, layout.SegmentKind.CONTROL, writable=False, owner=uid)
    except OtherVersion as error:
        return error.what
    except (FileNotFoundError, SegmentError):
        return None
    return build.server_difference(int(found.view(layout.CONTROL)["server_build"]))
