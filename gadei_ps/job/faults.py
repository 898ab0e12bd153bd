"""Faults on purpose: signals to a job's processes, which are named by what they do.

The roles of processes are read from the control segment, so that this works while the watchdog is
dead or stopped. A signal goes through a pidfd, and only if the start time is the one in the control
segment: a process that got the pid later is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from gadei_ps.errors import ControlError, JobNotFound, UsageError
from gadei_ps.job import control, paths
from gadei_ps.job.control import Status
from gadei_ps.machine import process
from gadei_ps.memory import presence, segment, shm
from gadei_ps.memory.layout import CONTROL, REPLICA, SegmentKind, ServerState
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.shm import segment_name

KILLED_GONE_S = 1.0  # a killed process with much memory takes some milliseconds to end


class Role(StrEnum):
    """Role of a process in its job."""

    SERVER = "server"
    STANDBY = "standby"
    LEARNER = "learner"
    WATCHDOG = "watchdog"
    FORK_SERVER = "fork-server"


@dataclass(frozen=True)
class Target:
    """A process of a job. start: from process.start_ticks. row: a learner's, else None."""

    role: Role
    pid: int
    start: int
    row: int | None = None
    generation: int | None = None
    """A learner's, else None."""

    @property
    def alive(self) -> bool:
        return process.alive(self.pid, self.start)


@dataclass(frozen=True)
class Sent:
    """A signal that has been delivered. ended: the process is gone."""

    target: Target
    signal: str
    ended: bool

    def as_dict(self) -> dict[str, Any]:
        facts = asdict(self.target)
        return {name: facts[name] for name in ("role", "row", "pid")} | {
            "signal": self.signal,
            "ended": self.ended,
        }


class Processes:
    """A job's, as its control segment names them now; a mapping outlives the job."""

    def __init__(self, job: str) -> None:
        """job: name or socket. Raises JobNotFound, ControlError or SegmentError."""
        if "/" in job:
            with control.Connection(job) as connection:
                self.job = str(connection.request(Status())["job"])
                self.owner = connection.peer_uid
        else:
            self.job, self.owner = shm.check_job_name(job), paths.owner()
        try:
            self.segment: Segment = segment.attach(
                segment_name(self.job, "control", self.owner),
                SegmentKind.CONTROL,
                writable=False,
                owner=self.owner,
            )
        except FileNotFoundError:
            raise JobNotFound(
                f"no job {job!r} is running; gadei-ps ls shows the jobs there are", self.job
            ) from None
        self.control: np.void = self.segment.view(CONTROL)
        if not presence.is_here(self.segment.header):
            raise ControlError(presence.elsewhere(self.job))

    def find(self, role: Role, row: int | None = None) -> Target:
        """The process with this role, a learner by its row. Raises ControlError if there is none.

        Processes may die or take over at any time; the one returned was alive a moment ago.
        """
        if role is Role.LEARNER:
            learners = self.learners()
            for one in learners:
                if one.row == row:
                    return one
            rows = ", ".join(str(one.row) for one in learners)
            there = f"its learners are {rows}" if learners else "no learner is attached"
            raise ControlError(f"job {self.job!r} has no learner {row}: {there}")
        by_role = {
            Role.WATCHDOG: self.watchdog,
            Role.SERVER: self.server,
            Role.STANDBY: self.standby,
            Role.FORK_SERVER: self.fork_server,
        }
        found = by_role[role]()
        if found is None:
            raise ControlError(f"job {self.job!r} has no {role} just now; try again")
        return found

    def learners(self) -> list[Target]:
        """Those that are attached and alive, by row."""
        roster = self.control["roster"]
        found = []
        for row in np.flatnonzero(roster["wanted"]).tolist():
            entry = roster[row].copy()  # the row may be given to another learner meanwhile
            generation = int(entry["generation"])
            if int(entry["wanted"]) != generation or entry["name"] == REPLICA:
                continue
            one = Target(Role.LEARNER, int(entry["pid"]), int(entry["pid_start"]), row, generation)
            if one.alive and int(roster[row]["wanted"]) == generation:
                found.append(one)
        return found

    def watchdog(self) -> Target | None:
        """None while there is none."""
        pid, start = int(self.control["watchdog_pid"]), int(self.control["watchdog_start"])
        one = Target(Role.WATCHDOG, pid, start)
        return one if one.alive else None

    def fork_server(self) -> Target | None:
        """None while there is none: servers start without it."""
        pid, start = int(self.control["fork_server_pid"]), int(self.control["fork_server_start"])
        one = Target(Role.FORK_SERVER, pid, start)
        return one if one.alive else None

    def server(self, *, ready: bool = False) -> Target | None:
        """The active one; None from its death until another one is active.

        ready: not one that has just been started and does not serve yet.
        """
        return self._server(standby=False, ready=ready)

    def standby(self) -> Target | None:
        """The one that can take over at once; None while there is none."""
        return self._server(standby=True, ready=True)

    def _server(self, *, standby: bool, ready: bool) -> Target | None:
        active = int(self.control["lease_pid"])
        for line in self.control["server"]:
            # The writer's order is start, pid. A start of another process only makes this fail.
            pid, start = int(line["pid"]), int(line["start"])
            one = Target(Role.STANDBY if standby else Role.SERVER, pid, start)
            if ready and int(line["state"]) != ServerState.READY:
                continue
            if (pid == active) != standby and one.alive:
                return one
        return None


