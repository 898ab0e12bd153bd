"""Where a job's control socket and lock file lie."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
from pathlib import Path

from gadei_ps.errors import ControlError, NotOurs
from gadei_ps.machine import own

# A socket's name while it is made: the kernel goes on telling this one.
PASSING = re.compile(r"\.(?P<job>[A-Za-z0-9_-]+)\.sock\.(?P<pid>\d+)")
SYSTEM = Path("/run/gadei-ps")  # of the system's unit


def directory() -> Path:
    """The user's directory for sockets, mode 0700; made if there is none.

    $GADEI_PS_RUNTIME_DIR, else $XDG_RUNTIME_DIR/gadei-ps, else /tmp/gadei-ps-UID. Root may name
    another user's. Raises ControlError if other users can write there: they could pose as the
    watchdog.
    """
    given = os.environ.get("GADEI_PS_RUNTIME_DIR")
    if given:
        path = Path(given)
    elif os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(os.environ["XDG_RUNTIME_DIR"]) / "gadei-ps"
    else:
        path = Path(f"/tmp/gadei-ps-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ControlError(
            f"{path}: {error.strerror}; set GADEI_PS_RUNTIME_DIR to a directory you may write"
        ) from None
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid() != 0
        or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise ControlError(
            f"{path} is not a directory that only you may write (owner {user(status.st_uid)}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}): run the command as its owner, make it private "
            "(chmod go-w), or set GADEI_PS_RUNTIME_DIR to a directory of your own"
        )
    return path


def owner() -> int:
    """Whose jobs are seen: one's own, but root sees those of the runtime directory's owner."""
    return os.getuid() or directory().stat().st_uid


def check_own() -> None:
    """Raises ControlError for root in another user's directory: it would leave its own files."""
    if owner() != os.getuid():
        name = user(owner())
        raise ControlError(
            f"{directory()} belongs to user {name}: run the command as that user "
            f"(sudo -u {name} env GADEI_PS_RUNTIME_DIR={directory()} gadei-ps ...)"
        )


def user(uid: int) -> str:
    """Name of a user, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def of_watchdog(job: str, pid: int) -> Path | None:
    """The runtime directory in which the watchdog `pid` listens; None if that cannot be told.

    The kernel tells it to the watchdog's user and to root.
    """
    listens = set()
    try:
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was just closed
                listens.add(str(one.readlink()))
        lines = Path(f"/proc/{pid}/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and f"socket:[{fields[6]}]" in listens:
            path = Path(fields[7])
            match = PASSING.fullmatch(path.name)
            if match and match["job"] == job and path.is_absolute():
                return path.parent
    return None


def socket_path(job: str) -> Path:
    """The job's control socket."""
    return directory() / f"{job}.sock"


def lock_path(job: str) -> Path:
    """The file that the job's watchdog keeps locked while it lives."""
    return directory() / f"{job}.lock"


def open_lock(path: Path, *, create: bool) -> int:
    """Opens a lock file; returns the descriptor.

    Raises FileNotFoundError, or ControlError if something else has its name.
    """
    try:
        return own.open_file(path, os.O_RDWR | (os.O_CREAT if create else 0), owner=owner())
    except NotOurs as error:
        raise ControlError(f"{error}; no lock file can be there: remove it") from None
