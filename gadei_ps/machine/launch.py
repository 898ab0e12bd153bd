"""Learner processes as children of a command, which starts, watches, restarts and ends them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from gadei_ps.errors import DeviceError, UsageError, reason_of
from gadei_ps.machine import gpus, interrupts, process
from gadei_ps.machine.cuda import has_cupy
from gadei_ps.machine.foreground import Foreground
from gadei_ps.machine.forks import Fork
from gadei_ps.machine.output import Output

LEARNER_VARIABLE = "GADEI_PS_LEARNER"
LEARNERS_VARIABLE = "GADEI_PS_LEARNERS"
THREADS_VARIABLE = "OMP_NUM_THREADS"
ALONE_VARIABLE = "GADEI_PS_ALONE"  # pid of a learner that `attach` has become
# Also in learners/client.py and learners/devices.py, which launchers do not load at their start.
JOB_VARIABLE = "GADEI_PS_JOB"
NAME_VARIABLE = "GADEI_PS_NAME"
DEVICE_VARIABLE = "GADEI_PS_DEVICE"
DEVICES_VARIABLE = "GADEI_PS_DEVICES"
LEARNERS_GRACE_S = 5.0
ENDED_POLL_S = 0.01
QUICK_S = 5.0  # a learner that fails sooner than this has not worked
MAX_QUICK_FAILURES = 3


@dataclass(frozen=True)
class Compute:
    """Devices that learners compute on.

    device: their setting, auto, cuda or host; None sets nothing. gpus: the GPUs they get in turn,
    by their names in CUDA_VISIBLE_DEVICES; without any they see those of their launcher. why: the
    reason why a device was not found, in one line. each: devices of a learner, one for each stage
    of a virtual worker.
    """

    device: str | None = None
    gpus: tuple[str, ...] = ()
    why: str = ""
    each: int | None = None

    @classmethod
    def choose(cls, device: str, asked: str | None, each: int | None = None) -> Compute:
        """device, asked and each: what --device, --gpus and --devices-per-learner say.

        Raises UsageError, or DeviceError with what is missing.
        """
        if device == "host":
            if asked is not None:
                raise UsageError("--gpus needs --device cuda or auto, not host")
            return cls(device, each=each)
        if asked is not None:
            return cls(device, gpus.choose(asked, gpus.visible()), each=each)._checked()
        try:
            found = gpus.visible()
        except DeviceError as error:
            if device != "auto":
                raise
            return cls(device, why=str(error), each=each)
        return cls(device, found, each=each)._checked()

    def _checked(self) -> Compute:
        """Itself; raises DeviceError if --device cuda, or as many GPUs, cannot be had."""
        there = list(dict.fromkeys(self.gpus))
        if there and self.each and len(there) < self.each:
            raise DeviceError(
                f"--devices-per-learner {self.each}: GPUs that a learner can get are "
                f"{', '.join(there)}; give at most {len(there)}, or --device host"
            )
        if self.device == "cuda" and (why := self._missing()):
            raise DeviceError(f"device cuda: {why}")
        return self

    def _missing(self) -> str:
        return gpus.missing(self.gpus, os.environ | self.environment(0))

    def without(self) -> str:
        """Explain why auto can only be the host, as far as is known at once; empty otherwise."""
        if self.device != "auto" or (self.gpus and has_cupy()):
            return ""
        return self._missing()

    def settled(self) -> Compute:
        """Replace auto by cuda or host; `why` holds the reason for the host."""
        if self.device != "auto":
            return self
        why = self.why or self._missing()
        return Compute("host", why=why) if why else replace(self, device="cuda")

    def shared(self, learners: int) -> str:
        """List in one line the devices that so many learners share; empty if each has its own.

        Empty too if there is only one device.
        """
        wanted = (self.each or 1) * learners
        there, what = (len(self.gpus), "GPUs") if self.gpus else (process.cores(), "cores")
        if (self.each or 1) == 1 or wanted <= there:
            return ""
        return f"{learners} x {self.each} devices on {there} {what}: some are shared"

    def beside(self, pids: Iterable[int]) -> Compute:
        """Order the GPUs for learners that join these: those with the fewest learners first."""
        return replace(self, gpus=gpus.least_used(self.gpus, pids))

    def environment(self, index: int) -> dict[str, str]:
        """Return the variables of learner `index` in addition to its launcher's environment."""
        if self.device is None:
            return {}
        variables = {DEVICE_VARIABLE: self.device}
        if self.each is not None:
            variables[DEVICES_VARIABLE] = str(self.each)
        if self.device == "host":
            return variables | {gpus.VISIBLE: ""}
        return variables | gpus.assign(self.gpus, index, each=self.each or 1)


NOT_SET = Compute()


