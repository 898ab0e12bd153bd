"""Jobs as other processes see them: their list and status, their stop, and the rest of dead ones.

A job lives in three places: its socket and its lock file in the runtime directory, and its segments
in /dev/shm. The watchdog holds the lock from before it makes the first of them until after it has
removed the last, so a process that holds the lock may remove them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps.commands.durations import ANSWER_TIMEOUT_S, STOP_MARGIN_S
from gadei_ps.errors import ControlError, JobNotFound, NoAnswer, OtherVersion, UsageError
from gadei_ps.job import config, control, paths, service
from gadei_ps.job.control import Checkpoint, Connection, Discard, Status, StopJob
from gadei_ps.job.diagnosis import (
    diagnose,
    diagnose_other_users,
    explained,
    has_lost_socket,
    locked,
    serve_again,
)
from gadei_ps.job.lock_file import LockFile, awaited
from gadei_ps.machine import command_line, process
from gadei_ps.memory import holds, presence, segment, shm
from gadei_ps.memory.layout import CONTROL, REPLICA, SegmentKind
from gadei_ps.memory.totals import counts
from gadei_ps.show.counts import counted
from gadei_ps.storage import history_file
from gadei_ps.watchdog.cleanup import clear_dead

CHECKPOINT_TIMEOUT_S = 3600.0  # gigabytes, on a slow disk
LAST_CHECKPOINT_TIMEOUT_S = 600.0  # for the last checkpoint
DAY_S = 86_400.0


@dataclass(frozen=True)
class Job:
    """A job, or what is left of one.

    state: running, stopping, starting (or about to be gone), silent (its watchdog does not answer),
    elsewhere (in another pid namespace, or its socket is not in this runtime directory), orphaned
    (its watchdog was killed and its servers continue: serve it again, or stop it), stale (all its
    processes are dead: gc removes it), foreign (something else has the name of one of its files).
    """

    name: str
    state: str
    phase: str | None = None
    watchdog_pid: int | None = None
    server_pid: int | None = None
    learners: int | None = None
    shared_bytes: int = 0
    segments: tuple[str, ...] = ()
    started: int | None = None
    """Seconds since 1970."""
    command: str = ""
    """Command line of its first learner; empty if it has none."""


def jobs() -> list[Job]:
    """All jobs of this user, by name. Waits ANSWER_TIMEOUT_S for each that does not answer."""
    return [_look(name) for name in sorted(_names())]


def status(job: str) -> dict[str, Any]:
    """Return the status from the job's watchdog. Raises JobNotFound or ControlError."""
    try:
        return plain(control.ask(job, Status(), ANSWER_TIMEOUT_S))
    except JobNotFound as error:
        raise explained(error) from None
    except NoAnswer as error:
        by = " (systemd does that)" if service.of(Path(job).stem) else ""
        raise NoAnswer(
            f"{error}; if this lasts, kill it (gadei-ps kill {Path(job).stem} --watchdog) and "
            f"serve the job again{by}: servers and learners continue meanwhile"
        ) from None
    except ControlError:
        if _answers(job):
            raise
        raise JobNotFound(f"job {job!r} has just ended") from None


def statuses() -> list[dict[str, Any]]:
    """The reports of all jobs that answer."""
    found = []
    for name in sorted(_names()):
        with contextlib.suppress(JobNotFound, ControlError):
            found.append(status(name))
    return found


def _names() -> set[str]:
    names = {one.job for one in _segments()}
    for path in paths.directory().glob("*"):
        if path.suffix in (".sock", ".lock") and shm.JOB_NAME.fullmatch(path.stem):
            names.add(path.stem)
        elif match := paths.PASSING.fullmatch(path.name):
            names.add(match["job"])
    return names


def _segments(job: str | None = None) -> list[presence.Found]:
    uid = paths.owner()
    return [one for one in presence.find(job, uid) if one.uid == uid and not one.passed_over]


