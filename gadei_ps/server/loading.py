"""A server's kernels: from the cache, or compiled once for an installation.

What is missing is compiled by a child (compiler.py), whose memory is free when it ends. It dies
with the server. It may fail or hang: what is missing in the end, the server compiles.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from gadei_ps.kernels import cache
from gadei_ps.machine import log, process
from gadei_ps.memory import reserve
from gadei_ps.server.units import Unit

MOST_PROCESSES = 3  # that compile, each on a core of its own
PROCESS_BYTES = 448 << 20  # memory of each
FORKING_BYTES = 96 << 20  # memory of the process that forks them
LATE_S = 60.0  # a compiler that has made no progress for so long is killed
LOOK_S = 1.0  # between two looks at its progress


def load(units: Sequence[Unit], logs: bool) -> None:
    """Load or compile the code that a server needs.

    `logs`: whether this server logs that it compiles; one of the two does.
    """
    begin = time.monotonic()
    missing = [unit for unit in units if not unit.is_kept()]
    if logs and missing:
        kept_in = str(cache.home())
        log.get().warning("compiling the kernels once, for up to half a minute", kept_in=kept_in)
    fitting = (reserve.for_processes() - FORKING_BYTES) // PROCESS_BYTES
    processes = min(MOST_PROCESSES, process.cores(), fitting)
    if missing and processes > 0:
        _have_compiled(missing, processes)
    load_all(units)
    seconds = round(time.monotonic() - begin, 2)
    log.get().debug("kernels loaded", seconds=seconds, compiled=len(missing))


def load_all(units: Sequence[Unit]) -> None:
    """Load units, and free the memory that only loading needs."""
    for unit in units:
        unit.load()
    if units:
        from gadei_ps.kernels import engine

        engine.give_back()


def _have_compiled(missing: Sequence[Unit], processes: int) -> None:
    """Have units compiled by a child, as far as it gets. Raises OSError after an upgrade."""
    cache.check_sources()  # the compiler would be the new one
    names = [unit.name for unit in missing]
    command = process.module_command("gadei_ps.server.compiler", str(processes), *names)
    try:
        child = process.spawn(command, stderr=subprocess.DEVNULL)
    except OSError:
        return
    try:
        _wait(child, missing)
    finally:
        code = process.end_group(child)
    if code:
        how = process.signal_name(-code) if code < 0 else f"exit code {code}"
        log.get().debug("the process that compiles has failed", how=how)


def _wait(child: subprocess.Popen[bytes], missing: Sequence[Unit]) -> None:
    """Wait until the child ends, or neither it nor another job's compiler makes progress."""
    before, since = (0.0, 0), time.monotonic()
    while True:
        try:
            child.wait(LOOK_S)
            return
        except subprocess.TimeoutExpired:
            done = process.tree_cpu_s(child.pid), sum(unit.is_kept() for unit in missing)
        if done != before:
            before, since = done, time.monotonic()
        elif time.monotonic() - since > LATE_S:
            return
