"""POSIX shared-memory segments: create, attach, validate, unlink, and find stale ones.

Uses posix_ipc, because the resource tracker of multiprocessing.shared_memory unlinks segments that
other processes still use.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import posix_ipc

from gadei_ps import _native
from gadei_ps.errors import NoSharedMemory, OtherVersion, SegmentError, UsageError
from gadei_ps.machine import process
from gadei_ps.memory import build, layout

LARGE_PAGE = 2 << 20  # of most processors
SHM = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")
SEGMENT_NAME = re.compile(
    r"gadei-ps\.(?P<uid>\d+)\.(?P<job>[A-Za-z0-9_-]+)\.(?P<part>control|weights|state|ring\.\d+)"
)
HALF_MADE_S = 5.0  # after this time, a segment without magic or owner counts as stale


def check_job_name(job: str) -> str:
    """Returns the name, or raises UsageError."""
    if not JOB_NAME.fullmatch(job):
        raise UsageError(
            f"job name {job!r}: use 1 to 48 letters, digits, '-' and '_', "
            "beginning with a letter or digit"
        )
    return job


def segment_name(job: str, part: str, uid: int | None = None) -> str:
    """Name of a job's segment; `part` is control, weights, state or ring.K."""
    return f"/gadei-ps.{os.getuid() if uid is None else uid}.{job}.{part}"


@dataclass(eq=False)
class Segment:
    """A mapped segment. It stays mapped until its last NumPy view is deleted."""

    name: str
    memory: mmap.mmap
    address: int
    size: int

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


