"""A process that compiles units of a server's code beside the server that has started it.

python -m gadei_ps.server.helper NAME...
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from gadei_ps.kernels import cache, sharing
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.machine import process
from gadei_ps.server import units

MOST_EXPENDABLE = b"1000"


def main() -> None:
    """Compile those of the units that nobody else does, and end."""
    process.forbid_core_dump()
    # Where memory runs out, the kernel kills this process first, and not the server.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(MOST_EXPENDABLE)
    known = {unit.name: unit for unit in units.units(Kind)}
    sharing.compile_free([known[name] for name in sys.argv[1:]], stop=cache.has_failed)
    os._exit(0)


if __name__ == "__main__":
    main()
