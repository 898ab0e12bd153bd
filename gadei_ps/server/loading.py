"""A server's kernels: from the cache, or compiled once for an installation."""

from __future__ import annotations

import time
from typing import Any

from gadei_ps.kernels import cache
from gadei_ps.server import shard
from gadei_ps.sync import zipline


def load(optimizer: int, log: Any, tells: bool) -> None:
    """Loads or compiles what a server of this optimizer needs.

    tells: whether this server says that it compiles; one of the two does.
    """
    begin = time.monotonic()
    kept_in = cache.directory()
    if tells and not any(kept_in.rglob("*.nbi")):  # Numba makes directories before
        log.warning("compiling the kernels once, for about half a minute", kept_in=str(kept_in))
    shard.load([optimizer])
    zipline.load()
    cache.tell(log)
    log.debug("kernels loaded", seconds=round(time.monotonic() - begin, 2))
