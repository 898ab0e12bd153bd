"""Files that users name. Only regular files: a reader of others may wait or read for ever."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from gadei_ps.machine import ownership


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """The file, open for reading; a link to one will do, and a name such as /dev/zero will not.

    Raises OSError as descriptor().
    """
    return os.fdopen(descriptor(path), "rb")


def descriptor(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading. Raises OSError, with EINVAL and the reason for others."""
    # Examined before it is opened: opening a device may start something, such as a hardware timer.
    there = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(there).st_mode)
        if kind != stat.S_IFREG:
            what = ownership.NOT_REGULAR.get(kind, "it is not a regular file")
            raise OSError(errno.EINVAL, f"{what}; name a regular file", str(path))
        return os.open(f"/proc/self/fd/{there}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(there)


def read(path: str | os.PathLike[str], most: int) -> bytes:
    """The whole file, of at most `most` bytes. Raises OSError as open_file(), and EFBIG if it is
    larger."""
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def read_all(path: str | os.PathLike[str]) -> bytes:
    """Read a file of any size, or a pipe, to its end. Raises OSError as open_file(); for devices
    too: one such as /dev/zero never ends."""
    with open(path, "rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a device; name a regular file", str(path))
        return file.read()