def create(
    job: str,
    part: str,
    kind: layout.SegmentKind,
    size: int,
    *,
    job_id: bytes,
    generation: int = 0,
    index: int = 0,
) -> Segment:
    """Watchdog: makes a segment of `size` bytes and reserves its memory; call publish() at the end.

    Raises NoSharedMemory if /dev/shm is missing, full or too small, and FileExistsError if the name
    is taken.
    """
    name = segment_name(job, part)
    size = layout.rounded(size, layout.PAGE)
    try:
        shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, 0o600)
    except posix_ipc.ExistentialError:
        raise FileExistsError(errno.EEXIST, "segment exists", name) from None
    except OSError as error:
        raise NoSharedMemory(f"cannot make {name} in {SHM}: {error.strerror}") from None
    try:
        if size > _free():  # otherwise reserving could make the kernel kill a process
            raise _no_space(name, size)
        try:
            os.ftruncate(shared.fd, size)
            memory = _map(shared.fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
            # Filled through the mapping: posix_fallocate alone would give it small pages only.
            _native.populate(_native.address(memory), size)
            # Without this, a full /dev/shm would cause SIGBUS in the middle of training.
            os.posix_fallocate(shared.fd, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise _no_space(name, size) from None
            what = f"cannot reserve {size >> 20} MiB for {name}: {error.strerror}"
            raise NoSharedMemory(what) from None
    except BaseException:
        posix_ipc.unlink_shared_memory(name)
        raise
    finally:
        shared.close_fd()
    segment = Segment(name, memory, _native.address(memory), size)
    header = segment.header
    # Start time before pid: an owner without a start time would count as dead.
    header["owner_start"] = process.start_ticks(os.getpid())
    header["owner_pid"] = os.getpid()
    header["layout_version"] = layout.LAYOUT_VERSION
    header["kind"] = kind
    header["job_id"] = np.frombuffer(job_id, np.uint8)
    header["bytes"] = size
    header["generation"] = generation
    header["index"] = index
    header["job_name"] = job.encode()
    if kind == layout.SegmentKind.CONTROL:
        _native.store(segment.word(layout.CONTROL, "build"), _native.BUILD)
    return segment


def _map(fd: int, size: int, protection: int) -> mmap.mmap:
    """A new shared mapping, with large pages if the system grants them on request (see doctor)."""
    memory = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    if size >= LARGE_PAGE:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _free() -> int:
    """Bytes that /dev/shm can still give; it may be larger than the machine's free memory."""
    space = os.statvfs(SHM)
    free = space.f_bavail * space.f_frsize
    with contextlib.suppress(OSError, StopIteration, ValueError), MEMINFO.open() as lines:
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        free = min(free, int(line.split()[1]) * 1024)
    return free


def _no_space(name: str, size: int) -> NoSharedMemory:
    return NoSharedMemory(
        f"{SHM} has {_free() / 2**20:.1f} MiB free and {name[1:]} needs {size / 2**20:.1f} MiB: "
        "free some (gadei-ps gc), enlarge it (mount -o remount,size=...), or use fewer ring slots"
    )


def attach(
    name: str, kind: layout.SegmentKind, *, writable: bool, job_id: bytes | None = None
) -> Segment:
    """Maps an existing segment and validates its header.

    Raises FileNotFoundError, or SegmentError if the segment is foreign, truncated, half made, or of
    another layout version, or if a control segment is of another build.
    """
    try:
        shared = posix_ipc.SharedMemory(name, read_only=not writable)
    except posix_ipc.ExistentialError:
        raise FileNotFoundError(errno.ENOENT, "no such segment", name) from None
    except (posix_ipc.PermissionsError, PermissionError):
        raise SegmentError(f"{name}: no permission; it belongs to another user") from None
    try:
        return attach_file(shared.fd, name, kind, writable=writable, job_id=job_id)
    finally:
        shared.close_fd()


def attach_file(
    fd: int,
    name: str,
    kind: layout.SegmentKind,
    *,
    writable: bool,
    job_id: bytes | None = None,
) -> Segment:
    """Maps a segment that is open already, even if its name is lost. Raises SegmentError.

    fd: stays open.
    """
    size = os.fstat(fd).st_size
    if size < layout.HEADER.itemsize:
        raise SegmentError(f"{name}: truncated ({size} bytes)")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = _map(fd, size, protection)
    segment = Segment(name, memory, _native.address(memory), size)
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
    if int(header["bytes"]) != size:
        raise SegmentError(f"{name}: truncated ({size} bytes of {int(header['bytes'])})")
    if kind == layout.SegmentKind.CONTROL:
        theirs = _native.load(segment.word(layout.CONTROL, "build"))
        if theirs != _native.BUILD:
            raise OtherVersion(name, build.difference(theirs, _native.BUILD))
    if job_id is not None and header["job_id"].tobytes() != job_id:
        raise SegmentError(f"{name}: belongs to another incarnation of the job")
    return segment


def unlink(name: str) -> bool:
    """Removes the name; the memory stays until its last mapping goes. False without such a name."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except (posix_ipc.ExistentialError, FileNotFoundError):
        return False
    return True


@dataclass(frozen=True)
class Found:
    """A segment of this project, found in /dev/shm."""

    name: str
    job: str
    part: str
    uid: int
    size: int
    owner_pid: int
    owned: bool
    """Whether its watchdog is alive."""
    stale: bool
    """Whether neither its watchdog nor a server of the job is alive."""
    readable: bool


def peek(job: str, uid: int | None = None) -> np.void | None:
    """A copy of the job's control record, also if another build made it.

    None if there is none, or if it is half made or of another layout version.
    """
    path = SHM / segment_name(job, "control", uid)[1:]
    try:
        with path.open("rb") as file:
            raw = file.read(layout.CONTROL.itemsize)
    except OSError:
        return None
    if len(raw) < layout.CONTROL.itemsize:
        return None
    control: np.void = np.frombuffer(raw, layout.CONTROL, 1)[0]
    header = control["header"]
    known = int(header["magic"]), int(header["layout_version"])
    return control if known == (layout.MAGIC, layout.LAYOUT_VERSION) else None


def server_pids(job: str, uid: int | None = None) -> list[int]:
    """Process ids of the job's servers that are alive, as its control segment names them."""
    control = peek(job, uid)
    if control is None:
        return []
    lines = [(int(line["pid"]), int(line["start"])) for line in control["server"]]
    return [pid for pid, start in lines if process.alive(pid, start)]


def is_kept(job: str) -> bool:
    """Whether the next `serve` of this job, by its own build, would continue with its memory.

    Memory of another layout version cannot be read, and counts as kept.
    """
    control: np.void | None
    try:
        found = attach(segment_name(job, "control"), layout.SegmentKind.CONTROL, writable=False)
        control = found.view(layout.CONTROL)
    except OtherVersion:
        control = peek(job)
        if control is None:
            return True
    except (FileNotFoundError, SegmentError):
        return False
    running = int(control["phase"]) < layout.Phase.STOPPED
    return running and bool(int(control["model_ready"])) and not int(control["temporary"])


def other_build(job: str) -> str | None:
    """How the job's build differs from this program's; None if it does not, or without a job."""
    try:
        found = attach(segment_name(job, "control"), layout.SegmentKind.CONTROL, writable=False)
    except OtherVersion as error:
        return error.what
    except (FileNotFoundError, SegmentError):
        return None
    return build.server_difference(int(found.view(layout.CONTROL)["server_build"]))


def find(job: str | None = None) -> list[Found]:
    """All segments of this project in /dev/shm, or one job's (of this user)."""
    found = []
    try:
        names = sorted(path.name for path in SHM.iterdir())
    except OSError:
        return []
    for name in names:
        match = SEGMENT_NAME.fullmatch(name)
        if not match or (
            job is not None and (match["job"] != job or int(match["uid"]) != os.getuid())
        ):
            continue
        found.append(_look(name, match["job"], match["part"], int(match["uid"])))
    looked = [one for one in found if one is not None]
    served = {
        key: bool(server_pids(*key)) for key in {(one.job, one.uid) for one in looked if one.stale}
    }
    return [
        replace(one, stale=False) if one.stale and served[one.job, one.uid] else one
        for one in looked
    ]


def _look(name: str, job: str, part: str, uid: int) -> Found | None:
    path = SHM / name
    try:
        status = path.stat()
        with path.open("rb") as file:
            raw = file.read(layout.HEADER.itemsize)
    except FileNotFoundError:
        return None
    except OSError:
        size = status.st_size
        return Found(f"/{name}", job, part, uid, size, 0, owned=False, stale=False, readable=False)
    raw = raw.ljust(layout.HEADER.itemsize, b"\0")
    header = np.frombuffer(raw, layout.HEADER, 1)[0]
    pid, start = int(header["owner_pid"]), int(header["owner_start"])
    half_made_s = time.time() - status.st_mtime
    owned = process.alive(pid, start)
    stale = not owned if pid else half_made_s > HALF_MADE_S
    size = status.st_size
    return Found(f"/{name}", job, part, uid, size, pid, owned=owned, stale=stale, readable=True)
