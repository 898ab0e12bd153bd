"""Why no watchdog answers for a job, and what to do."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gadei_ps import homes
from gadei_ps.errors import ControlError
from gadei_ps.job import paths
from gadei_ps.memory import holds, segment


def absence(job: str) -> str | None:
    """Why no watchdog answers, and what to do; None if there is nothing of the job."""
    if "/" in job:
        return None
    uid = paths.owner()
    if locked(paths.lock_path(job)):
        return f"job {job!r} is starting or ending: try again in a moment"
    other = segment.other_build(job, uid)
    living = segment.living(job, uid)
    if living.watchdog or living.elsewhere:
        where = _directory(job, uid)
        if where is not None:
            return (
                f"job {job!r} is running with another runtime directory: "
                f"set GADEI_PS_RUNTIME_DIR={where}"
            )
        return (
            f"job {job!r} is running elsewhere (in another container or pid namespace, or with "
            "another runtime directory): ask there, or set GADEI_PS_RUNTIME_DIR as it is there"
        )
    if living.servers:
        stop = f"gadei-ps stop {job}" + (" --discard" if other else "")
        return (
            f"job {job!r} has lost its watchdog and continues without it: serve it again "
            f"{how(other)}, or stop it ({stop})"
        )
    if uid == os.getuid() and holds.nameless(job):
        return (
            f"job {job!r} runs on without its names in {segment.SHM} (see gadei-ps doctor): serve "
            "it again, which ends what is left and continues from the newest checkpoint"
        )
    if segment.is_kept(job, uid):
        return (
            f"job {job!r} is still in memory, but its processes are dead: continue it "
            f"{how(other)}, or drop it (gadei-ps gc {job})"
        )
    return None


def of_others(job: str) -> str | None:
    """What to do if another user has a job of this name; None if none is known to have one."""
    if "/" in job:
        return None
    for path in segment.SHM.glob(f"gadei-ps.*.{job}.control"):
        match = segment.SEGMENT_NAME.fullmatch(path.name)
        if match is None or match["job"] != job or int(match["uid"]) == paths.owner():
            continue
        uid = int(match["uid"])
        try:
            if path.lstat().st_uid != uid:  # it only has such a name
                continue
        except OSError:
            continue
        # Only root is shown more.
        if os.geteuid() == 0 and not segment.living(job, uid).anyone:
            continue
        name, where = paths.user(uid), _directory(job, uid) or _of_unit(uid)
        variable = f"GADEI_PS_RUNTIME_DIR={where or '...'}"
        root = f"; root may set {variable} instead" if os.geteuid() == 0 else ""
        return (
            f"you have no job {job!r}, but user {name} has one: run the command as that user "
            f"(sudo -u {name} env {variable} gadei-ps ...){root}"
        )
    return None


def _directory(job: str, uid: int) -> Path | None:
    """The runtime directory of the job's watchdog, if the kernel tells it."""
    control = segment.peek(job, uid)
    if control is None or not segment.is_here(control["header"]):
        return None
    return paths.of_watchdog(job, int(control["watchdog_pid"]))


def _of_unit(uid: int) -> Path | None:
    """The runtime directory of the system's unit, if that is this user's."""
    try:
        return homes.RUNTIME if homes.RUNTIME.stat().st_uid == uid else None
    except OSError:
        return None


def how(other: str | None) -> str:
    """How a job is served again. other: how its build differs from this program's."""
    return "(gadei-ps serve)" if other is None else f"with its own gadei-ps (it was {other})"


def locked(path: Path) -> bool:
    """Whether a watchdog holds this lock file."""
    try:
        fd = paths.open_lock(path, create=False)
    except (OSError, ControlError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
