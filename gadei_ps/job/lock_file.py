"""A file that a process keeps locked while it lives: for a job's name, its watchdog does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from gadei_ps.errors import ControlError, JobDiffers, JobInUse, JobNotFound, NameTaken
from gadei_ps.job import paths, service
from gadei_ps.job.control import Status, ask

DYING_S = 5.0  # for the locks of a watchdog that was killed
LIVING_ANSWER_S = 1.0  # for the status of one that was not
RETRY_S = 0.002

Taken = TypeVar("Taken")


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


def awaited(job: str, take: Callable[[], Taken], waits: Callable[[], bool] = lambda: True) -> Taken:
    """Return what `take` returns, which takes locks of the job's watchdog.

    A watchdog that was killed has its locks until the kernel has ended it, and its child that was
    just starting has them until it executes its program. So `take` is called again for up to
    DYING_S, unless a watchdog of the job answers. waits: returns False to end the wait. Raises what
    `take` raises.
    """
    until = time.monotonic() + DYING_S
    while True:
        try:
            return take()
        except (BlockingIOError, JobInUse) as error:
            is_final = isinstance(error, JobDiffers | NameTaken)
            if is_final or not waits() or time.monotonic() >= until or _answers(job):
                raise
        time.sleep(RETRY_S)


def _answers(job: str) -> bool:
    """Return whether a watchdog answers. The socket of a killed one may still take connections."""
    with contextlib.suppress(JobNotFound, ControlError):
        return bool(ask(job, Status(), LIVING_ANSWER_S))
    return False
