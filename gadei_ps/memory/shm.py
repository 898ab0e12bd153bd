"""Names of segments, and the one place where a segment's file is opened.

Every user can make files in /dev/shm. So a name proves nothing: what is not a regular file of this
user, mode 0600, is never read, mapped, locked or removed. native/gadei_segments.c does the same.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from gadei_ps.errors import UsageError
from gadei_ps.machine import ownership

SHM = Path("/dev/shm")
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")
WHOLE_JOB_NAME = f"^{JOB_NAME.pattern}$"  # for pydantic, which searches for a pattern
NUMBER = r"(?:0|[1-9][0-9]{0,9})"
# Only what segment_name() makes: any user can give any name to a file.
SEGMENT_NAME = re.compile(
    rf"gadei-ps\.(?P<uid>{NUMBER})\.(?P<job>{JOB_NAME.pattern})\."
    rf"(?P<part>control|weights|state|ring\.{NUMBER})"
)


def check_job_name(job: str) -> str:
    """Return the name, or raise UsageError."""
    if not JOB_NAME.fullmatch(job):
        raise UsageError(
            f"job name {job!r}: use 1 to 48 letters, digits, '-' and '_', "
            "beginning with a letter or digit"
        )
    return job


def segment_name(job: str, part: str, uid: int | None = None) -> str:
    """Name of a job's segment; `part` is control, weights, state or ring.K."""
    return f"/gadei-ps.{os.getuid() if uid is None else uid}.{job}.{part}"


def path_of(name: str) -> Path:
    """Return the path of the segment of this name."""
    return SHM / name.removeprefix("/")


def open_segment(name: str, *, writable: bool, owner: int | None = None) -> int:
    """Open a segment's file; return the descriptor.

    owner: whose it must be; by default the effective user's. Raises FileNotFoundError, NotOurs, or
    OSError.
    """
    return ownership.open_file(path_of(name), os.O_RDWR if writable else os.O_RDONLY, owner=owner)
