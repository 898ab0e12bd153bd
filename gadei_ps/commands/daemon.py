"""A job's watchdog as a child of a command: start it, wait until it is ready, end it.

`python -m gadei_ps.watchdog` is that child; `gadei-ps serve` runs the same in the foreground.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from gadei_ps import errors
from gadei_ps.commands import early, jobs
from gadei_ps.commands.durations import END_TIMEOUT_S, ORPHAN_S, START_SILENT_S
from gadei_ps.commands.early import Child
from gadei_ps.errors import (
    ConnectionLost,
    ControlError,
    JobFailed,
    JobInUse,
    JobNotFound,
    JobStopped,
    NotSaved,
    UsageError,
    in_words,
)
from gadei_ps.job import control, paths
from gadei_ps.job.config import JobConfig, state_directory
from gadei_ps.job.control import Status
from gadei_ps.job.diagnosis import diagnose, locked
from gadei_ps.machine import interrupts, process
from gadei_ps.machine.lines import Lines
from gadei_ps.memory import presence, segment
from gadei_ps.memory.layout import Kept
from gadei_ps.show.counts import counted
from gadei_ps.watchdog import restart
from gadei_ps.watchdog.liveness import START_LATE_S, Watch, progress
from gadei_ps.watchdog.restart import Exit, Policy

WATCHDOG_GONE_S = 2.0
POLICY = Policy(limit=20)


class _Killed(JobFailed):
    """The watchdog was killed before it was ready."""


class Daemon:
    """A watchdog that ends with the `with` block in which it is used, or with this process.

    If the watchdog is killed, the next use of this object starts another one, which adopts the job.
    If this process is killed, the kernel signals the watchdog, which ends the servers and removes
    the job's segments.

    The job starts from zero, unless its configuration names a directory of checkpoints, or it
    survives. Then it continues with the memory that the last `run` of its name has left.
    """

    policy = POLICY
    """Deaths of the watchdog after which it is not started again."""
    start_silent_s = START_SILENT_S
    """Time without progress after which a start has failed (s)."""
    _keep = False

    def __init__(
        self,
        config: JobConfig,
        *,
        verbose: bool = False,
        silent: bool = False,
        learners: int = 1,
        fresh: bool = False,
        survives: bool = False,
        child: Child | None = None,
        wanted: Callable[[], None] = interrupts.check,
    ) -> None:
        """silent: logs not even warnings and errors. learners: how many are to come; their rings
        must fit into memory beside the model. fresh: from zero, whatever memory and checkpoints are
        there. survives: if this process is killed, and as long as `keeps` is true, the memory stays
        at the end for the next `run`. child: a process for the watchdog that was started before,
        not `silent`. wanted: raises during the start if it is to end.
        """
        self.config = config
        keep = self._keep
        if not keep:  # if watchdog and launcher are killed together, the servers end by orphan_s
            self.config = config.model_copy(update={"orphan_s": min(config.orphan_s, ORPHAN_S)})
        self.survives = survives
        self.keeps = survives
        """Whether the memory of the trained model stays at the end."""
        self.socket = paths.socket_path(config.name)
        self._flags = [f"--{flag}" for flag, on in (("silent", silent), ("keep", keep)) if on]
        self._how = {"verbose": verbose, "learners": learners, "keep": keep, "survives": survives}
        self._silent = silent
        self._child = child
        self._wanted = wanted
        self._fresh = fresh or (config.checkpoint is None and not keep and not survives)
        self._process: subprocess.Popen[bytes] | None = None
        self.code = 0
        """The exit code of a watchdog that was ended, negative for a signal."""
        self._deaths: tuple[Exit, ...] = ()

    def __enter__(self) -> Self:
        if running(self.config.name):
            raise JobInUse(
                f"job {self.config.name!r} is running already; choose another name, or stop it: "
                f"gadei-ps stop {self.config.name}"
            )
        why = diagnose(self.config.name)
        if why is not None and not (self.survives and restartable(self.config.name)):
            raise JobInUse(why)
        try:
            self._start(fresh=self._fresh)
        except _Killed:
            self.end()
            raise
        return self

    def _start(self, *, fresh: bool) -> None:
        child, self._child = self._child, None
        if child is None:
            child = self._begin()
        self._process = child.process
        try:
            child.tell(self.config.model_dump_json(), fresh=fresh, **self._how)
            self._wait_ready(child.end)
        except _Killed:  # what it was about to adopt is for the next one
            raise
        except BaseException:
            self.end()
            raise
        finally:
            os.close(child.end)

    def _begin(self) -> Child:
        return early.start(*self._flags)

    def _wait_ready(self, read: int) -> None:
        """Wait until the child answers. If it cannot start, it says why.

        Until it writes that the servers start, its own processor time is its progress. From then on
        only more of these notes are: the loop in which it waits for them uses the processor, too.
        """
        channel = Lines(read)
        messages: list[bytes] = []
        assert self._process is not None
        watch = Watch(self.start_silent_s, START_LATE_S)
        while not channel.has_ended:
            used_s = process.cpu_s(self._process.pid)
            sign = (len(messages), 0 if messages else progress(used_s, self.start_silent_s))
            if watch.check(time.monotonic(), {"start": sign}):
                break
            self._wanted()
            messages += channel.receive()
            if self.socket.exists() and self._answers():
                return
            time.sleep(0.005)
        if messages and messages[-1]:
            error = json.loads(messages[-1])
            raise errors.of_kind(error["kind"], error["message"], JobFailed)
        what = f"did not become ready; {self._where_why}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(WATCHDOG_GONE_S if channel.has_ended else 0.0)
            if code < 0:
                raise _Killed(
                    f"the watchdog of job {self.config.name!r} was ended by "
                    f"{process.signal_name(-code)} before it was ready; try again"
                )
        raise JobFailed(f"the watchdog of job {self.config.name!r} {what}")

    @property
    def _where_why(self) -> str:
        return "run with --verbose" if self._silent else "see its messages above"

    def _answers(self) -> bool:
        """Return whether our watchdog answers; another one may have taken the name before it."""
        assert self._process is not None
        try:
            answer = control.ask(str(self.socket), Status(), 1.0)
            return self._keep or bool(answer["watchdog_pid"] == self._process.pid)
        except (JobNotFound, ControlError):
            return False

    def check(self) -> None:
        """Start another watchdog if this one was killed.

        Raises JobStopped if the job was stopped, JobFailed if it failed or if its watchdogs were
        killed too often.
        """
        assert self._process is not None
        with interrupts.held():
            code = self._process.poll()
        if code is None:
            return
        if code == 0:
            raise JobStopped(f"job {self.config.name!r} has been stopped")
        if code > 0:
            raise JobFailed(
                f"the watchdog of job {self.config.name!r} has failed; {self._where_why}"
            )
        while True:
            self._count_death(code)
            try:
                self._start(fresh=False)
                return
            except _Killed:
                code = self._process.returncode

    def _count_death(self, code: int) -> None:
        """Raise JobFailed if the watchdogs were killed too often."""
        now = time.monotonic()
        died = Exit(now, useful=False)
        self._deaths = restart.remembered((*self._deaths, died), self.policy)
        if restart.delay(self._deaths, now, self.policy) == restart.GIVE_UP:
            how = process.signal_name(-code)
            raise JobFailed(
                f"the watchdog of job {self.config.name!r} was killed "
                f"{counted(len(self._deaths), 'time')}, last by {how}; it is not started again"
            )

    def request(self, message: Any, timeout_s: float = 10.0) -> dict[str, Any]:
        """Send one request to the job; if the watchdog was killed, to the next one.

        Raises as check() does, and ControlError.
        """
        ends = time.monotonic() + END_TIMEOUT_S
        while True:
            try:
                return control.ask(str(self.socket), message, timeout_s)
            except (JobNotFound, ControlError) as error:
                assert self._process is not None
                before = self._process
                with contextlib.suppress(subprocess.TimeoutExpired):
                    before.wait(WATCHDOG_GONE_S)
                self.check()
                # A watchdog that ends removes its socket first, and then servers and memory.
                may_end = isinstance(error, (JobNotFound, ConnectionLost))
                if self._process is before and not (may_end and time.monotonic() < ends):
                    raise

    def end(self) -> None:
        """End the watchdog, which ends the servers and cleans up. If it is killed, we clean up."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.code = self._process.returncode
        # A watchdog that is ended while it adopts a job also leaves the job's memory behind.
        if self.keeps and kept_version(self.config.name) is not None:
            if self.code < 0:
                from gadei_ps.watchdog.entry import end  # imports all of the watchdog

                end(self.config.name)
        elif self.code < 0 or self.config.checkpoint is None:
            jobs.drop(self.config.name)

    def __exit__(self, *_: object) -> None:
        self.end()


