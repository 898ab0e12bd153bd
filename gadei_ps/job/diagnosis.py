"""Diagnosis of a job whose watchdog does not answer, with advice."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
from pathlib import Path

from gadei_ps import homes
from gadei_ps.errors import ControlError, GadeiError, JobNotFound
from gadei_ps.job import paths, service
from gadei_ps.memory import holds, presence, segment, shm
from gadei_ps.memory.layout import Kept, Phase


def diagnose(job: str) -> str | None:
    """Explain why no watchdog answers, and what to do; None if nothing of the job exists."""
    if "/" in job:
        return None
    uid = paths.owner()
    if has_lost_socket(job, uid):
        unit, path = service.of(job), paths.socket_path(job)
        again = f"systemd starts {unit.unit} again" if unit else "serve the job again"
        return (
            f"job {job!r} is running, but its socket {path} is gone or replaced: its watchdog "
            "makes it again within seconds, so try again; if this lasts, replace the watchdog "
            f"(gadei-ps kill {job} --watchdog, then {again}): servers and learners continue "
            "meanwhile"
        )
    if locked(paths.lock_path(job)):
        return f"job {job!r} is starting or ending: try again in a moment"
    other = segment.other_build(job, uid)
    living = presence.living(job, uid)
    if living.watchdog or living.elsewhere:
        where = _directory(job, uid)
        if where is not None:
            return (
                f"job {job!r} is running with another runtime directory: "
                f"set {paths.variable(where)}"
            )
        return (
            f"job {job!r} is running elsewhere (in another container or pid namespace, or with "
            "another runtime directory): ask there, or set GADEI_PS_RUNTIME_DIR as it is there"
        )
    if living.servers:
        stop = service.command(job, f"stop {job}" + (" --discard" if other else ""))
        return (
            f"job {job!r} has lost its watchdog and continues without it: serve it again "
            f"{serve_again(job, other)}, or stop it ({stop})"
        )
    if uid == os.getuid() and holds.nameless(job):
        return (
            f"job {job!r} runs on without its names in {shm.SHM} (see gadei-ps doctor): serve "
            "it again, which ends what is left and continues from the newest checkpoint"
        )
    if segment.is_kept(job, uid):
        return (
            f"job {job!r} is still in memory, but its processes are dead: continue it "
            f"{serve_again(job, other)}, or drop it ({service.command(job, f'gc {job}')})"
        )
    return None


def explained(error: JobNotFound) -> JobNotFound:
    """The same error, with what is known of the job and what to do."""
    if not error.job:
        return error
    with contextlib.suppress(GadeiError, OSError):
        if why := diagnose(error.job) or diagnose_other_users(error.job):
            return JobNotFound(why)
        if found := service.of(error.job):
            status = found.systemctl("status", found.unit, found.end_unit)
            return JobNotFound(f"{error}; its last messages are in: {status}")
    return error


def diagnose_other_users(job: str) -> str | None:
    """Advise on a job of this name of another user or of the system; None if none is known."""
    if "/" in job:
        return None
    for uid in _others(job).get(job, ()):
        name, variable = paths.user(uid), paths.variable(_where(job, uid))
        root = f"; root may set {variable} instead" if os.geteuid() == 0 else ""
        return (
            f"you have no job {job!r}, but user {name} has one: run the command as that user "
            f"(sudo -u {shlex.quote(name)} env {variable} gadei-ps ...){root}"
        )
    if paths.directory() == homes.RUNTIME or not service.is_installed(job, system=True):
        return None
    variable = paths.variable(homes.RUNTIME)
    return (
        f"no job {job!r} in {paths.directory()}, but the system has a service of this name: set "
        f"{variable}; its state: systemctl status gadei-ps@{job}"
    )


def jobs_elsewhere() -> list[str]:
    """Return one line for each place with jobs outside this runtime directory: how to list them."""
    places: dict[tuple[int, Path | None], list[str]] = {}
    for job, uids in sorted(_others("*").items()):
        for uid in sorted(uids):
            places.setdefault((uid, _where(job, uid)), []).append(job)
    lines = []
    for (uid, where), jobs in places.items():
        variable, name = paths.variable(where), paths.user(uid)
        command = f"{variable} gadei-ps ls"
        if os.geteuid() not in (0, uid):
            command = f"sudo -u {shlex.quote(name)} env {command}"
        lines.append(f"user {name} has jobs elsewhere ({', '.join(jobs)}): {command} shows them")
    return lines


def _others(job: str) -> dict[str, set[int]]:
    """Find jobs of this name (`*`: all) that this runtime directory lacks: users by job."""
    found: dict[str, set[int]] = {}
    for path in shm.SHM.glob(f"gadei-ps.*.{job}.control"):
        match = shm.SEGMENT_NAME.fullmatch(path.name)
        if match is None or job not in ("*", match["job"]):
            continue
        name, uid = match["job"], int(match["uid"])
        try:
            if path.lstat().st_uid != uid:  # it only has such a name
                continue
        except OSError:
            continue
        if uid == paths.owner() and _where(name, uid) in (None, paths.directory()):
            continue
        # Only root is shown more.
        readable = os.geteuid() in (0, uid)
        if readable and not (presence.living(name, uid).anyone or segment.is_kept(name, uid)):
            continue
        found.setdefault(name, set()).add(uid)
    return found


def _where(job: str, uid: int) -> Path | None:
    """Return the runtime directory of the job, from the kernel or else the probable one."""
    if (known := _directory(job, uid)) is not None:
        return known
    if uid == paths.owner():
        return None
    session = Path(f"/run/user/{uid}")
    return _of_unit(uid) or (session / "gadei-ps" if session.is_dir() else None)


def has_lost_socket(job: str, uid: int) -> bool:
    """Return whether the job's watchdog uses this runtime directory but its socket is lost.

    Meant for a socket where no watchdog answers.
    """
    where = _directory(job, uid)
    if where is not None:
        return where.resolve() == paths.directory().resolve()
    control = presence.peek(job, uid)
    serves = control is not None and int(control["phase"]) == Phase.SERVING
    return serves and locked(paths.lock_path(job)) and not paths.socket_path(job).exists()


def _directory(job: str, uid: int) -> Path | None:
    """Return the runtime directory of the job's watchdog, if the kernel shows it."""
    control = presence.peek(job, uid)
    if control is None or not presence.is_here(control["header"]):
        return None
    return paths.of_watchdog(job, int(control["watchdog_pid"]))


def _of_unit(uid: int) -> Path | None:
    """The runtime directory of the system's unit, if that is this user's."""
    try:
        return homes.RUNTIME if homes.RUNTIME.stat().st_uid == uid else None
    except OSError:
        return None


def serve_again(job: str, other: str | None) -> str:
    """Return the command that serves a job again. other: the difference between the builds."""
    if other is not None:
        return f"with its own gadei-ps (it was {other})"
    control = presence.peek(job)
    by_run = control is not None and int(control["temporary"]) == Kept.BY_RUN
    return f"(gadei-ps run {job} PROGRAM ...)" if by_run else f"({service.serve(job)})"


def locked(path: Path) -> bool:
    """Return whether a watchdog holds this lock file. Raises OSError if it cannot be opened."""
    try:
        fd = paths.open_lock(path, create=False)
    except (FileNotFoundError, ControlError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
