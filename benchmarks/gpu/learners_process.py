"""The process of a block: python -m gadei_ps.benchmarks.gpu.learners_process [DEVICE, QUICK, BLOCK]

Its argument is a JSON list, its input one line, the block's time (s). Each line of its output is a
JSON object with what was just measured, or a note; the last one is {"end": true}. It is a process
of its own because a process decides at its first use of CUDA whether it uses the Multi-Process
Service.

The process that learners are forked from starts first: it imports torch while this one does. This
module imports little, because each learner imports it again.
"""

from __future__ import annotations

import json
import sys
from multiprocessing import forkserver

from gadei_ps.machine import interrupts

PRELOAD = ["gadei_ps.benchmarks.gpu.learners_block", "torch._dynamo"]
"""Modules of a learner. The first step of a torch optimizer imports the second."""
ON_GPU = ["gadei_ps.learners.cuda"]


def main() -> None:
    """Measure the block of the argument."""
    device, quick, name = json.loads(sys.argv[1])
    interrupts.install()
    with interrupts.held():
        forkserver.set_forkserver_preload(PRELOAD + (ON_GPU if device == "cuda" else []))
        forkserver.ensure_running()
    try:
        from gadei_ps.benchmarks.gpu import learners_block

        if line := sys.stdin.readline():
            learners_block.measure(device, quick, name, float(line))
    except interrupts.Interrupted:
        sys.exit(1)


if __name__ == "__main__":
    main()
