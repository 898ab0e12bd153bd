"""A server's kernels: from the store, or compiled once for an installation.

What is missing is compiled by a child (compiler.py), whose memory is free when it ends. It dies
with the server. It may fail or hang: what is missing in the end, the server compiles.
"""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from gadei_ps.kernels import cache, loaded
from gadei_ps.kernels.loaded import Unit
from gadei_ps.machine import process
from gadei_ps.memory import reserve

MOST_PROCESSES = 3  # that compile, each on a core of its own
PROCESS_BYTES = 448 << 20  # memory of each
LOCK_S = 100.0  # a compiler that still waits for another job's then is killed
LATE_S = 60.0  # a compiler that has made no progress for so long is killed
LOOK_S = 1.0  # between two looks at its progress


def load(units: Sequence[Unit], log: Any, logs: bool) -> None:
    """Load or compile the code that a server needs.

    `logs`: whether this server logs that it compiles; one of the two does.
    """
    begin = time.monotonic()
    missing = [unit for unit in units if not unit.is_kept()]
    if logs and missing:
        kept = {"kept_in": str(cache.directory())} if cache.is_lasting() else {}
        log.warning("compiling the kernels once, for up to half a minute", **kept)
    processes = min(MOST_PROCESSES, process.cores(), reserve.for_processes() // PROCESS_BYTES)
    if missing and processes:
        _have_compiled(missing, processes, log)
    for unit in units:
        unit.load()
    loaded.give_back()
    cache.report(log)
    log.debug("kernels loaded", seconds=round(time.monotonic() - begin, 2), compiled=len(missing))


def _have_compiled(missing: Sequence[Unit], processes: int, log: Any) -> None:
    """Have units compiled by a child, as far as it gets."""
    cache.check_sources()  # after an upgrade, the compiler would be the new one
    names = [unit.name for unit in missing]
    command = process.module_command("gadei_ps.server.compiler", str(processes), *names)
    try:
        child = process.spawn(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return
    try:
        if _has_begun(child):
            _wait(child, missing)
    finally:
        code = process.end_group(child)
    if code:
        how = process.signal_name(-code) if code < 0 else f"exit code {code}"
        log.debug("the process that compiles has failed", how=how)


def _has_begun(child: subprocess.Popen[bytes]) -> bool:
    """Return whether the child has locked the store, or has ended, within LOCK_S.

    It closes the pipe then.
    """
    assert child.stdout is not None
    with child.stdout as pipe:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        return bool(poll.poll(LOCK_S * 1000))


def _wait(child: subprocess.Popen[bytes], missing: Sequence[Unit]) -> None:
    """Wait until the child ends, or makes no progress for LATE_S."""
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
