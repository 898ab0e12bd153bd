"""A file that a process keeps locked while it lives: for a job's name, its watchdog does."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self

from gadei_ps.errors import JobInUse
from gadei_ps.job import paths, service


class LockFile:
    """A locked file, until release(), close() or the end of this process.

    create: also the directory. Raises BlockingIOError if another process holds the lock,
    ControlError if something else has the name, FileNotFoundError, or another OSError.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self._path = path
        while True:
            self._fd = paths.open_lock(path, create=create)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(self._fd)
                raise
            # The holder before us may have removed the file since we opened it.
            if self.is_named():
                return
            os.close(self._fd)

    def is_named(self) -> bool:
        """Return whether the path still leads to the file that is locked."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), self._path.lstat())
        return False

    @property
    def is_empty(self) -> bool:
        """True if nothing was written to the file."""
        return not os.fstat(self._fd).st_size

    def replace(self, new: Self) -> None:
        """Hold the lock of `new` in place of the one before."""
        self._fd, new._fd = new._fd, self._fd
        new.close()

    def release(self) -> None:
        """Remove the file while it is still locked, so that no process locks a removed one.

        A file that another process has put in its place stays.
        """
        if self.is_named():
            with contextlib.suppress(OSError):  # a file that is not locked is in nobody's way
                self._path.unlink()
        self.close()

    def close(self) -> None:
        """Unlock the file, and leave it where it is."""
        os.close(self._fd)


class NameLock(LockFile):
    """The lock of a job's name.

    Raises JobInUse if another watchdog holds it, ControlError if it cannot be made.
    """

    def __init__(self, job: str) -> None:
        paths.check_own()
        paths.check_socket(job)
        self._job = job
        try:
            super().__init__(paths.lock_path(job))
        except BlockingIOError:
            raise JobInUse(
                f"job {job!r} is running already; choose another name, or stop "
                f"it: {service.command(job, f'stop {job}')}"
            ) from None

    def renew(self) -> None:
        """Lock the file of this name now: the one that was locked was removed or replaced.

        Raises JobInUse if another watchdog was quicker, ControlError if it cannot be a lock, or
        OSError; the old lock stays then.
        """
        self.replace(NameLock(self._job))