class KeptDaemon(Daemon):
    """A watchdog that outlives this process, as with `gadei-ps serve`; its log goes to a file."""

    _keep = True

    def _begin(self) -> Child:
        """Raise UsageError."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            log_file = os.open(self.log, how, 0o600)
        except OSError as error:
            raise UsageError(f"the log of job {self.config.name!r}: {in_words(error)}") from None
        try:
            return early.start(*self._flags, log_file=log_file, dies=False)
        finally:
            os.close(log_file)

    @property
    def log(self) -> Path:
        """Log file of the job."""
        return state_directory() / f"{self.config.name}.log"

    @property
    def _where_why(self) -> str:
        return f"see {self.log}"

    def detach(self) -> None:
        """Let the job continue without this object."""
        assert self._process is not None
        self._process.kill()  # what stands between this process and the watchdog
        self._process.wait()
        self._process = None


def restartable(job: str) -> bool:
    """Return whether `run` can continue a job from the memory that an ended `run` has left."""
    living = presence.living(job)
    control = presence.peek(job)
    of_run = control is not None and int(control["temporary"]) == Kept.BY_RUN
    alone = not (living.watchdog or living.elsewhere or locked(paths.lock_path(job)))
    return of_run and alone and segment.is_kept(job)


def kept_version(job: str) -> int | None:
    """The version of the weights that an ended job has in memory; None without gradients."""
    control = presence.peek(job)
    if control is None or not segment.is_kept(job):
        return None
    return int(control["version"]) or None


def running(job: str) -> bool:
    """Return whether a watchdog answers at the job's socket."""
    try:
        with control.Connection(job):
            return True
    except (JobNotFound, ControlError):
        return False


def check_code(job: str, code: int) -> None:
    """Raise NotSaved or JobFailed where a watchdog has ended with this exit code."""
    if code == NotSaved.exit_code:
        raise NotSaved(
            f"job {job!r} has stopped without its last checkpoint, and its memory stays; see its "
            "last log lines"
        )
    if code:
        raise JobFailed(f"job {job!r} has failed; see its last log lines")