def _look(name: str) -> Job:
    there = _segments(name)
    found = [one for one in there if not one.foreign]
    size = sum(one.size for one in found)
    names = tuple(one.name[1:] for one in found)
    living = [one for one in found if not one.stale]
    owner = living[0].owner_pid if living and not living[0].elsewhere else None
    try:
        report = status(name)
    except JobNotFound:
        if has_lost_socket(name, paths.owner()):
            state = "silent"
        elif locked(paths.lock_path(name)):
            state = "starting"
        else:
            owned = any(one.owned or one.elsewhere for one in living)
            dead = "foreign" if (there and not found) or paths.foreign(name) else "stale"
            state = "elsewhere" if owned else "orphaned" if living else dead
        return _without_answer(Job(name, state, None, owner, None, None, size, names))
    except ControlError:
        return _without_answer(Job(name, "silent", None, owner, None, None, size, names))
    phase, learners = report["phase"], report["learners"]
    return Job(
        name,
        "stopping" if phase == "draining" else "running",
        phase,
        report["watchdog_pid"],
        report["server_pid"],
        len(learners),
        size,
        names,
        report["started"],
        command_line.of(learners[0]["pid"]) if learners else "",
    )


def _without_answer(job: Job) -> Job:
    """The job with what its memory says of its processes, where their pids mean something here."""
    control_ = presence.peek(job.name, paths.owner())
    if control_ is None or not presence.is_here(control_["header"]):
        return job
    started = int(control_["started"]) or None
    if job.state not in ("orphaned", "silent"):
        return replace(job, started=started)
    roster = control_["roster"]
    there = roster[(roster["retired"] != roster["generation"]) & (roster["name"] != REPLICA)]
    pids = [
        int(one["pid"]) for one in there if process.alive(int(one["pid"]), int(one["pid_start"]))
    ]
    servers = dict(presence.servers(job.name))
    active = int(control_["lease_pid"])
    watchdog = int(control_["watchdog_pid"]), int(control_["watchdog_start"])
    return replace(
        job,
        watchdog_pid=watchdog[0] if process.alive(*watchdog) else None,
        server_pid=active if active in servers else next(iter(servers), None),
        learners=len(pids),
        started=started,
        command=command_line.of(pids[0]) if pids else "",
    )


# -- stop -----------------------------------------------------------------------------------------


def stop(job: str, *, drain: bool, timeout_s: float, discard: bool = False) -> dict[str, Any]:
    """Stop the job and wait until it is gone; return its final report.

    timeout_s: with `drain`, how long learners may take to finish. A job whose watchdog was killed
    is ended at once; `discard` allows that even if gradients are lost. With a watchdog, `discard`
    ends a job without its last checkpoint, if a checkpoint is newer than its memory. Raises
    GadeiError.
    """
    try:
        report = status(job)
    except JobNotFound:
        if "/" in job:
            raise
        if not _has_no_watchdog(job):
            status(job)  # raises as before, unless the job has started meanwhile
            return stop(job, drain=drain, timeout_s=timeout_s, discard=discard)
        living = presence.living(job, paths.owner())
        if living.elsewhere or not living.servers:
            raise
        paths.check_own()
        if not discard:
            _check_saved(job)
        if (last := drop(job)) is None:
            again = f"job {job!r} has a watchdog again: run gadei-ps stop once more"
            raise ControlError(again) from None
        return last
    if discard and not report.get("newer_checkpoint"):
        raise UsageError(
            f"--discard: job {job!r} has a watchdog, so a stop loses nothing; leave out the option"
        )
    try:
        with Connection(job, ANSWER_TIMEOUT_S) as connection:
            watchdog = os.pidfd_open(connection.peer_pid)
    except (JobNotFound, ControlError, OSError):  # of another pid namespace, or ending just now
        watchdog = -1
    wait_s = STOP_MARGIN_S + (timeout_s if drain else 0.0)
    if report["saves_on_stop"]:
        wait_s += LAST_CHECKPOINT_TIMEOUT_S
    try:
        try:
            request = Discard() if discard else StopJob(drain=drain, timeout_s=timeout_s)
            report = plain(control.ask(job, request, timeout_s=wait_s))
        except (JobNotFound, ControlError):
            # Another process may have stopped it between the two requests.
            if watchdog < 0 or not process.gone(watchdog, 1.0):
                raise
        # The watchdog answers before it has removed everything.
        if watchdog >= 0 and not process.gone(watchdog, STOP_MARGIN_S):
            raise ControlError(
                f"job {job!r} has stopped, but its watchdog (pid {report['watchdog_pid']}) "
                f"does not end; kill it, then run gadei-ps gc {report['job']}"
            )
    finally:
        if watchdog >= 0:
            os.close(watchdog)
    return report


