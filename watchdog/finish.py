"""End of jobs that have lost their watchdog, as by that: with their last checkpoints.

The configuration comes from the job's memory (job/recorded.py), so that a mistake in a job file
does not keep a job from its end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gadei_ps.errors import JobDiffers, JobFailed, JobInUse, JobStopped, UsageError, in_words
from gadei_ps.job import paths, recorded, service
from gadei_ps.job.config import JobConfig
from gadei_ps.job.lock_file import NameLock
from gadei_ps.machine import interrupts, log
from gadei_ps.memory import presence, segment
from gadei_ps.memory.layout import Phase, Stop
from gadei_ps.watchdog import supervisor
from gadei_ps.watchdog.dead import clear_dead, end_servers
from gadei_ps.watchdog.notify import Earlier, Notify
from gadei_ps.watchdog.serve_options import Options
from gadei_ps.watchdog.sockets import remove_dead
from gadei_ps.watchdog.supervisor import Supervisor


def finish(job: str, file: JobConfig | UsageError, options: Options, notify: Notify) -> int:
    """Do nothing if nothing of the job is there. Returns the exit code.

    file: the job file, or why it cannot be used; it applies if the job's memory does not hold its
    configuration. Whatever goes wrong, no server runs afterwards; memory with gradients that no
    checkpoint has stays then. Raises GadeiError, JobInUse if another watchdog has the job, OSError
    or MemoryError.
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
        done = _finish(config, replace(options, recorded=own is not None), notify)
        if done.interrupted:
            raise JobFailed(
                f"the end of job {job!r} was interrupted before its last checkpoint; its memory "
                f"stays: repeat it, or continue with {service.serve(job)}"
            )
        return done.code
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
    lock = NameLock(job)
    try:
        end_servers(job)
    finally:
        lock.release()


def _clear(job: str, why: UsageError) -> None:
    """Remove useless files. Raises UsageError if there is memory without a configuration."""
    lock = NameLock(job)
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


@dataclass(frozen=True)
class _Finished:
    """Result of a watchdog that ends a job.

    signalled: a signal asked it to end meanwhile; interrupted: before it could begin.
    """

    code: int = 0
    signalled: bool = False
    interrupted: bool = False


def _finish(config: JobConfig, options: Options, notify: Notify) -> _Finished:
    watchdog = Supervisor(config, replace(options, finish=True), notify)
    try:
        code = watchdog.run()
    except JobStopped:
        return _Finished(0, watchdog.signalled, watchdog.memory.adopted)
    return _Finished(code, watchdog.signalled)


def serve(config: JobConfig, options: Options, notify: Notify) -> int:
    """Call supervisor.serve() after completing a stop that a dead watchdog had begun.

    The job then starts from the last checkpoint of that stop. If that has failed, the job resumes
    from memory, unless no checkpoint can be made: then the start fails and the memory stays.
    """
    if not options.fresh and options.checkpoint is None and _is_stopping(config.name):
        own = recorded.read(config.name)
        # The fork server that was started early is for the job that starts: one watchdog uses it.
        given = replace(options, recorded=own is not None, fork_server=None)
        done = _finish(own or config, given, Earlier(notify))
        interrupts.install()  # the watchdog's own handling of signals has ended with it
        if done.signalled:
            return done.code
    return supervisor.serve(config, options, notify)


def _is_stopping(job: str) -> bool:
    """Return whether a watchdog of the job has died during a stop."""
    control = presence.peek(job)
    if control is None or not int(control["model_ready"]):
        return False
    over = int(control["phase"]) in (Phase.KEPT, Phase.STOPPED, Phase.FAILED)
    return int(control["stop"]) != Stop.GO and not over
