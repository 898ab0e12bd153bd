"""Reads the lines that a job's watchdog adds to its history, as they come."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gadei_ps.machine.ownership import SAFELY
from gadei_ps.show.strict_json import is_number
from gadei_ps.storage import history_file

PART_BYTES: Final = 4 << 20  # read at once
NAME_CHARACTERS: Final = 200  # of a value; a file of another user may hold anything
MOST_SCALARS: Final = 256  # of a line


class Follower:
    """The history of one job, from its first line on.

    The file is replaced when it is thinned out, and when a job of that name begins from zero.
    """

    def __init__(self, path: Path | None, owner: int | None = None) -> None:
        """path: None if the job keeps no history. owner: whose file it must be; None: any."""
        self._path = path
        self._owner = owner
        self._file = (0, 0)
        """Device and inode."""
        self._at = 0
        self._after = float("-inf")
        """Lines of another file count if they are later than this (s since 1970)."""
        self._last = float("-inf")

    def read(self) -> list[dict[str, Any]]:
        """Return the lines since the last call, PART_BYTES at most; none if there is no file."""
        try:
            fd = os.open(self._path or "", os.O_RDONLY | SAFELY)
        except (OSError, ValueError):  # the latter: a path that no file can have
            return []
        try:
            status = os.fstat(fd)
            is_owned = self._owner in (None, status.st_uid)
            if not stat.S_ISREG(status.st_mode) or not is_owned:
                return []
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._at:
                self._file, self._at = (status.st_dev, status.st_ino), 0
                self._after = self._last
            raw = os.pread(fd, PART_BYTES, self._at)
        except OSError:
            return []
        finally:
            os.close(fd)
        whole = raw[: raw.rfind(b"\n") + 1]
        if not whole and len(raw) == PART_BYTES:  # no line of a history is so long
            whole = raw
        self._at += len(whole)
        found = [one for one in history_file.parsed(whole) if one["time"] > self._after]
        self._last = max([self._last, *(one["time"] for one in found)])
        return found


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that a line has of measurements and reports, by name."""
    found: dict[str, float] = {}
    for name in ("measured", "reported"):
        if isinstance(values := line.get(name), dict):
            found |= {
                key: float(value)
                for key, value in values.items()
                if is_number(value)
                if key.isprintable() and len(key) <= NAME_CHARACTERS
            }
    return dict(list(found.items())[:MOST_SCALARS])
