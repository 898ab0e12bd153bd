"""A process that compiles units of a server's code into the store, and ends.

    python -m gadei_ps.server.compiler PROCESSES NAME...

It imports Numba once and forks. The processes take the units in turn, and die with the server. Of
several compilers with one store, one is at work. The others wait, and find its units there.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import sys
from collections.abc import Sequence

from gadei_ps.kernels import cache
from gadei_ps.kernels.loaded import Unit
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.machine import process
from gadei_ps.server import units

LOCK = "compiling.lock"  # a file beside the code


def main() -> None:
    """Compile those of the units that are missing when no other compiler is at work."""
    process.forbid_core_dump()
    process.end_first()  # the server can do without it
    known = {unit.name: unit for unit in units.units(Kind)}
    _lock()
    os.dup2(2, 1)  # closes a pipe: the server sees that the wait is over
    asked = [known[name] for name in sys.argv[2:]]
    _compile([unit for unit in asked if not unit.is_kept()], int(sys.argv[1]))
    os._exit(0)


def _lock() -> None:
    """Lock the store for this process and its forks, until they have ended."""
    with contextlib.suppress(OSError):  # a file system without locks: each compiles all
        file = os.open(cache.directory() / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)


def _compile(missing: Sequence[Unit], processes: int) -> None:
    """Compile the units by so many processes, as long as code can be kept."""
    turns, numbers = os.pipe()
    os.write(numbers, bytes(range(len(missing))))
    os.close(numbers)
    for module in {unit.module for unit in missing}:
        importlib.import_module(module)  # with Numba, before the forks
    parent = os.getpid()
    for _ in range(min(processes, len(missing)) - 1):
        try:
            fork = os.fork()
        except OSError:  # no process or memory is free: those that are there compile all
            break
        if not fork:
            process.die_with_parent(parent)
            break
    while not cache.has_failed() and (number := os.read(turns, 1)):
        missing[number[0]].compile()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main()
