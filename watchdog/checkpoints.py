"""Schedule of checkpoints, and the requests that wait for one. See also checkpoint_writer.py.

A copy for a client needs no writer process, which would take some tenths of a second to start: a
thread of the watchdog makes it.
"""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gadei_ps import _native
from gadei_ps.errors import CheckpointError, CheckpointMistake, NoSharedMemory, in_words
from gadei_ps.job import service
from gadei_ps.job.control import memory_file
from gadei_ps.machine import cgroups, process
from gadei_ps.machine.child import Child
from gadei_ps.memory import reserve
from gadei_ps.memory.layout import CONTROL, Phase
from gadei_ps.memory.reserve import Progress
from gadei_ps.watchdog import settings
from gadei_ps.watchdog.checkpoint_writer import (
    MOVED,
    CheckpointWriter,
    Copied,
    Examined,
    Failed,
    Saved,
    Task,
    copy_bytes,
    failed_by,
)
from gadei_ps.watchdog.durations import WRITER_KILL_S
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.liveness import progress
from gadei_ps.watchdog.worker import Worker

KEEP = 3  # of those asked for by hand, if the job file sets none
WRITER_SILENT_S = 10.0  # in which a checkpoint writer that computes uses a part of a core
CHECKPOINT_RETRY_S = 60.0  # after a failure, on a disk that is full, say

