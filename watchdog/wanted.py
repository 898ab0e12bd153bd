"""The file that shows units of learners that their job is wanted.

gadei-ps-end@ makes it when it is started, and removes it when it is stopped: in between, units of
learners may start (unit_files.py). The watchdog of a unit looks after it, because a unit whose
condition fails reports nothing: it makes the file again where it is lost.
"""

from __future__ import annotations

import os
from typing import Any

from gadei_ps.errors import ControlError, GadeiError, in_words
from gadei_ps.job import paths, service


class Wanted:
    """The file of one job. Does nothing in a process that is not the watchdog of a unit."""

    def __init__(self, job: str, log: Any) -> None:
        self._job = job
        self._log = log
        self._ours = service.runs_in(job, watchdog=True)
        self.problem = ""
        """Reason why no learner's unit can start, in words; else empty."""

    def tick(self) -> None:
        """Make the file if it is not there, and log it. Raises nothing."""
        if not self._ours:
            return
        before, self.problem = self.problem, ""
        try:
            self._make()
        except (GadeiError, OSError) as error:  # the directory may have changed since the start
            self.problem = f"units of learners do not start: {in_words(error)}"
            if self.problem != before:
                self._log.error("units of learners do not start", reason=in_words(error))

    def _make(self) -> None:
        """Raise ControlError or OSError."""
        path = paths.directory(make=True) / f"{self._job}.wanted"
        if path.exists():
            return
        try:
            os.close(os.open(path, os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise ControlError(f"{path} cannot be made ({error.strerror})") from None
        start = service.expected(self._job).systemctl("start", f"gadei-ps-learner@{self._job}")
        self._log.warning(
            "the file that lets units of learners start was lost, and is made again: start those "
            f"that were refused meanwhile ({start})",
            path=str(path),
        )
