"""Memory limits of control groups, as containers and services have them: cgroup v2 and v1.

A process is in one group of each hierarchy, and the limits of all groups above it hold, too. The
memory of a segment is charged to the groups of the process that touches a page first. Beyond a
limit the kernel kills a process of the group, so a job looks here before it takes memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 62  # v1 writes a number near 2**63 for no limit


@dataclass(frozen=True)
class Limit:
    """A limit and what it leaves. file: where the limit stands. In bytes."""

    file: Path
    limit: int
    free: int


@dataclass(frozen=True)
class _Names:
    """Files of a group.

    cached: names in memory.stat of pages of files, without those of tmpfs, that the kernel drops
    before it kills.
    kills, hits: file and name of what counts killed processes, and allocations beyond the limit.
    """

    limits: tuple[str, ...]
    used: str
    cached: tuple[str, ...]
    kills: tuple[str, str]
    hits: tuple[str, str]


# Above memory.high the kernel slows the group down until it stands nearly still.
V2 = _Names(
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
    ("memory.events", "oom_kill"),
    ("memory.events", "oom"),
)
V1 = _Names(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    ("memory.oom_control", "oom_kill"),
    ("memory.failcnt", ""),
)


def tightest(root: Path = Path("/")) -> Limit | None:
    """The limit that leaves this process the least; None if there is none that can be seen.

    root: the directory below which /proc and the mounted hierarchies are looked for.
    """
    limits = [
        limit
        for group, names in _groups(root)
        for name in names.limits
        if (limit := _limit(group, name, names)) is not None
    ]
    return min(limits, key=lambda limit: limit.free, default=None)


class Kills:
    """Detector of processes of this process' groups that the kernel killed for want of memory."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._seen = self._look()

    def _look(self) -> dict[tuple[Path, _Names], tuple[int, int]]:
        return {
            (group, names): (_count(group, *names.kills), _count(group, *names.hits))
            for group, names in _groups(self._root)
        }

    def describe(self) -> str:
        """Describe the kill since the last call; empty if there was none."""
        before, self._seen = self._seen, self._look()
        rises = {
            key: (kills - before.get(key, (0, 0))[0], hits - before.get(key, (0, 0))[1])
            for key, (kills, hits) in self._seen.items()
        }
        if not any(kills > 0 for kills, _ in rises.values()):
            return ""
        reached = [
            limit
            for (group, names), (_, hits) in rises.items()
            if hits > 0 and (limit := _limit(group, names.limits[0], names)) is not None
        ]
        if not reached:
            return "the kernel killed it because no memory was left"
        least = min(reached, key=lambda limit: limit.limit)
        return (
            f"the kernel killed it because the memory limit {least.file} of "
            f"{least.limit / 2**20:.1f} MiB was reached: raise it (docker run --memory=..., "
            "MemoryMax= of systemd)"
        )


def _count(group: Path, file: str, name: str) -> int:
    """A number in a file of a group: that of the line `name`, or the only one; 0 without it."""
    try:
        lines = [line.split() for line in (group / file).read_text().splitlines()]
        return next(int(words[-1]) for words in lines if words[:-1] == ([name] if name else []))
    except (OSError, ValueError, StopIteration, IndexError):
        return 0


def _limit(group: Path, name: str, names: _Names) -> Limit | None:
    try:
        limit = int((group / name).read_text())  # "max" is not a number
        used = int((group / names.used).read_text())
    except (OSError, ValueError):
        return None
    if limit >= UNLIMITED:
        return None
    cached = sum(_count(group, "memory.stat", one) for one in names.cached)
    return Limit(group / name, limit, max(0, limit - used + cached))


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Return this process' groups that memory may be charged to, and all above them."""
    try:
        memberships = _lines(root / "proc/self/cgroup")
        mounts = _lines(root / "proc/self/mountinfo")
    except OSError:
        return
    for line in memberships:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            names, kind, option = V2, "cgroup2", ""
        elif "memory" in controllers.split(","):
            names, kind, option = V1, "cgroup", "memory"
        else:
            continue
        for top, mounted_at in _mounted(mounts, kind, option):
            for group in _upwards(root / mounted_at.lstrip("/"), top, path):
                yield group, names


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; names may be any bytes, as every user may mount with FUSE."""
    return [line for line in os.fsdecode(file.read_bytes()).split("\n") if line]


def _mounted(mounts: list[str], kind: str, option: str) -> Iterator[tuple[str, str]]:
    """Yield the root group and the mount point of each such mount (proc(5))."""
    for line in mounts:
        left, _, right = line.partition(" - ")
        fields, of = left.split(), right.split()
        if len(fields) < 5 or len(of) < 3 or of[0] != kind:
            continue
        if not option or option in of[2].split(","):
            yield _plain(fields[3]), _plain(fields[4])


def _plain(path: str) -> str:
    """The kernel writes blanks and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _upwards(mount: Path, top: str, path: str) -> Iterator[Path]:
    """The group and those above it, up to the mount's root, which is the group `top`."""
    try:
        inner = PurePosixPath(path).relative_to(top)
    except ValueError:
        inner = PurePosixPath()  # a container's view: only the root of its mount can be seen
    if ".." in inner.parts:
        inner = PurePosixPath()
    group = mount / inner
    while group != mount:
        yield group
        group = group.parent
    yield mount
