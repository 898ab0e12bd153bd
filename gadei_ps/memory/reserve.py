"""Memory for a segment: how much there is, and taking it from the system piece by piece.

The kernel zeroes each page that it gives, which takes a second for one or two gigabytes on one
core. So several threads do it, and none holds the GIL meanwhile: the watchdog answers while its
segments are made. A piece is short, because a thread that maps or unmaps memory waits until the
kernel is done with the current pieces.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import pwd
import resource
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gadei_ps import _native, homes
from gadei_ps.errors import NoSharedMemory
from gadei_ps.machine import cgroups, process
from gadei_ps.memory.shm import SHM

MEMINFO = Path("/proc/meminfo")
PIECE = 2 << 20  # bytes; a large page, less than a millisecond of zeroing
MOST_THREADS = 8  # more do not make the memory faster


class Cancelled(Exception):
    """A segment is not wanted any more."""


@dataclass(eq=False)
class Progress:
    """Progress of an allocation (bytes), shared by all threads."""

    total: int = 0
    done: int = 0
    cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int) -> None:
        """So much more is there. Raises Cancelled if it is not wanted any more."""
        with self._lock:
            self.done += size
        if self.cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """End what makes it, with its next piece."""
        self.cancelled = True


# -- how much there is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """Memory that is still available. what: its owner. remedy: how to get more of it."""

    free: int
    what: str
    remedy: str


def room() -> Room:
    """The least of what /dev/shm, the machine and the memory limits of control groups leave.

    Beyond the latter two the kernel would kill a process, so this is looked at before memory is
    taken. Swapping is not counted: weights that are swapped out help nobody.
    """
    space = os.statvfs(SHM)
    shm = Room(space.f_bavail * space.f_frsize, str(SHM), "enlarge it (mount -o remount,size=...)")
    return min([shm, *_limits()], key=lambda one: one.free)


def for_processes() -> int:
    """Return the memory that the machine and control groups still leave for processes (bytes)."""
    return min((one.free for one in _limits()), default=sys.maxsize)


def _limits() -> list[Room]:
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError), MEMINFO.open() as lines:
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        available = int(line.split()[1]) * 1024
        found.append(Room(available, "this machine's memory", "end other programs"))
    limit = cgroups.tightest()
    if limit is not None:
        remedy = "raise it (docker run --memory=..., MemoryMax= of systemd)"
        found.append(Room(limit.free, f"the memory limit {limit.file}", remedy))
    return found


def check(needs: Mapping[str, int], what: str) -> None:
    """Raise NoSharedMemory if the parts do not fit together. needs: bytes by part of `what`."""
    found = room()
    if sum(needs.values()) > found.free:
        raise no_space(needs, what, found)


def check_private(needs: Mapping[str, int], what: str) -> None:
    """The same for memory that does not lie in /dev/shm."""
    found = min(_limits(), key=lambda one: one.free, default=None)
    if found is not None and sum(needs.values()) > found.free:
        raise no_space(needs, what, found)


def no_space(needs: Mapping[str, int], what: str, found: Room | None = None) -> NoSharedMemory:
    """The error of memory that is not there, in one line."""
    found = found or room()
    parts = ", ".join(f"{part} {mib(size)}" for part, size in needs.items() if part)
    return NoSharedMemory(
        f"{found.what} has {mib(found.free)} MiB free and {what} needs "
        f"{mib(sum(needs.values()))} MiB{f' ({parts})' if parts else ''}: "
        f"free some ({_gc()}), {found.remedy}, or use fewer ring slots"
    )


def _gc() -> str:
    """The command that frees memory of dead jobs, for an administrator of the system's units."""
    if not homes.of_the_system():
        return "gadei-ps gc"
    user = f"{os.getuid()}"
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.getuid()).pw_name
    return f"sudo -u {shlex.quote(user)} env GADEI_PS_RUNTIME_DIR={homes.RUNTIME} gadei-ps gc"


def address_space() -> str:
    """The limit of this process's address space and what to do; empty if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"the limit of address space is {mib(soft)} MiB: raise it (ulimit -v, LimitAS=)"


def own_limit(error: OSError, size: int) -> str:
    """Name the limit of this process that an allocation of `size` bytes met; empty if none."""
    if error.errno == errno.EMFILE:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"the limit of open files is {soft}: raise it (ulimit -n, LimitNOFILE=)"
    if error.errno == errno.EFBIG:
        soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if soft != resource.RLIM_INFINITY and size > soft:
            return f"the limit of file sizes is {mib(soft)} MiB: raise it (ulimit -f, LimitFSIZE=)"
    if error.errno == errno.ENOMEM:
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        pages = 0
        with contextlib.suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
        if soft != resource.RLIM_INFINITY and pages * resource.getpagesize() + size > soft:
            return address_space()
    return ""


def mib(size: int) -> str:
    """Format a size in mebibytes with one digit, for messages."""
    return f"{size / 2**20:.1f}"


# -- taking it ------------------------------------------------------------------------------------


def take(
    fd: int,
    address: int,
    size: int,
    progress: Progress | None = None,
    fill: Callable[[int, int], None] | None = None,
) -> None:
    """Reserve the whole of a mapped file, and fill it; each page is zeroed once.

    address: where the file is mapped. fill: called as fill(at, size) for each piece of it once that
    is there, in several threads. Raises OSError if there is no room, Cancelled, and what `fill`
    raises; memory that was reserved by then stays with the file.
    """

    def piece(number: int) -> None:
        at = number * PIECE
        length = min(PIECE, size - at)
        # Through the mapping: posix_fallocate alone would give small pages only. It follows where
        # that fails, because it reports why, and kernels before 5.14 have nothing else.
        if _native.populate(address + at, length):
            os.posix_fallocate(fd, at, length)
        if fill is not None:
            fill(at, length)
        if progress is not None:
            progress.add(length)

    _in_parallel(-(-size // PIECE), piece)


def close_later(fd: int) -> None:
    """Close a file in a thread of its own.

    If nobody else has it open, the kernel frees its memory first: 0.1 s for each GB.
    """
    try:
        # Not threading: this may be called wherever an object ends, also within that module.
        _thread.start_new_thread(os.close, (fd,))
    except RuntimeError:  # no more threads
        os.close(fd)


def _in_parallel(count: int, work: Callable[[int], None]) -> None:
    """Call work(0) to work(count - 1) in as many threads as there are cores.

    Raises the first error; then not all calls have been made.
    """
    numbers = iter(range(count))  # threads may share it: each number comes once
    failures: list[BaseException] = []

    def go() -> None:
        try:
            for number in numbers:
                if failures:
                    return
                work(number)
        except BaseException as error:
            failures.append(error)

    helpers = [
        threading.Thread(target=go, daemon=True)
        for _ in range(min(count, MOST_THREADS, process.cores()) - 1)
    ]
    started = []
    for helper in helpers:
        with contextlib.suppress(RuntimeError):  # no more threads: the others do it
            helper.start()
            started.append(helper)
    go()
    for helper in started:
        helper.join()
    if failures:
        raise failures[0]
