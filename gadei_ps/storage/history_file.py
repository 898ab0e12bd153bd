"""A job's history: a file of JSON lines, bounded, that is whole after each line.

A line is an object with `time` (seconds since 1970) and `version`. A *point* says how training
goes; a line with one of EVENTS is an *event*. When there are too many points, they are
thinned out: those that stay are equally far apart in time. Imports little, for the process that
writes it (watchdog/history_writer.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from gadei_ps.show.strict_json import is_number

MOST: Final = 4000  # points in a file; thinned out, there is half of that
MOST_EVENTS: Final = 1000
MOST_BYTES: Final = 64 << 20  # of a file that is read: far more than any history has
LINE_BYTES: Final = 4000  # of a longest line: less than a pipe takes at once
EVENTS: Final = ("set", "measured", "command", "ended", "event")
OLD: Final = ".old"  # the file of the job of that name before
OWN: Final = re.compile(rf"\.?([A-Za-z0-9][\w-]*\.)?history({re.escape(OLD)})?\.jsonl(\.tmp)?")


def old(path: Path) -> Path:
    """The history of the job before, which had the same name."""
    return path.with_name(path.stem + OLD + path.suffix)


def is_own(name: str) -> bool:
    """Return whether a file of that name is a history, or one in the making."""
    return OWN.fullmatch(name) is not None


def job_of(path: Path) -> str:
    """Name of the job of a history in the state directory, or beside checkpoints there."""
    name = path.name.removesuffix(".jsonl").removesuffix(OLD).removesuffix("history")
    return name.removesuffix(".") or path.parent.name


def parsed(raw: bytes) -> list[dict[str, Any]]:
    """Parse the lines of a file in their order. Invalid lines are left out."""
    found = []
    for line in raw.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            one = json.loads(line, parse_int=_whole)
            if isinstance(one, dict) and is_number(time := one.get("time")) and 0 <= time < 1 << 53:
                found.append(one)
    return found


def _whole(text: str) -> int:
    """A number that a float can hold. Raises ValueError for a larger one."""
    number = int(text)
    if abs(number) >= 1 << 64:
        raise ValueError(f"{text[:40]} is too large")
    return number


def thinned(lines: Iterable[dict[str, Any]], most: int = MOST) -> list[dict[str, Any]]:
    """Select at most `most` // 2 + 1 points, equally far apart in time, and the newest events.

    Events of processes and checkpoints, which may be many, do not displace the others.
    """
    rows = list(lines)
    events = [one for one in rows if not _is_point(one) and "event" not in one][-MOST_EVENTS:]
    events += [one for one in rows if "event" in one][-MOST_EVENTS // 2 :]
    points = [one for one in rows if _is_point(one)]
    if len(points) > most // 2:
        times = [float(one["time"]) for one in points]
        apart = (max(times) - min(times)) / (most // 2)
        kept, last = [], float("-inf")
        for one, time in zip(points, times, strict=True):
            if not last <= time < last + apart:
                kept.append(one)
                last = time
        points = kept[-(most // 2) - 1 :]  # clocks may have been set back
    wanted = {id(one) for one in (*events, *points)}
    return [one for one in rows if id(one) in wanted]


def _is_point(line: dict[str, Any]) -> bool:
    return not any(name in line for name in EVENTS)


def line(values: dict[str, Any]) -> bytes:
    """Format a line for the file. Raises ValueError if it is too long or not valid JSON."""
    raw = json.dumps(values, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    if len(raw) > LINE_BYTES:
        raise ValueError(f"a line of {len(raw)} bytes")
    return raw


class HistoryFile:
    """The file of one job, open for one writer. Every method may raise OSError."""

    def __init__(self, path: Path, *, fresh: bool = False, most: int = MOST) -> None:
        """fresh: of a job that begins from zero; the file that is there becomes the old one."""
        self._path = path
        self._most = most
        self._fd = -1
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if fresh:
            with contextlib.suppress(FileNotFoundError):
                path.rename(old(path))
        self._open()

    def _open(self) -> None:
        """Wait until no other process writes it: the watchdog's before, for an instant."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            self.close()
            self._fd = os.open(self._path, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), self._path.stat()):
                    break
        try:
            raw = self._read()
        except OSError:
            self.close()
            raise
        self._lines = raw.count(b"\n")
        if raw and not raw.endswith(b"\n"):  # a machine that failed has cut it off
            self._write(b"\n")

    def _read(self) -> bytes:
        """The whole file, which has MOST_BYTES at most. Raises OSError for anything else."""
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            raise OSError(errno.EINVAL, "it is not a history", str(self._path))
        return os.pread(self._fd, status.st_size, 0)

    def append(self, raw: bytes) -> None:
        """One line. If it cannot be written whole, the file stays as it was."""
        if self._lines >= self._most + MOST_EVENTS:
            self._thin()
        self._write(raw)
        self._lines += 1

    def _write(self, raw: bytes) -> None:
        size = os.fstat(self._fd).st_size
        try:
            while raw:  # after a part of it, what has cut it off is raised
                raw = raw[os.write(self._fd, raw) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise

    def _thin(self) -> None:
        kept = thinned(parsed(self._read()), self._most)
        made = self._path.with_name(f".{self._path.name}.tmp")
        made.unlink(missing_ok=True)
        try:
            with open(made, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(b"".join(map(line, kept)))
            made.rename(self._path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        self._open()

    def close(self) -> None:
        """Release the file; other processes may then write it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
