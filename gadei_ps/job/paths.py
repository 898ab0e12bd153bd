"""Where a job's control socket and lock file lie."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gadei_ps.errors import ControlError, NotOurs
from gadei_ps.machine import own


def directory() -> Path:
    """The user's directory for sockets, mode 0700; made if there is none.

    $GADEI_PS_RUNTIME_DIR, else $XDG_RUNTIME_DIR/gadei-ps, else /tmp/gadei-ps-UID. Raises
    ControlError if other users can write there: they could pose as the watchdog.
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
        or status.st_uid != os.getuid()
        or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise ControlError(
            f"{path} is not a directory that only you may write; "
            "remove it or set GADEI_PS_RUNTIME_DIR"
        )
    return path


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
        return own.open_file(path, os.O_RDWR | (os.O_CREAT if create else 0))
    except NotOurs as error:
        raise ControlError(f"{error}; no lock file can be there: remove it") from None
