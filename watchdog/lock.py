"""The lock of a job's name: one watchdog for each."""

from __future__ import annotations

import contextlib
import fcntl
import os

from gadei_ps.errors import JobInUse
from gadei_ps.job import paths, service


class NameLock:
    """Held from its making until release(), or until this process dies."""

    def __init__(self, job: str) -> None:
        """Raises JobInUse if another watchdog holds it, ControlError if it cannot be made."""
        paths.check_own()
        paths.check_socket(job)
        self._job = job
        self._path = paths.lock_path(job)
        while True:
            self._fd = paths.open_lock(self._path, create=True)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._fd)
                raise JobInUse(
                    f"job {job!r} is running already; choose another name, or stop "
                    f"it: {service.command(job, f'stop {job}')}"
                ) from None
            # The holder before us may have removed the file since we opened it.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), self._path.stat()):
                    return
            os.close(self._fd)

    def is_named(self) -> bool:
        """Return whether the file's name still leads to the file that is locked."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), self._path.lstat())
        return False

    def renew(self) -> None:
        """Locks the file of this name now: the one that was locked was removed or replaced.

        Raises JobInUse if another watchdog was quicker, ControlError if it cannot be a lock, or
        OSError; the old lock stays then.
        """
        new = NameLock(self._job)
        self._fd, new._fd = new._fd, self._fd
        os.close(new._fd)

    def release(self) -> None:
        """Removes the file while it is still locked, so that no process locks a removed one."""
        if self.is_named():
            with contextlib.suppress(OSError):  # a file that is not locked is in nobody's way
                self._path.unlink()
        os.close(self._fd)
