"""A server's kernels: from the cache, or compiled once for an installation.

What is missing at a first start is divided among a few processes, the server and its helpers. They
die with the server. Helpers may fail or be late: what is missing in the end, the server compiles.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from gadei_ps.kernels import cache, loaded, sharing
from gadei_ps.kernels.unit import Unit
from gadei_ps.machine import process
from gadei_ps.memory import reserve

HELPERS = 2  # at most, and none without a core of its own
HELPER_BYTES = 448 << 20  # memory of each
LEAST_UNITS = 4  # for fewer the start of a helper takes too long
GONE_S = 5.0


def load(units: Sequence[Unit], log: Any, logs: bool) -> None:
    """Load or compile the code that a server needs.

    `logs`: whether this server logs that it compiles; one of the two does.
    """
    begin = time.monotonic()
    kept_in = cache.directory()
    missing = [unit.name for unit in units if not unit.is_kept()]
    if logs and missing:
        log.warning("compiling the kernels once, for up to half a minute", kept_in=str(kept_in))
    helpers = _start_helpers(missing)
    try:
        sharing.load(units)
    finally:
        for one in helpers:
            _end(one, log)
    loaded.give_back()
    cache.report(log)
    log.debug(
        "kernels loaded",
        seconds=round(time.monotonic() - begin, 2),
        compiled=len(missing),
        helpers=len(helpers),
    )


def _start_helpers(missing: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start as many helpers as memory and cores allow, possibly 0. missing: names of units."""
    if len(missing) < LEAST_UNITS:
        return []
    count = min(HELPERS, process.cores() - 1, reserve.for_processes() // HELPER_BYTES)
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.suppress(OSError):
        for _ in range(count):
            command = process.module_command("gadei_ps.server.helper", *missing)
            none = subprocess.DEVNULL
            started.append(process.spawn(command, stdout=none, stderr=none))
    return started


def _end(helper: subprocess.Popen[bytes], log: Any) -> None:
    """Kill a helper and log if it has failed; it has nothing left to do unless it is late."""
    if code := helper.poll():
        how = process.signal_name(-code) if code < 0 else f"exit code {code}"
        log.debug("a process that helped to compile has failed", how=how)
    helper.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        helper.wait(GONE_S)
