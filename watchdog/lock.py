"""The lock of a job's name: one watchdog for each."""

from __future__ import annotations

from gadei_ps.errors import JobInUse
from gadei_ps.job import paths, service
from gadei_ps.job.lock_file import LockFile


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