@dataclass(frozen=True)
class LearnerNumbers:
    """Numbers of learners that a command starts. others: learners that the job has besides."""

    first: int = 0
    count: int = 1
    others: int = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.count))

    def environment(self, number: int) -> dict[str, str]:
        """Return the environment of the learner of this number."""
        environment = {
            LEARNER_VARIABLE: str(number),
            LEARNERS_VARIABLE: str(self.first + self.count),
        }
        # As torchrun: N processes with a thread for each core would compete for the cores.
        if THREADS_VARIABLE not in os.environ:
            threads = max(1, process.cores() // (self.count + self.others))
            environment[THREADS_VARIABLE] = str(threads)
        return environment


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@dataclass
class Ended:
    """A learner process that has ended. index: its number."""

    index: int
    pid: int
    code: int
    seconds: float = math.inf
    """Time from its start to its end (s)."""
    typed: bool = False
    """Whether Ctrl-C has ended it that went to it alone."""
    lost: bool = False
    """Whether it has died with the process that had forked it."""

    @property
    def how(self) -> str:
        if self.code < 0:
            return f"was killed by {process.signal_name(-self.code)}"
        return f"ended with exit code {self.code}"


class Learners:
    """The learner processes of a command. They die with this process.

    numbers: theirs, or how many they are if their job has no others. output: what they print goes
    there; else it goes where this process's does, or to `stdout`. reads: whether they have this
    process's standard input. spawn: instead of process.spawn.
    """

    def __init__(
        self,
        command: Sequence[str],
        numbers: LearnerNumbers | int,
        job_socket: str,
        *,
        stdout: int | IO[bytes] | None = None,
        compute: Compute = NOT_SET,
        output: Output | None = None,
        reads: bool = False,
        spawn: Callable[..., Any] | None = None,
    ) -> None:
        self._command = list(command)
        self._compute = compute
        self._numbers = (
            numbers if isinstance(numbers, LearnerNumbers) else LearnerNumbers(count=numbers)
        )
        self._env = os.environ | {JOB_VARIABLE: job_socket}
        self._stdout = stdout
        self._output = output
        self._spawn = spawn or process.spawn
        self._stdin = None if reads and _is_open(0) else subprocess.DEVNULL
        self._foreground = Foreground(self.suspend)
        if output is not None:  # a pipe's lines would come in blocks, and the last ones be lost
            self._env.setdefault("PYTHONUNBUFFERED", "1")
        self._running: dict[int, tuple[Any, float]] = {}
        self._quick_failures = 0
        for index in self._numbers:
            self.start(index)

    def start(self, index: int) -> None:
        """Start the learner of this number, again if it was there before."""
        # By its place among these: a learner that is started again keeps its GPU.
        place = index - self._numbers.first
        env = self._env | self._numbers.environment(index) | self._compute.environment(place)
        try:
            if self._output is None:
                child = self._spawn(self._command, env=env, stdin=self._stdin, stdout=self._stdout)
            else:
                with self._output.pipes(index) as (stdout, stderr):
                    child = self._spawn(self._command, env=env, stdout=stdout, stderr=stderr)
        except OSError as error:
            self.kill()
            raise UsageError(f"cannot start {self._command[0]!r}: {reason_of(error)}") from None
        self._running[index] = (child, time.monotonic())

    @property
    def pids(self) -> list[int]:
        return [child.pid for child, _ in self._running.values()]

    def ended(self) -> list[Ended]:
        """Return the learners that have ended since the last call."""
        gone = []
        for index, (child, since) in list(self._running.items()):
            if not process.has_ended(child):
                self._foreground.pass_terminal(child.pid)
                continue
            with interrupts.held():
                code = process.end_group(child)
            typed = code == -signal.SIGINT and self._foreground.has(child.pid)
            self._foreground.reclaim_terminal(child.pid)
            del self._running[index]
            seconds = time.monotonic() - since
            lost = isinstance(child, Fork) and child.lost
            # A signal says nothing of the program: learners that are killed are started again.
            quick = code > 0 and seconds < QUICK_S
            self._quick_failures = self._quick_failures + 1 if quick else 0
            gone.append(Ended(index, child.pid, code, seconds, typed, lost))
        return gone

    @property
    def hopeless(self) -> bool:
        """Whether starting learners again has stopped making sense."""
        return self._quick_failures >= MAX_QUICK_FAILURES

    def signal(self, number: int) -> None:
        """Send a signal to the learners with their children, as a terminal does at Ctrl-C."""
        for child, _ in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)

    def suspend(self) -> None:
        """Stop the learners and this process; all continue together (Ctrl-Z, then fg)."""
        self.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.signal(signal.SIGCONT)

    def stop(self, grace_s: float = LEARNERS_GRACE_S) -> None:
        """Wait for learners that are ending by themselves, then terminates, then kills."""
        self._wait(grace_s)
        for child, _ in self._running.values():
            process.send_signal(child, signal.SIGTERM)
        self._wait(1.0)
        self.kill()

    def _wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for child, _ in self._running.values():
            while not process.has_ended(child):
                if time.monotonic() >= until:
                    return
                time.sleep(ENDED_POLL_S)

    def kill(self) -> None:
        """Kill the processes at once."""
        for child, _ in self._running.values():
            process.end_group(child)
            self._foreground.reclaim_terminal(child.pid)
        self._running.clear()
