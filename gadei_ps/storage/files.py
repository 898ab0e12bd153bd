"""Files of tensors and text: hashed on their way to the disk, verified on their way back.

Safetensors files are read and written here and not by their library, because each block is to be
hashed between the memory and the disk, and because the library maps what it reads: then an error of
the disk kills the process. Little-endian machines only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from gadei_ps.errors import MOST_SHOWN, CheckpointError, CheckpointMistake, is_lasting
from gadei_ps.machine import user_files
from gadei_ps.memory.weights import NAME_OF
from gadei_ps.show.counts import counted

_BLOCK: Final = 4 << 20  # bytes hashed and written at once
_PIECE: Final = 64 << 20  # bytes between two looks at how far the disk is
MOST_TEXT: Final = 100 << 20  # bytes of a manifest or a header; the library's own limit
_RESERVED: Final = "__metadata__"
ANOTHER: Final = "use another checkpoint"
# These say something of this process, and not of the file.
_NOT_THE_FILES: Final = frozenset(
    (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
)
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_EXCHANGE = "renameat2"
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2

Tensors = Mapping[str, tuple[tuple[int, ...], np.ndarray]]
"""Tensors by name: shape, and the values, (count,) and contiguous."""


# -- writing --------------------------------------------------------------------------------------


def safetensors(tensors: Tensors, metadata: dict[str, str] | None = None) -> Iterator[memoryview]:
    """The blocks of a safetensors file: length of the header, header, values.

    Raises ValueError for a name that the format cannot hold.
    """
    header: dict[str, object] = {_RESERVED: metadata} if metadata else {}
    at = 0
    for name, (shape, values) in tensors.items():
        if name == _RESERVED:
            raise ValueError(f"a safetensors file cannot hold a tensor named {name!r}")
        header[name] = {
            "dtype": NAME_OF[values.dtype],
            "shape": [int(size) for size in shape],
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin aligned
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, values in tensors.values():
        if values.nbytes:  # an empty view cannot be cast
            view = values.data.cast("B")
            for begin in range(0, len(view), _BLOCK):
                yield view[begin : begin + _BLOCK]


def write(
    path: Path, blocks: Iterable[memoryview | bytes], on_disk: Callable[[], object] | None = None
) -> tuple[str, int]:
    """Write a new file to the disk. Returns its SHA-256 and its bytes.

    on_disk: called for each piece of _PIECE bytes that is on the disk, and not only in memory.
    """
    digest = hashlib.sha256()
    pending = 0
    with open(path, "xb") as file:
        for block in blocks:
            digest.update(block)
            file.write(block)
            pending += len(block)
            if on_disk is not None and pending >= _PIECE:
                file.flush()
                os.fdatasync(file.fileno())
                on_disk()
                pending = 0
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), size


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once the block is through: whole, or not at all.

    It is on the disk then. mode: what the umask leaves of it, from the first byte on. Raises
    OSError.
    """
    made = path.with_name(f".{secrets.token_hex(6)}.tmp")
    try:
        with open(made, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_directory(made: Path, path: Path) -> None:
    """Give the directory `made`, whose files are on the disk, the name `path`; there to stay.

    A directory that has this name gets the name `made` by the same call: at every moment one of the
    two is there, whole. Where the file system cannot exchange names, that one is renamed before.
    Raises OSError, after which both have the names that they had.
    """
    sync(made)
    replaces = path.exists()
    if replaces:
        _swap(made, path)
    else:
        made.rename(path)
    try:
        sync(path.parent)
    except OSError:
        if replaces:
            _swap(made, path)
        else:
            path.rename(made)
        raise


def _swap(one: Path, other: Path) -> None:
    """Swap the names of two directories."""
    try:
        _exchange(one, other)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        aside = one.with_name(f"{one.name}.old")
        other.rename(aside)
        try:
            one.rename(other)
        except OSError:
            aside.rename(other)
            raise
        aside.rename(one)


def _exchange(one: Path, other: Path) -> None:
    call = getattr(_LIBC, _EXCHANGE, None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def make_directory(path: Path) -> None:
    """Make a directory and its parents, there to stay. Raises OSError."""
    path = path.absolute()
    for one in reversed((path, *path.parents[:-1])):
        made = not one.exists()
        if made:
            one.mkdir(exist_ok=True)
        # Even if it exists: the process that made it may have died before it was synced.
        try:
            sync(one.parent)
        except OSError:
            if made:
                raise


def sync(directory: Path) -> None:
    """Make changes of the directory's entries survive a power failure."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that knows no such thing
            raise
    finally:
        os.close(fd)


# -- reading --------------------------------------------------------------------------------------


class File:
    """A file read from its begin to its end, and hashed meanwhile. `left`: bytes not read yet.

    Raises ValueError where the file does not hold what is asked for.
    """

    def __init__(self, raw: io.FileIO) -> None:
        self.left = os.fstat(raw.fileno()).st_size
        self._raw = raw
        self._digest = hashlib.sha256()

    def fill(self, view: memoryview) -> None:
        """The next len(view) bytes."""
        while view:
            count = self._raw.readinto(view[:_BLOCK])
            if not count:
                raise ValueError("it ends too early")
            self._digest.update(view[:count])
            self.left -= count
            view = view[count:]

    def read_text(self, size: int) -> bytes:
        """The next bytes, for text."""
        self.need(size)
        if size > MOST_TEXT:
            raise ValueError(f"{size} bytes of text are too many")
        text = bytearray(size)
        self.fill(memoryview(text))
        return bytes(text)

    def need(self, size: int) -> None:
        """Check that so many bytes are left, before memory for them is taken."""
        if size > self.left:
            raise ValueError(f"it has {counted(self.left, 'byte')} where {size} are needed")

    def digest(self) -> str:
        """SHA-256 of the whole file, of the size that it had when it was opened."""
        block = memoryview(bytearray(min(_BLOCK, self.left)))
        while self.left and (count := self._raw.readinto(block[: self.left])):
            self._digest.update(block[:count])
            self.left -= count
        return self._digest.hexdigest()

    def fill_tensors(self, wanted: Tensors) -> None:
        """Read a safetensors file that holds these tensors, in any order, and no others."""
        header = parse_object(self.read_text(int.from_bytes(self.read_text(8), "little")))
        header.pop(_RESERVED, None)
        for name in wanted:
            if name not in header:
                raise ValueError(f"tensor {name!r} is missing")
        order = []
        for name, entry in header.items():
            if name not in wanted:
                raise ValueError(f"tensor {name!r} is not one of the checkpoint's")
            if not isinstance(entry, dict):
                raise ValueError(f"tensor {name!r} is not described")
            shape, values = wanted[name]
            for field, value in (("dtype", NAME_OF[values.dtype]), ("shape", list(shape))):
                if entry.get(field) != value:
                    raise ValueError(
                        f"tensor {name!r} has {field} {entry.get(field)!r}, not {value!r}"
                    )
            offsets = entry.get("data_offsets")
            if not isinstance(offsets, list) or [type(at) for at in offsets] != [int, int]:
                raise ValueError(f"tensor {name!r} has data_offsets {offsets!r}")
            order.append((offsets, name))
        at = 0
        for offsets, name in sorted(order):
            values = wanted[name][1]
            if offsets != [at, at + values.nbytes]:
                raise ValueError(f"tensor {name!r} has data_offsets {offsets!r}, not {at} and up")
            at += values.nbytes
            if values.nbytes:
                self.fill(values.data.cast("B"))
        if self.left:
            raise ValueError(f"it has {counted(self.left, 'byte')} behind the last tensor")


def parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


@contextlib.contextmanager
def opened(path: Path, most: int) -> Iterator[File]:
    """Open a regular file of at most `most` bytes.

    Raises CheckpointError if it is not one, or cannot be read.
    """
    try:
        with io.FileIO(user_files.descriptor(path), "rb") as raw:
            file = File(raw)
            if file.left > most:
                raise damaged(path, f"it has {file.left:,} bytes, and {most:,} at most are read")
            yield file
    except OSError as error:
        what = "missing" if error.errno == errno.ENOENT else f"cannot be read ({reason(error)})"
        forbidden = error.errno in (errno.EACCES, errno.EPERM)
        remedy = "make it readable for the job's user" if forbidden else ANOTHER
        failed = failure(path, what, remedy, error)
        failed.may_be_whole = error.errno in _NOT_THE_FILES
        raise failed from None


@contextlib.contextmanager
def verified(path: Path, digest: str | None, most: int) -> Iterator[File]:
    """A regular file of at most `most` bytes whose SHA-256 must be `digest`; else CheckpointError.

    A ValueError of its reader is reported only if the file is the one that was written: in a
    damaged one, anything may seem to be wrong.
    """
    with opened(path, most) as file:
        wrong = None
        try:
            yield file
        except ValueError as error:
            wrong = error
        if file.digest() != digest:
            raise damaged(path, "its SHA-256 is not the one in SHA256SUMS")
        if wrong is not None:
            raise failure(path, str(wrong), ANOTHER)


# -- messages -------------------------------------------------------------------------------------


def reason(error: OSError) -> str:
    """Return the system's message for an error."""
    return error.strerror or str(error) or type(error).__name__


def unwritten(path: Path, what: str, error: OSError) -> CheckpointError:
    """Return an error with the reason why something could not be written, and advice."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space or name another place"
    elif error.errno == errno.EFBIG:
        remedy = "raise the limit of file sizes (ulimit -f)"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the limit of open files (ulimit -n)"
    elif error.errno == errno.EROFS:
        remedy = "make it writable (of a unit: ReadWritePaths= in a drop-in) or name another place"
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = "make it writable or name another place"
    else:
        remedy = "name another place"
    return failure(path, f"{what} ({reason(error)})", remedy, error)


def damaged(path: Path, what: str) -> CheckpointError:
    """A file that is not what was written."""
    return failure(path, f"damaged ({what})", ANOTHER)


def failure(path: Path, what: str, remedy: str, error: OSError | None = None) -> CheckpointError:
    """One line, whatever stands in it. CheckpointMistake, unless the error may pass by itself."""
    kind = CheckpointMistake if error is None or is_lasting(error) else CheckpointError
    what = what if len(what) <= MOST_SHOWN else what[:MOST_SHOWN] + "..."
    return kind(" ".join(f"{path}: {what}; {remedy}".split()))