def _has_no_watchdog(job: str) -> bool:
    """Return whether the job's watchdog is dead. One that was just killed is waited for."""
    path = paths.lock_path(job)
    was_locked = locked(path)

    def look() -> None:
        if locked(path) or presence.living(job, paths.owner()).watchdog:
            raise BlockingIOError

    with contextlib.suppress(BlockingIOError):
        awaited(job, look, lambda: was_locked)
        return True
    return False


def plain(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without what the protocol adds."""
    return {key: value for key, value in reply.items() if key not in ("v", "ok")}


def _check_saved(job: str) -> None:
    """Raise ControlError unless the end of this job without a watchdog loses no gradients."""
    problem = f"job {job!r} has no watchdog to write its last checkpoint: serve it again"
    command = f"(gadei-ps stop {job} --discard)"
    try:
        control_ = segment.attach(
            shm.segment_name(job, "control"), SegmentKind.CONTROL, writable=False
        ).view(CONTROL)
    except OtherVersion as error:
        raise ControlError(
            f"{problem} {serve_again(job, error.what)} and then stop it, or lose what no "
            f"checkpoint has {command}"
        ) from None
    version, saved = int(control_["version"]), int(control_["checkpoint_version"])
    kept = int(control_["saves"]) or int(control_["checkpoints"])
    if kept and saved != version:
        again = serve_again(job, segment.other_build(job))
        raise ControlError(
            f"{problem} {again} and then stop it, end it with its job file "
            f"(gadei-ps serve --finish JOB.toml), or lose {counted(version - saved, 'gradient')} "
            f"{command}"
        )


def drop(job: str) -> dict[str, Any] | None:
    """End the servers of a job without a watchdog and remove its memory; its last counts.

    None if a watchdog lives, or if there is nothing left.
    """
    with _nobody(job, False) as lock:
        if lock is None or not presence.find(job):
            return None
        control_ = presence.peek(job)
        if control_ is None:  # it cannot be read
            control_ = np.zeros(1, CONTROL)[0]
        awaited(job, lambda: clear_dead(job))
        paths.socket_path(job).unlink(missing_ok=True)
    return {"job": job, "phase": "stopped", **counts(control_)}


# -- checkpoints ----------------------------------------------------------------------------------


def checkpoint(job: str) -> dict[str, Any]:
    """Request a checkpoint of the job; return its path, version, bytes and pause_ms.

    Raises JobNotFound, CheckpointError, ControlError.
    """
    status(job)  # a job that does not answer must not take the long time-out of a slow disk
    return plain(control.ask(job, Checkpoint(), timeout_s=CHECKPOINT_TIMEOUT_S))


# -- gc -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leftover:
    """A thing without an owner; kind: segment, socket, lock or history."""

    kind: str
    job: str
    path: str
    bytes: int


def collect(names: Iterable[str] | None = None, *, dry_run: bool = False) -> list[Leftover]:
    """Remove what dead jobs have left; with `dry_run` only lists it. Living jobs stay.

    names: of jobs. None for all jobs of this user except those that `serve` could continue.
    Raises UsageError for a name that no job can have.
    """
    found: list[Leftover] = []
    if names is None:
        uid = paths.owner()
        given = [one for one in sorted(_names()) if not segment.is_kept(one, uid)]
    else:
        given = [shm.check_job_name(one) for one in names]
    if not dry_run:
        paths.check_own()
    for name in given:
        if presence.living(name, paths.owner()).anyone:
            continue  # its servers run until a watchdog adopts them or the job is stopped
        with _nobody(name, dry_run) as lock:
            if lock is not None:
                found += _leftovers(name, dry_run) + lock
    return found


def old_histories(
    names: Iterable[str] | None, days: float, *, dry_run: bool = False
) -> list[Leftover]:
    """Remove histories that have not changed for so many days; with `dry_run` only lists them.

    Those of jobs that live stay, and those beside checkpoints. names: of jobs; None for all.
    """
    wanted, latest = None if names is None else set(names), time.time() - days * DAY_S
    found = []
    for path in sorted(config.state_directory().glob("*.history*.jsonl")):
        job = history_file.job_of(path)
        with contextlib.suppress(OSError):
            state = path.stat()
            if not history_file.is_own(path.name) or state.st_mtime > latest:
                continue
            if (wanted is not None and job not in wanted) or state.st_uid != os.geteuid():
                continue
            if presence.living(job, paths.owner()).anyone:
                continue
            if not dry_run:
                path.unlink()
            found.append(Leftover("history", job, str(path), state.st_size))
    return found


def foreign(names: Iterable[str] | None = None) -> list[str]:
    """Explain in one line each which files of a job are left alone. names: see collect()."""
    uid, wanted = paths.owner(), _names() if names is None else set(names)
    lines = [
        one.foreign
        for one in presence.find(None, uid)
        if one.foreign and one.uid == uid and (names is None or one.job in wanted)
    ]
    return lines + [line for name in sorted(wanted) for line in paths.foreign(name)]


def kept() -> list[str]:
    """Return the names of dead jobs whose memory collect() leaves if they are not named."""
    uid = paths.owner()
    return [
        one
        for one in sorted(_names())
        if segment.is_kept(one, uid) and not presence.living(one, uid).anyone and not _answers(one)
    ]


def left_alone(names: Iterable[str], removed: Iterable[Leftover]) -> list[str]:
    """Explain in one line for each job, if known, why collect() has removed nothing of it."""
    lines = []
    for name in set(names) - {one.job for one in removed}:
        if _answers(name):
            lines.append(f"job {name!r} is running: {service.command(name, f'stop {name}')}")
        elif (why := diagnose(name) or diagnose_other_users(name)) is not None:
            lines.append(why)
    return sorted(lines)


@contextlib.contextmanager
def _nobody(job: str, dry_run: bool) -> Iterator[list[Leftover] | None]:
    """Hold the job's lock, so that no watchdog of that name starts meanwhile.

    Yields None if a watchdog lives, otherwise the lock file in a list, if there was one. Removes
    the lock file at the end; a dry run creates and removes none.
    """
    if _answers(job):
        yield None
        return
    path = paths.lock_path(job)
    left = [Leftover("lock", job, str(path), 0)] if path.exists() else []
    try:
        lock = awaited(job, lambda: LockFile(path, create=not dry_run))
    except FileNotFoundError:
        yield []
        return
    except (BlockingIOError, ControlError):
        yield None
        return
    removed = False
    try:
        mine = lock.is_empty  # as a watchdog's lock file always is
        yield left if mine else None
        removed = mine and not dry_run
    finally:
        if removed:
            lock.release()
        else:
            lock.close()


def _answers(job: str) -> bool:
    """Return whether a process listens at the job's socket, even if it is slow to answer."""
    try:
        with Connection(job, ANSWER_TIMEOUT_S):
            return True
    except JobNotFound:
        return False
    except ControlError:
        return True


def _leftovers(job: str, dry_run: bool) -> list[Leftover]:
    """List the remains of a job. The caller holds the job's lock."""
    dead = [one for one in _segments(job) if one.stale]
    found = []
    # A watchdog with another runtime directory does not see the lock file.
    with contextlib.nullcontext(True) if dry_run else holds.alone(job) as alone:
        if alone and not presence.living(job, paths.owner()).servers:
            found = [
                Leftover("segment", job, one.name[1:], one.size)
                for one in dead
                if dry_run or segment.unlink(one.name)
            ]
    sockets = [paths.socket_path(job)]
    for path in paths.directory().glob(f".{job}.sock.*"):
        match = paths.PASSING.fullmatch(path.name)
        if match and not Path(f"/proc/{match['pid']}").exists():
            sockets.append(path)
    for path in sockets:
        if path.is_socket():
            found.append(Leftover("socket", job, str(path), 0))
            if not dry_run:
                path.unlink(missing_ok=True)
    return found
