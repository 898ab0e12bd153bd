"""Locks that show that a watchdog or a server of a job is alive.

Each of them locks a byte of the control segment's file for as long as it lives. A pid is useless to
a process of another pid namespace (another container that shares /dev/shm), and a lock file lies
in a runtime directory that need not be shared; these locks are the inode's own, so every process
that can open the segment meets them.

They are open-file-description locks, on a descriptor that is opened for nothing else: a mapping
would keep its file's lock alive, in forks of this process too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gadei_ps.errors import NotOurs
from gadei_ps.memory import shm

WATCHDOG: Final = 0
SERVERS: Final = (1, 2)
"""Bytes of the file, by the server's line in control."""

# A line of /proc/PID/fdinfo/FD.
ENDED = FileNotFoundError, ProcessLookupError
HELD = re.compile(r"lock:.*OFDLCK.* WRITE .* (?P<byte>\d+) \d+$")
LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


class Hold:
    """A locked byte. It is free again after release(), or when this process has ended."""

    def __init__(self, fd: int) -> None:
        """fd: a descriptor that becomes this object's."""
        self._fd = fd

    @property
    def inode(self) -> int:
        """Inode of the locked control segment."""
        return os.fstat(self._fd).st_ino

    def release(self) -> None:
        """Free the byte; nothing happens if that has been done."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.release()


def take(job: str, byte: int) -> Hold | None:
    """Lock a byte of the job's control segment; None if another process holds it.

    Raises FileNotFoundError, NotOurs, or OSError.
    """
    hold = Hold(shm.open_segment(shm.segment_name(job, "control"), writable=True))
    try:
        fcntl.fcntl(hold._fd, fcntl.F_OFD_SETLK, _lock(byte))
    except OSError as error:
        hold.release()
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise
    return hold


@contextlib.contextmanager
def alone(job: str) -> Iterator[bool]:
    """Keep watchdogs from adopting the job within this block. Yields False if one has the job."""
    try:
        hold = take(job, WATCHDOG)
    except (FileNotFoundError, NotOurs):
        yield True  # there is nothing to adopt
        return
    if hold is None:
        yield False
        return
    try:
        yield True
    finally:
        hold.release()


def nameless(job: str) -> dict[int, int]:
    """Find the processes that hold a control segment of this job which has lost its name.

    Returns the locked byte by pid, for the processes of this user that are visible here. The source
    is /proc, because such a file cannot be opened. Raises OSError if /proc cannot be read for want
    of descriptors or memory.
    """
    path = shm.path_of(shm.segment_name(job, "control"))
    gone, device, found = f"{path} (deleted)", path.parent.stat().st_dev, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(*ENDED, PermissionError):  # or another user's
            if folder.stat().st_uid != os.geteuid():
                continue
            for fd in (folder / "fd").iterdir():
                with contextlib.suppress(*ENDED):  # it has just closed this file
                    if str(fd.readlink()) != gone or fd.stat().st_dev != device:
                        continue
                    for line in (folder / "fdinfo" / fd.name).read_text().splitlines():
                        if match := HELD.match(line):
                            found[int(folder.name)] = int(match["byte"])
    return found


def held(fd: int, byte: int) -> bool:
    """Return whether a process holds the byte through another descriptor than this one's."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(byte))
    return bool(LOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _lock(byte: int) -> bytes:
    return LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)


def is_written(name: str) -> bool:
    """Return whether a process has this segment open or mapped so that it could write to it.

    The kernel grants a read lease on a file only while no process has it open for writing. If it
    grants none for another reason, the answer is True. Raises FileNotFoundError, NotOurs, OSError.
    """
    fd = shm.open_segment(name, writable=False)
    try:
        # If a process opens the file now, the lease is broken and the kernel sends a signal. By
        # default that is SIGIO, which would end this process; SIGURG is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
