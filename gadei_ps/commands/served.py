"""Job of the learners of `run` and `attach`: served by another process, or by this one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps.commands import jobs
from gadei_ps.commands.daemon import Daemon
from gadei_ps.commands.durations import DRAIN_S
from gadei_ps.errors import ControlError, GadeiError, JobNotFound, JobStopped
from gadei_ps.job import control
from gadei_ps.job.control import Connection, Launch, LeaveOut, Status, StopJob
from gadei_ps.job.faults import Processes
from gadei_ps.machine import command_line
from gadei_ps.machine.launch import LearnerNumbers
from gadei_ps.memory import shm, totals
from gadei_ps.memory.layout import MAX_LEARNERS, Phase

TEXT = 4000  # characters of a command that distinguish it from others


def launch(count: int, command: Sequence[str]) -> Launch:
    """The message with which a command reserves numbers for its learners."""
    text_of_command, directory = (
        text.encode(errors="backslashreplace").decode()[:TEXT]
        for text in (command_line.as_text(command), str(Path.cwd()))
    )
    return Launch(count=count, command=text_of_command, directory=directory)


class _Job:
    """A job in which a command starts learners."""

    control: np.void
    """The job's control segment, which is still mapped after the job's end."""
    _ask: Callable[[Any], dict[str, Any]]
    """Returns the watchdog's reply to a message. Raises GadeiError."""
    _launch: Launch | None = None

    def reserve(self, wanted: Launch) -> LearnerNumbers:
        """Reserve numbers for the command's learners, until release() or the command's end."""
        reply = self._ask(wanted)
        self._launch = wanted.model_copy(update={"first": reply["first"]})
        return LearnerNumbers(reply["first"], wanted.count, reply["others"])

    def _reserve_again(self, report: dict[str, Any]) -> None:
        """Reserve the numbers again if another watchdog has adopted the job."""
        one = self._launch
        if one is not None and all(one.first != other["first"] for other in report["commands"]):
            with contextlib.suppress(GadeiError):  # the next report does it
                self._ask(one)

    def release(self) -> None:
        """The learners have ended; this process may live on."""
        if self._launch is not None:
            with contextlib.suppress(GadeiError):
                self._ask(self._launch.model_copy(update={"count": 0}))
            self._launch = None


class Attached(_Job):
    """A job that another process serves; it continues when the learners have ended.

    Servers and learners outlive the job's watchdog, and the next watchdog adopts them.
    """

    says_sync = True
    """Whether its model of synchronization was chosen: by whoever serves it."""

    def __init__(self, job: str) -> None:
        with Connection(job) as connection:
            self.socket = str(connection.path.absolute())
        self.before = jobs.status(self.socket)
        self._ends_idle = self.before["when_idle"] == "stop"
        self._processes = Processes(self.socket)
        self.control = self._processes.control
        self._ask = functools.partial(control.ask, self.socket)

    def report(self) -> dict[str, Any] | None:
        """The job's status; None once it has ended.

        While no watchdog answers, `watchdog_pid` is None and the rest is read from memory.
        """
        try:
            found = jobs.status(self.socket)
        except (JobNotFound, ControlError):
            return self._remembered() if self._goes_on() else None
        if found["job_id"] != self.before["job_id"]:
            return None
        self._ends_idle = found["when_idle"] == "stop"  # a reload may change it
        self._reserve_again(found)
        return found

    def _goes_on(self) -> bool:
        if int(self.control["phase"]) > Phase.DRAINING:
            return False
        if self._processes.server() is not None or self._processes.standby() is not None:
            return True
        return (shm.SHM / self._processes.segment.name[1:]).exists()

    def _remembered(self) -> dict[str, Any]:
        roster = self.control["roster"]
        pids = roster["pid"][roster["retired"] != roster["generation"]]
        now = {
            "version": int(self.control["version"]),
            "learners": [{"pid": pid} for pid in pids.tolist()],
            "watchdog_pid": None,
        }
        return self.before | totals.counts(self.control) | now

    def was_stopped(self) -> bool:
        """Return whether the job's stop has ended the learners, and not vice versa."""
        stopped = (Phase.DRAINING, Phase.KEPT, Phase.STOPPED)
        return int(self.control["phase"]) in stopped and not self._ends_idle

    def leave_out(self, number: int) -> None:
        """The job may await learners of other commands: their numbers are not known here."""

    def keep(self, wanted: bool) -> None:
        """It stays in any case."""

    def end(self, reason: str = "", *, finished: bool) -> dict[str, Any] | None:
        """Nothing is to be ended."""
        self.release()
        return self.report()


class Served(_Job):
    """A job that this process serves; it ends with the learners."""

    def __init__(self, served: Daemon) -> None:
        self.socket = str(served.socket)
        self._daemon = served
        self.says_sync = "sync" in served.config.model_fields_set
        """Whether its model of synchronization was chosen, and is not the default."""
        self.control = Processes(served.config.name).control
        self._ask = served.request
        # Of a job that resumes from a checkpoint it is not 0.
        self.before: dict[str, Any] = {"version": int(self.control["version"])}

    def report(self) -> dict[str, Any] | None:
        """The job's status; None after the job was stopped. Raises JobFailed."""
        try:
            report = self._daemon.request(Status())
        except JobStopped:
            return None
        self._reserve_again(report)
        return report

    def was_stopped(self) -> bool:
        """No: it ends with `run`, and the exit codes of the learners are what counts."""
        return False

    def leave_out(self, number: int) -> None:
        """The learner of this number has ended for good: the others begin without it."""
        if number < MAX_LEARNERS:  # no job lets in more
            with contextlib.suppress(ControlError, JobStopped):  # the next report says so
                self._daemon.request(LeaveOut(number=number))

    def keep(self, wanted: bool) -> None:
        """Set whether the job's memory stays at its end."""
        self._daemon.keeps = wanted and self._daemon.survives

    def end(self, reason: str = "", *, finished: bool) -> dict[str, Any] | None:
        """Stop the job; its final report, None if it was stopped before or its memory stays.

        reason: for other learners. finished: whether training is done.
        """
        if self._daemon.keeps:
            return None
        stop = StopJob(drain=True, timeout_s=DRAIN_S, reason=reason, finished=finished)
        try:
            return self._daemon.request(stop, 2 * DRAIN_S)
        except JobStopped:
            return None
