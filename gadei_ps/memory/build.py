"""The build of gadei-ps that a process runs.

Processes of different builds do not share a job's memory: one could misread what the other wrote.
The control segment holds the identities of the build that made the job.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from gadei_ps import _native

REFUSED = 3
"""Exit code of a server that another build's job has been given to."""

_PACKAGE = Path(__file__).parents[1]
# The rooms whose code a server runs; a test compares them with what it imports. errors.py and
# homes.py are left out: texts of errors and names of directories do not touch a job's records.
_ROOMS = ("job", "kernels", "machine", "memory", "server", "sync")


def _sources() -> Iterator[Path]:
    for room in _ROOMS:  # os.walk passes over a folder that an upgrade removes, rglob raises
        folders = os.walk(_PACKAGE / room)
        paths = (Path(folder, name) for folder, _, names in folders for name in names)
        yield from sorted(path for path in paths if path.suffix == ".py")


@functools.cache
def of_server() -> int:
    """Identity of all that a server runs: the C sources and the Python sources of its rooms."""
    digest = hashlib.sha256(_native.BUILD.to_bytes(8, "little"))
    for path in _sources():
        text = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE)} {len(text)}\n".encode() + text)
    return int.from_bytes(digest.digest()[:8], "little")


def files() -> frozenset[tuple[str, int, int]]:
    """Name, size and time of change of each file of the build as it lies on the disk now."""
    found = []
    for path in (*_sources(), Path(_native.__file__ or "")):
        try:
            status = path.stat()
        except OSError:  # an upgrade is removing files
            continue
        found.append((str(path), status.st_size, status.st_mtime_ns))
    return frozenset(found)


def difference(theirs: int, ours: int) -> str:
    """Describe the difference between the C sources of a job and of this program."""
    return f"made by build {theirs:016x} of gadei-ps, this program is build {ours:016x}"


def server_difference(theirs: int) -> str | None:
    """Describe the difference between the servers of a job and of this program.

    None if they are the same.
    """
    if theirs == of_server():
        return None
    return (
        f"made for servers of build {theirs:016x} of gadei-ps, "
        f"those of this program are build {of_server():016x}"
    )
