"""Segments of jobs in /dev/shm and the jobs' living processes, found without mapping anything."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace

import numpy as np

from gadei_ps.errors import NotOurs
from gadei_ps.machine import process
from gadei_ps.memory import holds, layout, shm
from gadei_ps.memory.shm import segment_name

HALF_MADE_S = 5.0  # after this time, a segment without magic or owner counts as stale


@dataclass(frozen=True)
class Found:
    """File in /dev/shm with the name of a segment of this project."""

    name: str
    job: str
    part: str
    uid: int
    """User id in the file's name."""
    size: int
    owner_pid: int = 0
    owned: bool = False
    """Whether its watchdog is alive."""
    stale: bool = False
    """Whether neither its watchdog nor a server of the job is alive."""
    elsewhere: bool = False
    """Whether one of them is alive in another pid namespace."""
    foreign: str = ""
    """Reason why it is not ours, in one line; the other fields are unknown then. Empty: ours."""

    @property
    def passed_over(self) -> bool:
        """Whether a job does without this name: the learner gets the next row, and its ring."""
        return bool(self.foreign) and self.part.startswith("ring.")


@dataclass(frozen=True)
class Living:
    """Living processes of a job, found by pid, or by locks if pids have no meaning here."""

    watchdog: bool = False
    servers: bool = False
    elsewhere: bool = False
    """Whether they live in another pid namespace."""

    @property
    def anyone(self) -> bool:
        return self.watchdog or self.servers


def living(job: str, uid: int | None = None) -> Living:
    """Look up the living processes of a job.

    Raises OSError if the kernel does not show them: no process counts as dead for that.
    """
    try:
        fd = shm.open_segment(segment_name(job, "control", uid), writable=False, owner=uid)
    except (NotOurs, FileNotFoundError):
        return Living()
    try:
        locked = [holds.held(fd, byte) for byte in (holds.WATCHDOG, *holds.SERVERS)]
        control = _control(fd)
    finally:
        os.close(fd)
    watchdog, servers = locked[0], any(locked[1:])
    if control is not None and is_here(control["header"]):
        pid, start = int(control["watchdog_pid"]), int(control["watchdog_start"])
        return Living(watchdog or process.alive(pid, start), servers or bool(_servers(control)))
    return Living(watchdog, servers, control is not None and (watchdog or servers))


def elsewhere(job: str) -> str:
    """Return the message for a job that lives in another pid namespace."""
    return (
        f"job {job!r} is running elsewhere (in another container or pid namespace): "
        "stop it there, or choose another name"
    )


def peek(job: str, uid: int | None = None) -> np.void | None:
    """Copy the job's control record, even if another build made it.

    None if there is none, or if it is not ours, half made or of another layout version. Raises
    OSError if it cannot be read.
    """
    try:
        fd = shm.open_segment(segment_name(job, "control", uid), writable=False, owner=uid)
    except (NotOurs, FileNotFoundError):
        return None
    try:
        return _control(fd)
    finally:
        os.close(fd)


def _control(fd: int) -> np.void | None:
    raw = os.pread(fd, layout.CONTROL.itemsize, 0)
    if len(raw) < layout.CONTROL.itemsize:
        return None
    control: np.void = np.frombuffer(raw, layout.CONTROL, 1)[0]
    header = control["header"]
    known = int(header["magic"]), int(header["layout_version"])
    return control if known == (layout.MAGIC, layout.LAYOUT_VERSION) else None


def servers(job: str) -> list[tuple[int, int]]:
    """Pid and start time of the job's servers that are alive, as its control segment names them.

    None of them are of another pid namespace: there, the pids are other processes'.
    """
    control = peek(job)
    return _servers(control) if control is not None and is_here(control["header"]) else []


def server_pids(job: str) -> list[int]:
    """Process ids of the job's servers that are alive."""
    return [pid for pid, _ in servers(job)]


def _servers(control: np.void) -> list[tuple[int, int]]:
    lines = [(int(line["pid"]), int(line["start"])) for line in control["server"]]
    return [(pid, start) for pid, start in lines if process.alive(pid, start)]


def is_here(header: np.void) -> bool:
    """Return whether pids in a job's segments are pids of this process' namespace."""
    return int(header["owner_namespace"]) == process.namespace()


def find(job: str | None = None, uid: int | None = None) -> list[Found]:
    """List all segments of this project in /dev/shm, or one job's (of this user, or of user `uid`).

    Raises OSError if the directory cannot be read.
    """
    wanted = os.getuid() if uid is None else uid
    looked = []
    try:
        names = sorted(path.name for path in shm.SHM.iterdir())
    except FileNotFoundError:
        return []
    for match in filter(None, map(shm.SEGMENT_NAME.fullmatch, names)):
        name, owner = match["job"], int(match["uid"])
        if job is not None and (name, owner) != (job, wanted):
            continue
        if (found := _look(match[0], name, match["part"], owner)) is not None:
            looked.append(found)
    alive = {key: living(*key) for key in {(one.job, one.uid) for one in looked if not one.foreign}}
    for number, one in enumerate(looked):
        if not one.foreign:
            its = alive[one.job, one.uid]
            looked[number] = replace(
                one,
                owned=one.owned or its.watchdog,
                stale=one.stale and not its.anyone,
                elsewhere=its.elsewhere,
            )
    return looked


def _look(name: str, job: str, part: str, uid: int) -> Found | None:
    """Inspect one segment by itself, without its job's processes."""
    path = shm.path_of(name)
    try:
        fd = shm.open_segment(name, writable=False, owner=uid if not os.geteuid() else None)
    except FileNotFoundError:
        return None
    except (NotOurs, OSError) as error:
        with contextlib.suppress(FileNotFoundError):
            size = path.lstat().st_size
            return Found(f"/{name}", job, part, uid, size, foreign=str(error))
        return None
    try:
        status = os.fstat(fd)
        raw = os.pread(fd, layout.HEADER.itemsize, 0)
    finally:
        os.close(fd)
    header = np.frombuffer(raw.ljust(layout.HEADER.itemsize, b"\0"), layout.HEADER, 1)[0]
    pid, start = int(header["owner_pid"]), int(header["owner_start"])
    # Before it had this word, a segment was made by a process of this namespace.
    here = int(header["layout_version"]) != layout.LAYOUT_VERSION or is_here(header)
    owned = here and process.alive(pid, start)
    half_made_s = time.time() - status.st_mtime
    stale = not owned if pid and here else half_made_s > HALF_MADE_S
    return Found(f"/{name}", job, part, uid, status.st_size, pid, owned=owned, stale=stale)
