"""`gadei_ps.serve()`: a job that a notebook or a script serves, as `gadei-ps serve` does.

A thread of its own starts the watchdog, starts it again if it is killed, and ends it. The watchdog
dies with the thread that has started it, so this one lives as long as the job, whichever thread
asks for it; and no KeyboardInterrupt comes into the middle of its work.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from gadei_ps.commands import change, daemon, jobs
from gadei_ps.commands.daemon import Daemon, KeptDaemon
from gadei_ps.commands.durations import DRAIN_S
from gadei_ps.errors import ControlError, GadeiError, JobInUse, JobNotFound, JobStopped, UsageError
from gadei_ps.job import config, control, in_process, paths
from gadei_ps.job.config import JobConfig
from gadei_ps.job.control import Status
from gadei_ps.machine import interrupts
from gadei_ps.memory.shm import check_job_name

LOOK_INTERVAL_S = 0.2
WATCHDOG_PATIENCE_S = 10.0  # until the next watchdog answers
_served: dict[str, ServedJob] = {}
"""Jobs of this process by name; a job continues although nothing refers to its object."""


def serve(
    job: str | os.PathLike[str] | None = None,
    *,
    optimizer: str | Mapping[str, Any] | None = None,
    lr: float | None = None,
    sync: str | Mapping[str, Any] | None = None,
    checkpoint: bool | str | os.PathLike[str] | Mapping[str, Any] = False,
    fresh: bool = False,
    keep: bool = False,
    verbose: bool = False,
    **fields: Any,
) -> ServedJob:
    """Serve a job until its stop(), the end of a `with` block, or the end of this process.

        with gadei_ps.serve("demo", sync="asp") as job:
            optimizer = gadei_ps.learners.torch.Optimizer(model)  # a learner of this job

    Learners that are made meanwhile and name no job join it, in this process and in programs that
    it starts; if there are several jobs, the one that was served last. When the job ends, learners
    of this process leave it, and their models keep the weights. The job ends with this process too,
    however that ends, and nothing is left of it.

    job: its name, or a job file (`.toml`); None: serve-PID. optimizer: its kind, or what the table
    [optimizer] of a job file holds; settings that are missing come from the script that makes an
    Optimizer. lr: learning rate. sync: synchronization model. checkpoint: True for the defaults of
    the table [checkpoint], a directory, or the content of the table; the job then resumes from its
    newest checkpoint. fresh: start from zero all the same. keep: the job outlives this process,
    until `gadei-ps stop`; if it is running already, it is used again, with the changes of the
    arguments as by `gadei-ps reload`. verbose: log what the servers do. fields: others of the job
    file, which they override. learner_timeout_s is 0 unless it is given: a user may think for
    longer between two cells than a learner may hang.

    Raises UsageError, JobInUse, JobFailed, and what else a start can meet.
    """
    wanted = _config(job, optimizer, lr, sync, checkpoint, fields)
    before = _served.get(wanted.name)
    if before is not None and not before.of_this_process:  # a fork has its parent's objects
        before = None
    if before is not None and not before.ended:
        if keep and before.kept and not fresh:
            before.reload(wanted)
            return before
        raise JobInUse(
            f"this process serves job {wanted.name!r} already: call stop() of what serve() has "
            "returned, or choose another name"
        )
    if before is not None:
        with contextlib.suppress(GadeiError):  # its learners were notified
            before.close()
    return ServedJob(wanted, fresh=fresh, keep=keep, verbose=verbose)


def _config(
    job: object,
    optimizer: str | Mapping[str, Any] | None,
    lr: float | None,
    sync: str | Mapping[str, Any] | None,
    checkpoint: object,
    fields: Mapping[str, Any],
) -> JobConfig:
    """Raise UsageError, in one line."""
    if job is not None and not isinstance(job, str | os.PathLike):
        raise UsageError(
            f"serve() takes the job's name or its job file, not a {type(job).__name__}; the model "
            "comes from the learner that brings it: Optimizer(model), or Client(tensors=...)"
        )
    named = f"serve-{os.getpid()}" if job is None else os.fspath(job)
    values: dict[str, Any] = {"learner_timeout_s": 0.0}
    if named.endswith(".toml"):
        values |= config.load(Path(named)).model_dump(exclude_unset=True)
    else:
        values["name"] = check_job_name(named)
    table = dict(values.get("optimizer", {}))
    if isinstance(optimizer, Mapping):
        table |= optimizer
    elif optimizer is not None:
        table["kind"] = optimizer
    values |= fields
    if isinstance(fields.get("learners"), int):
        raise UsageError(
            "serve(): learners: a table of command and count, as [learners] of the job file; "
            "job.run(command, learners=N) starts others"
        )
    if lr is not None:
        table["lr"] = lr
    if table:
        values["optimizer"] = table
    if sync is not None:
        values["sync"] = sync
    if checkpoint is True:
        values.setdefault("checkpoint", {})
    elif isinstance(checkpoint, str | os.PathLike):
        there = dict(values.get("checkpoint") or {})
        values["checkpoint"] = there | {"directory": Path(checkpoint).absolute()}
    elif checkpoint is not False:
        values["checkpoint"] = checkpoint
    return config.from_mapping(values, "serve()")


class _Keeper(threading.Thread):
    """Thread that holds the watchdog of a job until end() is called."""

    def __init__(self, wanted: JobConfig, *, fresh: bool, verbose: bool) -> None:
        super().__init__(name=f"gadei-ps serve {wanted.name}", daemon=True)
        self._daemon = Daemon(wanted, fresh=fresh, verbose=verbose, wanted=self._check)
        self._ending = threading.Event()
        self._ready = threading.Event()
        self._over = threading.Event()
        self.failure: BaseException | None = None

    def _check(self) -> None:
        if self._ending.is_set():
            raise JobStopped("stopped before the job was ready")

    def run(self) -> None:
        try:
            with self._daemon:
                self._ready.set()
                while not self._ending.wait(LOOK_INTERVAL_S):
                    self._daemon.check()
            daemon.check_code(self._daemon.config.name, max(0, self._daemon.code))
        except BaseException as error:
            self.failure = error
        finally:
            self._ready.set()
            self._over.set()

    def begin(self) -> None:
        """Return when the job is ready. Raises why it is not; KeyboardInterrupt ends the start."""
        self.start()
        try:
            self._ready.wait()
        except BaseException:
            self.end()
            raise
        if self.over and self.failure is not None:
            raise self.failure

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self._over.is_set()

    def end(self) -> None:
        """End the job; it continues to end if this call is interrupted."""
        self._ending.set()
        if self.ident is not None:  # else it could not be started
            self._over.wait()


class ServedJob:
    """A job that this process serves; see serve()."""

    def __init__(self, wanted: JobConfig, *, fresh: bool, keep: bool, verbose: bool) -> None:
        self.name: str = wanted.name
        self.socket = str(paths.socket_path(wanted.name).absolute())
        """A learner of another program finds the job by it, as by the name."""
        self.kept = keep
        self._process = os.getpid()
        self._keeper: _Keeper | None = None
        self._closed = False
        try:
            if keep:
                self._take_up(wanted, fresh, verbose)
            else:
                self._keeper = _Keeper(wanted, fresh=fresh, verbose=verbose)
                self._keeper.begin()
            _served[self.name] = self
            in_process.set_default_job(self.socket)
            atexit.register(self._at_exit)
        except BaseException:
            self.close()
            raise

    def _take_up(self, wanted: JobConfig, fresh: bool, verbose: bool) -> None:
        if daemon.running(wanted.name):
            if fresh:
                raise JobInUse(
                    f"fresh=True: job {wanted.name!r} is running; stop it before: gadei-ps stop "
                    f"{wanted.name}"
                )
            self.reload(wanted)
            return
        made = KeptDaemon(wanted, fresh=fresh, verbose=verbose)
        made.__enter__()
        made.detach()

    def reload(self, wanted: JobConfig) -> None:
        """Apply what may change while a job runs; see gadei-ps reload."""
        change.reload(wanted)

    @property
    def ended(self) -> bool:
        """Whether the job has ended, or this object is detached from it."""
        if self.kept and not self._closed:  # anybody may have stopped it
            return not daemon.running(self.name)
        return self._over

    @property
    def _over(self) -> bool:
        return self._closed or (self._keeper is not None and self._keeper.over)

    @property
    def of_this_process(self) -> bool:
        """Whether this very process has made it, and not a parent before a fork."""
        return os.getpid() == self._process

    def status(self) -> dict[str, Any]:
        """Return the output of `gadei-ps status --json`. Raises JobNotFound after the job's end."""
        until = time.monotonic() + WATCHDOG_PATIENCE_S
        while True:
            try:
                return jobs.plain(control.ask(self.socket, Status()))
            except (JobNotFound, ControlError):  # a watchdog was killed, and the next one comes
                if self._over or time.monotonic() > until:
                    raise
            time.sleep(LOOK_INTERVAL_S)

    def export(self, out: str | os.PathLike[str]) -> None:
        """Write the weights as they are now; see gadei-ps export. Raises UsageError."""
        from gadei_ps.commands import saved
        from gadei_ps.storage.export import check

        check(Path(out))
        saved.export_memory(self.name, Path(out))

    def run(
        self,
        command: Sequence[str],
        *,
        learners: int = 1,
        restart: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Run a program as learners of the job to their end, as `gadei-ps run` does.

        command: the program and its arguments. options: device, gpus, log_dir, quiet, as the
        command has them. Ctrl-C is passed on to the learners, which have 30 s to end; pressed
        again, it ends them at once. Returns the summary that `gadei-ps run --json` prints; its
        `exit_code` is 0 if all went well. Raises GadeiError, KeyboardInterrupt.
        """
        from gadei_ps.commands.run import RunOptions, run_learners

        unknown = {*options} - {one.name for one in dataclasses.fields(RunOptions)}
        if unknown:
            raise UsageError(f"run() has no option {min(unknown)!r}")
        wanted = RunOptions(learners=learners, restart=restart, **({"join": True} | options))
        with interrupts.of_commands():
            summary = run_learners(self.socket, command, wanted)
        if summary["exit_code"] == 128 + 2:
            raise KeyboardInterrupt
        return summary

    def stop(self) -> None:
        """End the job; learners of this process leave it before. Once more, it does nothing.

        Also a job with keep=True. Raises JobFailed if the job has failed, NotSaved if its last
        checkpoint has.
        """
        if self.close() and self.kept:
            with contextlib.suppress(JobNotFound):
                jobs.stop(self.name, drain=True, timeout_s=DRAIN_S)

    def close(self) -> bool:
        """Detach from the job; one that is not kept ends. Returns whether that was still to do."""
        if self._closed or not self.of_this_process:
            return False
        try:
            in_process.detach_all(self.name)
        finally:
            in_process.unset_default_job(self.socket)
            self._closed = True
            if _served.get(self.name) is self:
                del _served[self.name]
            atexit.unregister(self._at_exit)
            if self._keeper is not None:
                self._keeper.end()
        failure = self._keeper.failure if self._keeper is not None else None
        if failure is not None and not isinstance(failure, JobStopped):
            raise failure
        return True

    def _at_exit(self) -> None:
        with contextlib.suppress(GadeiError):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        how = "has ended" if self.ended else "kept" if self.kept else "served by this process"
        return f"<gadei_ps job {self.name!r}: {how}>"
