"""Learners of the job file, and the numbers of learners that commands start.

The watchdog starts learners of the job file, and starts them again when they die. They outlive a
watchdog that is killed. The next watchdog finds them by their environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from gadei_ps.errors import JobStopped
from gadei_ps.job.config import LearnersConfig
from gadei_ps.job.control import Launch
from gadei_ps.machine import ownership, process
from gadei_ps.machine.launch import JOB_VARIABLE, NAME_VARIABLE, LearnerNumbers
from gadei_ps.memory import finished
from gadei_ps.memory.layout import Stop, Work
from gadei_ps.watchdog import restart
from gadei_ps.watchdog.durations import LEARNERS_END_S, LEARNERS_KILL_S
from gadei_ps.watchdog.fork_server import watched
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.restart import GIVE_UP, USEFUL_S, Exit, Policy

NAME = re.compile(r"learner-(\d+)")


@dataclass(eq=False)
class LearnerProcess:
    """The learner of an index; it has one process after another. child: unless adopted."""

    index: int
    pid: int = 0
    pidfd: int = -1
    start: int = 0
    child: subprocess.Popen[bytes] | None = None
    since: float = 0.0
    exits: tuple[Exit, ...] = ()
    finished: bool = False
    abandoned: bool = False


@dataclass(eq=False)
class JobLearners:
    """All learners of the job file, which may have none."""

    config: LearnersConfig | None
    memory: JobMemory
    socket: str
    log: Any
    policy: Policy = field(default_factory=lambda: Policy(limit=5))
    all: list[LearnerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all = [
            LearnerProcess(index) for index in range(self.config.count if self.config else 0)
        ]

    def adopt(self) -> None:
        """Adopt learners of a dead watchdog, attached or not."""
        if not self.all:
            return
        for found in psutil.process_iter():
            # Group leaders only: a child of a learner inherits the variables.
            with contextlib.suppress(psutil.Error, OSError):
                if os.getpgid(found.pid) == found.pid and found.uids().real == os.getuid():
                    start = process.start_ticks(found.pid)
                    environ = found.environ()
                    self._adopt(found.pid, start, environ)
        control = self.memory.words
        for one in self.all:
            one.finished = finished.has(control, one.index)

    def _adopt(self, pid: int, start: int, environ: Mapping[str, str]) -> None:
        name = NAME.fullmatch(environ.get(NAME_VARIABLE, ""))
        if name and environ.get(JOB_VARIABLE) == self.socket and int(name[1]) < len(self.all):
            pidfd = ownership.open_process(pid, start)  # None if the pid is another process' by now
            if pidfd is None:
                return
            one = self.all[int(name[1])]
            one.pid, one.pidfd, one.start = pid, pidfd, start
            one.since = time.monotonic()
            self.log.info("learner's process adopted", learner=one.index, pid=pid)

    def tick(self, now: float, stopping: bool) -> None:
        """Start learners that are missing and due. Called every tick."""
        for one in self.all:
            if one.pid and not self._runs(one):
                self._ended(one, now)
            if one.pid or one.finished or one.abandoned or stopping:
                continue
            wait = restart.delay(one.exits, now, self.policy)
            if wait == GIVE_UP:
                one.abandoned = True
                self.log.error("a learner fails again and again", learner=one.index)
            elif not one.exits or now >= one.exits[-1].at + wait:
                self._start(one)

    @property
    def over(self) -> bool:
        """Whether no learner runs, and none will be started again."""
        return all(not one.pid and (one.finished or one.abandoned) for one in self.all)

    @property
    def finished(self) -> bool:
        """Whether all learners have ended without an error."""
        return all(one.finished for one in self.all)

    def _runs(self, one: LearnerProcess) -> bool:
        return not process.gone(one.pidfd, 0.0)

    def _reap(self, one: LearnerProcess) -> int | None:
        """Kill the rest of a learner's process group; return its exit code, if known."""
        process.kill_group_of(one.pidfd, one.pid, one.start)
        os.close(one.pidfd)
        one.pidfd = -1
        return None if one.child is None else one.child.wait()

    def _ended(self, one: LearnerProcess, now: float) -> None:
        code = self._reap(one)
        # The exit code of an adopted learner is not known.
        done = int(self.memory.words["work"]) == Work.DONE
        one.finished = code == 0 if code is not None else done
        control = self.memory.words
        # Kept for the next watchdog. A learner that a stop has ended may be wanted again.
        if one.finished and (done or int(control["stop"]) == Stop.GO):
            finished.add(control, one.index)
        exit_ = Exit(now, now - one.since > USEFUL_S)
        one.exits = restart.remembered((*one.exits, exit_), self.policy)
        stopped = code == JobStopped.exit_code and int(control["stop"]) != Stop.GO
        if not one.finished and not stopped:
            self.log.warning("a learner ended", learner=one.index, pid=one.pid, code=code)
        one.pid, one.child = 0, None

    def _start(self, one: LearnerProcess) -> None:
        assert self.config is not None
        env = os.environ | {JOB_VARIABLE: self.socket, NAME_VARIABLE: f"learner-{one.index}"}
        env |= LearnerNumbers(count=self.config.count).environment(one.index)
        try:
            one.child = process.spawn(
                self.config.command, env=env, stdout=2, how=None, protected=False
            )
            one.pidfd, one.start = watched(one.child)
        except OSError as error:
            self.log.error(
                "cannot start a learner", command=self.config.command[0], reason=error.strerror
            )
            one.abandoned = True
            return
        one.pid = one.child.pid
        one.since = time.monotonic()

    def close(self) -> None:
        """Terminate all learners, then kill them, at the end of the job."""
        running = [one for one in self.all if one.pid and self._runs(one)]
        for one in running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(one.pidfd, signal.SIGTERM)
        self._wait(running, LEARNERS_END_S)
        for one in running:
            process.kill_group_of(one.pidfd, one.pid, one.start)
        self._wait(running, LEARNERS_KILL_S)
        for one in running:
            if not self._runs(one):  # else the kernel blocks it, as a driver does
                self._reap(one)

    def _wait(self, running: list[LearnerProcess], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and any(self._runs(one) for one in running):
            time.sleep(0.01)


class ReservedNumbers:
    """Numbers that commands have reserved for their learners, each until its command has ended.

    own: learners that the watchdog itself starts; their numbers begin at 0.
    """

    def __init__(self, own: int) -> None:
        self._own = own
        self._commands: dict[tuple[int, int, int], Launch] = {}  # by pid, start time, first number

    def reserve(self, pid: int, request: Launch, attached: Collection[int]) -> dict[str, int]:
        """Reserve numbers for a command's learners; return the first, and the count of the others.

        pid: of the command. attached: rows of the learners that are attached; a learner has the row
        of its number if that was free.
        """
        self._drop_ended()
        for key in [one for one in self._commands if (one[0], one[2]) == (pid, request.first)]:
            del self._commands[key]
        taken = {*range(self._own), *attached}
        for one in self._commands.values():
            taken.update(range(one.first, one.first + one.count))
        first, count = max(0, request.first), request.count
        if request.first < 0:
            while clash := taken.intersection(range(first, first + count)):
                first = max(clash) + 1
        if count:
            reserved = request.model_copy(update={"first": first})
            self._commands[pid, process.start_ticks(pid), first] = reserved
        return {"first": first, "others": len(taken.difference(range(first, first + count)))}

    def report(self) -> list[dict[str, Any]]:
        """Return the commands for the status."""
        self._drop_ended()
        shown = {"first", "count", "command", "directory"}
        return [
            {"pid": pid} | one.model_dump(include=shown)
            for (pid, _, _), one in self._commands.items()
        ]

    def _drop_ended(self) -> None:
        living = {key: one for key, one in self._commands.items() if process.alive(*key[:2])}
        self._commands = living