def signal_number(name: str) -> signal.Signals:
    """`KILL`, `sigkill` or `9`. Raises UsageError."""
    with contextlib.suppress(ValueError):
        return signal.Signals(int(name))
    upper = name.upper()
    with contextlib.suppress(KeyError):
        return signal.Signals[upper if upper.startswith("SIG") else f"SIG{upper}"]
    known = ", ".join(one.name.removeprefix("SIG") for one in signal.Signals if one.value < 32)
    raise UsageError(f"there is no signal {name!r}; use one of {known}")


def send(
    target: Target,
    number: signal.Signals,
    timeout_s: float = KILLED_GONE_S,
    owner: int | None = None,
) -> Sent | None:
    """Deliver the signal; None if the process has ended. SIGKILL is awaited, timeout_s.

    owner: user whose process it must be, by default ours. Raises ControlError if it is not, or
    where a signal is not allowed.
    """
    try:
        pidfd = os.pidfd_open(target.pid)
    except OSError:
        return None
    try:
        # The descriptor was opened before: a process that is alive now is the one behind it.
        if not target.alive:
            return None
        # Root must not hit what another user's memory names, unless it is that user's own.
        if process.owner(target.pid) not in (None, os.geteuid() if owner is None else owner):
            raise PermissionError
        signal.pidfd_send_signal(pidfd, number)
        ended = process.gone(pidfd, timeout_s if number == signal.SIGKILL else 0.0)
    except ProcessLookupError:
        return None
    except PermissionError:
        raise ControlError(
            f"process {target.pid}, the {target.role}, is not of the job's user, or you may not "
            "signal it: send the signal as its own user "
            f"(kill -{number.name.removeprefix('SIG')} {target.pid})"
        ) from None
    finally:
        os.close(pidfd)
    return Sent(target, number.name, ended)


def kill(
    job: str, role: Role, row: int | None, number: signal.Signals, pid: int | None = None
) -> dict[str, Any]:
    """One signal to one process of a job; what `gadei-ps kill --json` prints. Raises GadeiError.

    pid: of the process that is meant, in case another one has the role by now.
    """
    processes = Processes(job)
    target = processes.find(role, row)
    if pid not in (None, target.pid):
        raise ControlError(f"the {role} is another process by now (pid {target.pid}): look again")
    sent = send(target, number, owner=processes.owner)
    if sent is None:
        raise ControlError(f"the {role} of job {processes.job!r} has just ended; try again")
    return {"job": processes.job} | sent.as_dict()