Outcome = Saved | Copied | Failed
OnOutcome = Callable[[Outcome], None]
NOWHERE = -1  # instead of a client's file: the copy is for the disk
WRITER_BYTES = 40 << 20  # of a checkpoint writer's own, beside the copy


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one job; at most one is being made."""

    memory: JobMemory
    selector: selectors.BaseSelector
    log: Any
    last: dict[str, Any] = field(default_factory=dict)
    """The outcome of the last one."""
    problem: str = ""
    """Reason why the last attempt or look failed."""
    unsure: bool = False
    """Whether it is not known yet if checkpoints can be made; see examine()."""
    _looks: bool = False
    _mistake: str = ""
    _newer: tuple[int, str] = (0, "")
    _kills: cgroups.Kills = field(default_factory=cgroups.Kills)
    _dots: int = 0
    _checkpoint_writer: Child | None = None
    _waiting: list[OnOutcome] = field(default_factory=list)
    _next: list[tuple[OnOutcome, int, bool]] = field(default_factory=list)
    _copier: Worker = field(init=False)
    _copies: bool = False
    """Whether the thread is at work."""
    _outcome: bytes = b""
    _last_at: float = field(default_factory=time.monotonic)
    _failed_at: float = float("-inf")
    _written_at: float | None = None

    def __post_init__(self) -> None:
        self._copier = Worker(self.selector)

    @property
    def _busy(self) -> bool:
        return self._checkpoint_writer is not None or self._copies

    @property
    def age_s(self) -> float | None:
        """Time since a checkpoint was written (s); None if this watchdog has had none written."""
        return None if self._written_at is None else time.monotonic() - self._written_at

    @property
    def moved(self) -> int:
        """Count that grows while the writer computes, or its data reaches the disk."""
        if self._checkpoint_writer is None:
            return self._dots
        return self._dots + progress(process.cpu_s(self._checkpoint_writer.pid), WRITER_SILENT_S)

    # -- jobs that resume from memory -----------------------------------------------------------

    def examine(self) -> None:
        """Begin to look at the checkpoints, for a job that resumes from memory.

        The directory may have become one that takes no checkpoints, and a checkpoint may be newer
        than the memory.
        """
        config = self.memory.config
        self.unsure = config.checkpoint is not None
        try:
            self._begin(look_beyond=int(self.memory.words["version"]))
        except CheckpointError as error:
            self.unsure = False
            self.log.warning("cannot look at the checkpoints", reason=str(error))

    def refuse(self) -> None:
        """Raise CheckpointMistake if examine() has found one; the job's memory stays."""
        if self._mistake:
            raise CheckpointMistake(
                f"{self._mistake}; the memory of job {self.memory.config.name!r} stays, and the "
                "next start resumes from it"
            )

    @property
    def newer(self) -> int:
        """Version of a checkpoint that is newer than the memory; 0 if there is none."""
        version = self._newer[0]
        return version if version > int(self.memory.words["version"]) else 0

    @property
    def warning(self) -> str:
        """Warning for the administrator; empty if there is none."""
        if self.problem:
            return f"no checkpoint: {self.problem}"
        if newer := self.newer:
            name = self.memory.config.name
            stop = service.command(name, f"stop {name} --discard")
            return (
                f"checkpoint {newer} is newer than the memory that the job resumes from; to use "
                f"it: {stop}, and start the job again ({service.serve(name)})"
            )
        return ""

    def _saw(self, outcome: Examined | Failed) -> None:
        """The outcome of examine()."""
        self.unsure = False
        if not outcome["ok"]:
            self.problem = outcome["error"]
            self._mistake = self.problem if outcome.get("mistake") else ""
            self.log.error("checkpoints cannot be made", reason=self.problem)
        elif outcome["newer"]:
            self._newer = outcome["newer"]
            if self.newer:
                version = int(self.memory.words["version"])
                self.log.warning(
                    f"resuming from memory at version {version}; {self.warning}. Otherwise the "
                    "next checkpoint of the job sets it aside",
                    path=self._newer[1],
                )

    # -- making ---------------------------------------------------------------------------------

    def ask(self, done: OnOutcome, into: int = NOWHERE, *, slots: bool = True) -> None:
        """Begin a checkpoint; `done` is called with its outcome.

        into: a file that gets a copy of the job instead of the disk; it is closed here. slots:
        whether the optimizer's are copied, too. One that is under way does not count: it may lack
        gradients that the caller saw applied. Raises CheckpointError where there is nothing to
        save.
        """
        if self.memory.state is None:
            _close(into)
            raise CheckpointError("the job has no model yet: there is nothing to save")
        if self._busy:
            self._next.append((done, into, slots))
            return
        try:
            self._check_room(into, slots=slots)
            if into == NOWHERE:
                self._begin()
            else:
                self._copy(into, slots=slots)
        except CheckpointError:
            _close(into)
            raise
        self._waiting.append(done)

    def _check_room(self, into: int = NOWHERE, *, slots: bool = True) -> None:
        """Raise CheckpointError if there is no memory for a copy: the kernel would kill a process
        of the job, and perhaps this one."""
        assert self.memory.model is not None
        needs = {"copy": copy_bytes(self.memory.model, self.memory.state_words, slots=slots)}
        what = "a copy"
        if into == NOWHERE:
            needs["process"], what = WRITER_BYTES, "a checkpoint"
        try:
            reserve.check_private(needs, f"{what} of job {self.memory.config.name!r}")
        except NoSharedMemory as error:
            raise CheckpointError(str(error)) from None

    def _copy(self, into: int, *, slots: bool) -> None:
        """Begin a copy into a client's file."""
        memory = self.memory
        assert memory.weights is not None
        assert memory.state is not None
        task = Task(memory.config.name, memory.job_id.hex(), {}, "", 0, {})
        parts = memory.control, memory.weights, memory.state

        def make(progress: Progress) -> Copied:
            # Of its own: done() closes the file even if this still writes to it.
            file = os.dup(into)
            try:
                return CheckpointWriter(
                    task, parts, file, slots=slots, is_cancelled=lambda: progress.cancelled
                ).copy()
            finally:
                os.close(file)

        def done(outcome: Copied, error: BaseException | None) -> None:
            self._copies = False
            _close(into)
            self._answer(failed_by(in_words(error)) if error else outcome)

        self._copies = True
        self._copier.ask("", make, done)

    def tick(self, now: float) -> None:
        """Begin a checkpoint if one is due. Called every tick."""
        config = self.memory.config.checkpoint
        if config is None or self._busy or self.memory.state is None:
            return
        fresh = int(self.memory.words["version"]) - int(self.memory.words["checkpoint_version"])
        due = 0 < config.every_s <= now - self._last_at
        due = due or 0 < config.every_gradients <= fresh
        if due and fresh and now - self._failed_at > CHECKPOINT_RETRY_S:
            try:
                self._check_room()
                self._begin()
            except CheckpointError as error:
                self._report(failed_by(str(error)))

    def _begin(self, look_beyond: int | None = None) -> None:
        """Start a checkpoint writer. Raises CheckpointError."""
        config = self.memory.config
        task = Task(
            config.name,
            self.memory.job_id.hex(),
            self.memory.files,
            str(config.checkpoint_directory()),
            config.checkpoint.keep if config.checkpoint else KEEP,
            settings.with_script(config, self.memory.script),
            look_beyond,
        )
        self._looks = look_beyond is not None
        if not self._looks:
            self._last_at = time.monotonic()
        self._kills = cgroups.Kills()  # of the time in which the checkpoint writer lives
        self._outcome = b""
        text = json.dumps(asdict(task)).encode()
        try:
            with os.fdopen(memory_file(len(text), [(0, memoryview(text))])) as stdin:
                self._checkpoint_writer = Child(
                    self.selector,
                    process.module_command("gadei_ps.watchdog.checkpoint_writer"),
                    self._line_received,
                    self._ended,
                    stdin=stdin.fileno(),
                    pass_fds=list(self.memory.files.values()),
                )
        except OSError as error:
            raise CheckpointError(f"cannot start a checkpoint writer: {error.strerror}") from None

    def _line_received(self, line: bytes) -> None:
        self._dots += 1
        if line == MOVED:
            self.unsure = False
        else:
            self._outcome = line

    def _ended(self, code: int) -> None:
        self._checkpoint_writer = None
        if code < 0:
            # The checkpoint writer cannot end its pause any more; it would last until its deadline.
            _native.store(self.memory.control.word(CONTROL, "pause"), 0)
            self.memory.ring_bells()
        try:
            outcome = json.loads(self._outcome)
        except ValueError:
            why = self._kills.describe() or f"it ended with code {code}"
            outcome = failed_by(f"the checkpoint writer made no checkpoint: {why}")
        if self._looks:
            self._saw(outcome)
            self._serve_next()
        else:
            self._report(outcome)

    def _report(self, outcome: Saved | Failed) -> None:
        control = self.memory.words
        if outcome["ok"]:
            control["checkpoints"] += 1
            control["checkpoint_version"] = outcome["version"]
            control["checkpoint_time"] = int(time.time())
            self.problem, self._newer = "", (0, "")
            self._written_at = time.monotonic()
            self.log.info(
                "checkpoint",
                path=outcome["path"],
                version=outcome["version"],
                pause_ms=round(outcome["pause_ms"], 1),
            )
            if outcome["problem"]:
                self.log.warning("checkpoint", problem=outcome["problem"])
            if outcome["aside"]:
                way = service.restore_commands(self.memory.config.name, Path(outcome["aside"]))
                self.log.warning(f"a newer checkpoint is set aside; to resume from it: {way}")
        else:
            control["checkpoint_failures"] += 1
            self._failed_at = time.monotonic()
            self.problem = outcome["error"]
            ends = int(control["phase"]) == Phase.DRAINING
            rest = "the job is stopping" if ends else "training continues"
            self.log.error(f"no checkpoint; {rest}", reason=outcome["error"])
        self.last = {**outcome, "time": time.time()}
        self._answer(outcome)

    def _answer(self, outcome: Outcome) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one(outcome)
        self._serve_next()

    def _serve_next(self) -> None:
        """Serve the requests that have come meanwhile."""
        waiting, self._next = self._next, []
        for one, into, slots in waiting:
            try:
                self.ask(one, into, slots=slots)
            except CheckpointError as error:
                one(failed_by(str(error)))

    def close(self) -> None:
        """End the checkpoint writer and the thread, at the end of the job."""
        self._waiting, waiting, self._next = [], self._next, []
        for _, into, _ in waiting:
            _close(into)
        self._copier.close()
        if self._checkpoint_writer is not None:
            self._checkpoint_writer.end(0.0, WRITER_KILL_S)
            self._checkpoint_writer = None


def _close(file: int) -> None:
    """Close a client's file, unless it is NOWHERE."""
    if file != NOWHERE:
        reserve.close_later(file)
