"""Removes what a dead job has left, and ends the servers that have outlived it."""

from __future__ import annotations

import contextlib
import os
import signal

from gadei_ps import _native
from gadei_ps.errors import JobDiffers, JobInUse, NameTaken, SegmentError
from gadei_ps.job import service
from gadei_ps.machine import ownership, process
from gadei_ps.memory import holds, layout, presence, segment, shm
from gadei_ps.memory.layout import Phase, SegmentKind, Stop

DEAD_SERVER_KILL_S = 10.0


def clear_dead(job: str) -> list[str]:
    """Remove the segments of a job of this name whose watchdog is dead, and end its servers.

    The caller holds the job's lock. Raises JobInUse if a watchdog with another runtime directory
    lives, if a process of the job lives in another pid namespace, or if a segment's name is taken
    by what is not ours and the job cannot do without it.
    """
    found = [one for one in presence.find(job) if not one.passed_over]
    for one in found:
        if one.foreign:
            raise name_taken(one.foreign)
    _end_nameless(job)
    living = presence.living(job)
    if living.elsewhere:
        raise JobInUse(presence.elsewhere(job))
    # Without servers, a segment that is not stale is being made at this moment.
    busy = [one for one in found if one.owned or not (one.stale or living.servers)]
    if busy and not busy[0].owner_pid:
        raise JobInUse(
            f"job {job!r}: {busy[0].name[1:]} is half made: another start is at work, or has just "
            f"died; try again in {presence.HALF_MADE_S:g} s"
        )
    if busy:
        raise JobInUse(
            f"job {job!r} is in use: process {busy[0].owner_pid} owns {busy[0].name[1:]}; "
            "choose another name or stop it (gadei-ps stop)"
        )
    if not found:
        return []  # and no look at the lock, which another start may be about to take
    with holds.alone(job) as alone:
        if not alone:
            raise JobInUse(f"job {job!r} has just been started by another")
        _end_servers(job)
        # The control segment last: only its locks and pids show which processes use the others.
        names = sorted((one.name for one in found), key=lambda name: name.endswith(".control"))
        return [name for name in names if segment.unlink(name)]


def end_servers(job: str) -> None:
    """End the servers of a job whose watchdog is dead, and leave its memory as it is.

    The caller holds the job's lock. Raises JobInUse as clear_dead() does.
    """
    if presence.living(job).elsewhere:
        raise JobInUse(presence.elsewhere(job))
    with holds.alone(job) as alone:
        if not alone:
            raise JobInUse(f"job {job!r} has just been started by another")
        _end_servers(job)


def _end_servers(job: str) -> None:
    for pid, start in presence.servers(job):
        pidfd = ownership.open_process(pid, start)
        if pidfd is not None:
            _kill(pidfd)
    if presence.living(job).servers:
        raise JobInUse(f"job {job!r} is in use: its servers do not end")
    _notify_learners(job)


def _end_nameless(job: str) -> None:
    """End servers of the job whose memory has lost its names: no watchdog could find it again."""
    there = holds.nameless(job)
    for pid, byte in there.items():
        if byte == holds.WATCHDOG:
            raise JobInUse(
                f"job {job!r} is in use: its memory has lost its names, but its watchdog lives: "
                f"end it, which makes a last checkpoint (kill {pid}), then serve the job again"
            )
    for pid in there:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            # The descriptor was opened before: a process that has a lock now is the one behind it.
            if pid in holds.nameless(job):
                _kill(pidfd)
            else:
                os.close(pidfd)


def _notify_learners(job: str) -> None:
    """Let attached learners fail at once; otherwise they would wait for a watchdog."""
    name = shm.segment_name(job, "control")
    with contextlib.suppress(FileNotFoundError, SegmentError):  # half made, or of another build
        control = segment.attach(name, SegmentKind.CONTROL, writable=True)
        if int(control.view(layout.CONTROL)["phase"]) < Phase.KEPT:
            # In this order: a learner that sees the stop also sees the reason.
            control.view(layout.CONTROL)["phase"] = Phase.FAILED
            _native.store32(control.word(layout.CONTROL, "stop"), Stop.CLOSED)


def differs(job: str, how: str, remedy: str) -> JobDiffers:
    """Return the error for unusable memory. remedy: advice if no unit ends the job."""
    unit = service.expected(job)
    if service.runs_in(job, watchdog=True):
        remedy = (
            f"{unit.end_unit} ends it, with its last checkpoint if it can; "
            f"see {unit.systemctl('status', unit.end_unit)}; "
            f"{unit.systemctl('start')} starts it again"
        )
    elif service.runs_in(job):
        drop = service.command(job, f"gc {job}")
        remedy = f"save it with its own gadei-ps (serve --finish), or drop it with {drop}"
    return JobDiffers(f"job {job!r} {how}: {remedy}")


def name_taken(why: str) -> NameTaken:
    return NameTaken(
        f"{why}; it is left alone: choose another name for the job, or have it removed by its "
        "owner or root"
    )


def _kill(pidfd: int) -> None:
    """Kill a process and wait for its end; close the descriptor."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        process.gone(pidfd, DEAD_SERVER_KILL_S)
    except ProcessLookupError:
        pass  # it has just ended
    finally:
        os.close(pidfd)
