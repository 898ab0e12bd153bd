"""A process that compiles units of a server's code into the cache, and ends.

    python -m gadei_ps.server.compiler PROCESSES NAME...

It imports Numba once and forks. The forks take the units in turn, and die with the server. Of
several compilers with one cache, one is at work. The others wait, and find its units there.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from gadei_ps.kernels import cache
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.machine import process
from gadei_ps.server import units
from gadei_ps.server.units import Unit

LOCK = "compiling.lock"  # a file beside the code
LOCK_S = 100  # a compiler that still waits for another job's then ends, and its server compiles


def main() -> None:
    """Compile those of the units that are missing when no other compiler is at work."""
    process.forbid_core_dump()
    process.end_first()  # the server can do without it
    known = {unit.name: unit for unit in units.units(Kind)}
    _lock()
    asked = [known[name] for name in sys.argv[2:]]
    _compile([unit for unit in asked if not unit.is_kept()], int(sys.argv[1]))


def _lock() -> None:
    """Lock the cache for this process and its forks, until they have ended."""
    with contextlib.suppress(OSError):  # a file system without locks: each compiles all
        file = os.open(cache.directory() / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        signal.alarm(LOCK_S)  # kills
        fcntl.flock(file, fcntl.LOCK_EX)
    signal.alarm(0)


def _compile(missing: Sequence[Unit], processes: int) -> None:
    """Compile the units by up to so many forks, as long as code can be kept. Raises OSError."""
    for module in {unit.module for unit in missing}:
        importlib.import_module(module)  # with Numba, before the forks
    fork, me = multiprocessing.get_context("fork"), os.getpid()
    forks = max(1, min(processes, len(missing)))
    with ProcessPoolExecutor(forks, fork, process.die_with_parent, (me,)) as pool:
        try:
            kept = pool.map(_keep, missing)  # starts all forks
        except (OSError, RuntimeError):  # no process, thread or memory is free: this one compiles
            for one in multiprocessing.active_children():
                one.kill()  # the pool gives it no work, and this process would wait for its end
            kept = map(_keep, missing)
        list(kept)


def _keep(unit: Unit) -> None:
    cache.keep(unit.name, unit.compile())


if __name__ == "__main__":
    main()
