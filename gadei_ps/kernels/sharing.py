"""Units of compiled code, divided among all processes that want them at the same time.

Who compiles a unit locks it meanwhile. The kernel frees the locks of a process that dies, so the
next one compiles what that one had begun. In the end each process has loaded all of its units from
the cache, whoever has compiled them; what nobody could keep there it compiles itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator

from gadei_ps.kernels import cache
from gadei_ps.kernels.unit import Unit

LATE_S = 60.0  # a unit that another process has for so long is compiled here, too
POLL_S = 0.01
LOCKS = "compiling.locks"  # a file beside the code; a unit's lock is one of its bytes


def load(units: Iterable[Unit]) -> None:
    """Load all of the units, and compile those that no process has compiled or is compiling.

    Another process that hangs while it has a unit is awaited for LATE_S once.
    """
    left = list(units)
    late = time.monotonic() + LATE_S
    with _locks() as file:
        while left:
            for unit in list(left):
                if not _is_free(file, unit) and time.monotonic() < late:
                    continue
                before = time.monotonic()
                unit.load()
                late += time.monotonic() - before  # others could not be late meanwhile
                _unlock(file, unit)
                left.remove(unit)
            if left:
                time.sleep(POLL_S)


def compile_free(units: Iterable[Unit], stop: Callable[[], bool]) -> None:
    """Compile those of the units that nobody has compiled or is compiling; awaits nobody.

    stop: whether the rest is not to be compiled. Without locks this compiles nothing.
    """
    with _locks() as file:
        for unit in units:
            if file < 0 or stop():
                return
            if not _is_free(file, unit):
                continue
            if not unit.is_kept():
                unit.load()
            _unlock(file, unit)


@contextlib.contextmanager
def _locks() -> Iterator[int]:
    """Open the file of locks, or yield -1: then each process compiles for itself."""
    try:
        file = os.open(cache.directory() / LOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield -1
        return
    try:
        yield -1 if _lacks_locks(file) else file
    finally:
        os.close(file)


def _lacks_locks(file: int) -> bool:
    """Return whether this file system has no locks, as NFS without its lock daemon."""
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 0)
    except OSError:
        return True
    return False


def _is_free(file: int, unit: Unit) -> bool:
    """Lock the unit, and return whether no other process has locked it."""
    if file < 0:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte(unit))
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _unlock(file: int, unit: Unit) -> None:
    if file >= 0:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, _byte(unit))


def _byte(unit: Unit) -> int:
    return 1 + zlib.crc32(unit.name.encode())
