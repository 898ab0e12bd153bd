"""Compiled functions that only tests call from Python; kept beside the server's code."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from typing import Any

# In a process of its own, because Numba is not to optimize there (see code.set_up).
UNITS = """
from gadei_ps.server import code, units
code.set_up()
units.load()
"""


@functools.cache
def keep() -> None:
    """Let Numba keep what tests call from Python, for this process and its forks."""
    import numba

    from gadei_ps.kernels import cache, cpu
    from gadei_ps.server import ledger, recover, shard, statistics

    kernels = [one for _, one in inspect.getmembers(cpu) if hasattr(one, "enable_caching")]
    called = [
        *(ledger.held, ledger.settle, ledger.requeue, ledger.requeue_all, ledger.take_back),
        *(ledger.close_epochs, ledger.assign, statistics.staleness_bin),
        *(recover.can_recover, recover.recover, shard.serve),
    ]
    folder = cache.directory() / "called"
    folder.mkdir(mode=0o700, exist_ok=True)
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        for one in (*kernels, *called):
            one.enable_caching()
    finally:
        numba.config.CACHE_DIR = before


def of_part() -> Any:
    """Return the types of a call with a part, by which Numba finds its code in the cache."""
    from numba import from_dtype, types

    from gadei_ps.server.structs import PART

    return (types.Array(from_dtype(PART), 1, "C"),)


def compile_all() -> None:
    """Compile the server's code as servers do, and beside it what takes long of the rest."""
    with subprocess.Popen([sys.executable, "-P", "-c", UNITS]) as units:
        from gadei_ps.server import recover, shard

        keep()
        for one in (recover.can_recover, recover.recover, shard.serve):
            one.compile(of_part())  # type: ignore[attr-defined]
    if units.returncode:
        raise SystemExit("the server's code cannot be compiled")


if __name__ == "__main__":
    compile_all()
