"""Files of machine code, one for each unit: an object file of all that the unit runs.

A file is on the disk before it gets its name. Its checksum is compared before anything else looks
at it: what is damaged, of another format, or of another directory or name is not there. What cannot
be written is used without being kept.

    checksum, then: the entry and the symbols that the code needs, a line; the object file
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from gadei_ps.kernels import cache

FORMAT = b"gadei-ps code 1"
ENDING = ".code"
HALF = ".new"
OLD_S = 600.0


class Code(NamedTuple):
    """The code of a unit."""

    entry: str
    """Name of its C function, the only one that others may see."""
    needs: tuple[str, ...]
    """Names of the functions of other libraries that it calls."""
    object: bytes
    """ELF."""


def _path(name: str) -> Path:
    return cache.directory() / f"{name}{ENDING}"


def _checksum(path: Path, body: bytes) -> bytes:
    """Return a checksum for this file alone: it rejects a copy in another version's directory."""
    where = f"{path.parent.name}/{path.name}\n".encode()
    return hashlib.sha256(FORMAT + where + body).digest()


def read(name: str) -> Code | None:
    """Return the code of a unit; None if there is no file, or no whole one."""
    try:
        path = _path(name)
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        cache.note(error)
        return None
    size = hashlib.sha256().digest_size
    body = data[size:]
    if data[:size] != _checksum(path, body):
        return None
    line, _, made = body.partition(b"\n")
    entry, *needs = line.decode().split(" ")
    return Code(entry, tuple(needs), made)


def is_kept(name: str) -> bool:
    """Return whether there is a whole file of the unit. Quick: it has some tens of kilobytes."""
    return read(name) is not None


def _remove_old(path: Path) -> None:
    """Remove the unfinished files of processes that were killed."""
    for half in path.parent.glob(f"{path.stem}.*{HALF}"):
        with contextlib.suppress(OSError):
            if time.time() - half.stat().st_mtime > OLD_S:
                half.unlink()


def keep(name: str, code: Code) -> None:
    """Write the file of a unit; report an error to cache.note()."""
    body = " ".join((code.entry, *code.needs)).encode() + b"\n" + code.object
    try:
        path = _path(name)
        _remove_old(path)
        fd, made = tempfile.mkstemp(prefix=f"{name}.", suffix=HALF, dir=path.parent)
        try:
            with open(fd, "wb") as file:
                file.write(_checksum(path, body) + body)
                file.flush()
                os.fsync(fd)  # before it gets its name
            Path(made).rename(path)
        except OSError:
            Path(made).unlink(missing_ok=True)
            raise
    except OSError as error:
        cache.note(error)
