"""Entry points of a watchdog: `gadei-ps serve`, its --finish, and the child of another command."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace

from gadei_ps.errors import (
    GadeiError,
    JobDiffers,
    JobFailed,
    JobInUse,
    JobStopped,
    UsageError,
    in_words,
)
from gadei_ps.job import paths, recorded, service
from gadei_ps.job.config import JobConfig, from_mapping
from gadei_ps.job.lock_file import NameLock, awaited
from gadei_ps.machine import interrupts, lines, log
from gadei_ps.machine.lines import Lines
from gadei_ps.memory import presence, segment
from gadei_ps.memory.layout import Phase, Stop
from gadei_ps.watchdog import supervisor
from gadei_ps.watchdog.cleanup import clear_dead, end_servers
from gadei_ps.watchdog.fork_server import ForkServer
from gadei_ps.watchdog.notify import Notify
from gadei_ps.watchdog.serve_options import Options
from gadei_ps.watchdog.sockets import remove_dead
from gadei_ps.watchdog.supervisor import Supervisor


def serve(config: JobConfig, options: Options, notify: Notify) -> int:
    """Call supervisor.serve() after completing a stop that a dead watchdog had begun.

    The job then starts from the last checkpoint of that stop. If that has failed, the job resumes
    from memory, unless no checkpoint can be made: then the start fails and the memory stays.
    """
    if not options.fresh and options.checkpoint is None and _is_stopping(config.name):
        own = recorded.read(config.name)
        # The fork server that was started early is for the job that starts: one watchdog uses it.
        given = replace(options, recorded=own is not None, fork_server=None)
        with notify.completing_stop():
            watchdog, code = _end_job(own or config, given, notify)
        interrupts.install()  # the watchdog's own handling of signals has ended with it
        if watchdog.signalled:
            return code or 0
    return supervisor.serve(config, options, notify)


def _is_stopping(job: str) -> bool:
    """Return whether a watchdog of the job has died during a stop."""
    control = presence.peek(job)
    if control is None or not int(control["model_ready"]):
        return False
    over = int(control["phase"]) in (Phase.KEPT, Phase.STOPPED, Phase.FAILED)
    return int(control["stop"]) != Stop.GO and not over


def _end_job(config: JobConfig, options: Options, notify: Notify) -> tuple[Supervisor, int | None]:
    """Run a watchdog that ends the job. Return its exit code; None if it could not begin."""
    watchdog = Supervisor(config, replace(options, finish=True), notify)
    try:
        return watchdog, watchdog.run()
    except JobStopped:
        return watchdog, None


def finish(job: str, file: JobConfig | UsageError, options: Options, notify: Notify) -> int:
    """End a job that has lost its watchdog, as that would: with its last checkpoint.

    Do nothing if nothing of the job is there. file: the job file, or why it cannot be used; it
    applies if the job's memory does not hold its configuration (job/recorded.py), so that a mistake
    in it does not keep the job from its end. Whatever goes wrong, no server runs afterwards; memory
    with gradients that no checkpoint has stays then. Returns the exit code. Raises GadeiError,
    JobInUse if another watchdog has the job, OSError or MemoryError.
    """
    try:
        own = recorded.read(job)
        if own is not None and isinstance(file, UsageError):
            log.get(job=job).warning(
                "the job file cannot be used: the job ends with the configuration that it has",
                reason=str(file),
            )
        config = own or file
        if isinstance(config, UsageError):
            _clear(job, config)
            return 0
        watchdog, code = _end_job(config, replace(options, recorded=own is not None), notify)
        if code is None and watchdog.memory.adopted:
            raise JobFailed(
                f"the end of job {job!r} was interrupted before its last checkpoint; its memory "
                f"stays: repeat it, or continue with {service.serve(job)}"
            )
        return code or 0
    except BaseException as error:
        if isinstance(error, JobInUse) and not isinstance(error, JobDiffers):
            raise
        end(job)
        notify.failed(in_words(error))
        raise


def end(job: str) -> None:
    """End the servers of a job without a watchdog at once, and keep its memory.

    Raises JobInUse where a watchdog has the job, ControlError or OSError.
    """
    lock = awaited(job, lambda: NameLock(job))
    try:
        awaited(job, lambda: end_servers(job))
    finally:
        lock.release()


def _clear(job: str, why: UsageError) -> None:
    """Remove useless files. Raises UsageError if there is memory without a configuration."""
    lock = awaited(job, lambda: NameLock(job))
    try:
        if segment.is_kept(job):
            raise UsageError(
                f"job {job!r} is in memory, but neither its memory nor its job file holds a valid "
                f"configuration: its servers are ended and its memory stays; fix the file and "
                f"repeat, or drop it with {service.command(job, f'gc {job}')} ({why})"
            )
        clear_dead(job)
        remove_dead(paths.socket_path(job))
    finally:
        lock.release()


class NotifyCommand(Notify):
    """Sends an empty line to a command whenever the servers' start has made progress."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self._command = Lines(sends=end)

    def progress(self, timeout_s: float) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            self._command.send(b"")


def serve_command(end: int, fork_server: ForkServer | None) -> int:
    """Serve the job of the command that has started this process. Returns the exit code.

    end: descriptor of a socket to it. It sends a line of JSON: `config` and fields of Options, and
    `keep`, whether the job resumes from what is there. The reason why the watchdog could not start
    is sent to it, as a line with the kind of the error and its message.
    """
    line = b""
    with contextlib.suppress(ConnectionResetError), open(end, "rb", closefd=False) as socket:
        line = socket.readline()
    if not line.endswith(b"\n"):  # nobody wants it any more
        return 0
    given = json.loads(line)
    config, keep = from_mapping(given.pop("config"), "job"), given.pop("keep")
    quiet, resume = not given["verbose"], keep or config.checkpoint is not None
    log.set_up(verbose=not quiet, quiet=quiet)
    options = Options(resume=resume, quiet=quiet, fork_server=fork_server, **given)
    try:
        return supervisor.serve(config, options, NotifyCommand(end))
    except (GadeiError, OSError, MemoryError) as error:
        why = f"the watchdog of job {config.name!r} could not start: {in_words(error)}"
        failed = JobFailed(why)
        shown = error if isinstance(error, GadeiError) else failed
        os.set_blocking(end, True)
        message = {"kind": type(shown).__name__, "message": str(shown)}
        lines.write(end, json.dumps(message).encode())
        return shown.exit_code
