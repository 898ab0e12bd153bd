"""Files and processes that are this user's own, as the kernel confirms.

/dev/shm can be written by every user: a file there with the right name may be another user's, a
FIFO, a link, a directory. And a pid that was read from memory may be another user's process.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from gadei_ps.errors import NotOurs
from gadei_ps.machine import process

SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
OTHERS = 0o077  # permissions of the group and of everybody
NOT_REGULAR = {
    stat.S_IFDIR: "it is a directory",
    stat.S_IFIFO: "it is a FIFO",
    stat.S_IFLNK: "it is a symbolic link",
    stat.S_IFSOCK: "it is a socket",
    stat.S_IFCHR: "it is a device",
    stat.S_IFBLK: "it is a device",
}
# Errors of open() for things that are not files, or that this user may not open.
REFUSED = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENODEV}


def open_file(path: Path, flags: int, owner: int | None = None) -> int:
    """Open a file of this user that no other user can open; return the descriptor.

    owner: whose file it must be; by default the effective user's. Never waits and follows no link.
    Raises NotOurs where it is anything else, FileNotFoundError, or OSError where it is such a file
    and cannot be opened.
    """
    owner = os.geteuid() if owner is None else owner
    try:
        fd = os.open(path, flags | SAFELY, 0o600)
    except OSError as error:
        why = _why_not_opened(path, error, owner) if error.errno in REFUSED else ""
        if not why:
            raise
        raise NotOurs(f"{path}: {why}") from None
    try:
        why = foreign(os.fstat(fd), owner)
        if why:
            raise NotOurs(f"{path}: {why}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _why_not_opened(path: Path, error: OSError, owner: int) -> str:
    """Empty if it is a file that `owner` alone can open, and we are `owner`, or root."""
    try:
        why = foreign(path.lstat(), owner)
    except OSError:
        return str(error.strerror)
    strange = os.geteuid() not in (0, owner)
    return why or (f"it belongs to another user (uid {owner})" if strange else "")


def foreign(status: os.stat_result, owner: int) -> str:
    """Explain why a file is not one that `owner` alone can open; empty if it is."""
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        return NOT_REGULAR.get(kind, "it is not a regular file")
    if status.st_uid != owner:
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & OTHERS:
        return f"other users may open it (mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_nlink > 1:
        return "it has another name, too (a hard link)"
    return ""


def open_process(pid: int, start: int) -> int | None:
    """A pidfd of the very process, to signal it; None if it has ended or is another user's.

    Raises OSError as watch_process() does.
    """
    pidfd = watch_process(pid, start)
    if pidfd is None:
        return None

    def is_ours() -> bool:
        user = process.owner(pid)
        if user is None and process.alive(pid, start):
            raise OSError(errno.EAGAIN, f"cannot find the owner of process {pid}")
        return user == os.geteuid()

    return _kept_if(is_ours, pidfd)


def watch_process(pid: int, start: int) -> int | None:
    """Open a pidfd of the very process, to be notified of its death; None if it has ended.

    Raises OSError if no file descriptor or memory is free.
    """
    if pid <= 0 or start <= 0:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # The descriptor was opened before: a process that is alive now is the one behind it.
    return _kept_if(lambda: process.start_ticks(pid) == start, pidfd)


def _kept_if(wanted: Callable[[], bool], pidfd: int) -> int | None:
    """Return the descriptor if it is wanted; else close it, even if the question fails."""
    keep = False
    try:
        keep = wanted()
    finally:
        if not keep:
            os.close(pidfd)
    return pidfd if keep else None
