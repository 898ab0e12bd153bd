"""A learner of gadei-ps that pushes dense gradients without a pause until its job ends.

python -m gadei_ps.benchmarks.failover_learner JOB
"""

from __future__ import annotations

import contextlib
import sys

from gadei_ps.benchmarks.peers import gradient
from gadei_ps.errors import GadeiError
from gadei_ps.learners.client import Client


def main() -> None:
    """Push the same gradient again and again."""
    with contextlib.suppress(GadeiError):  # the job has ended
        client = Client(sys.argv[1])
        pushed = gradient(client.model.elements)
        while True:
            client.push(pushed)


if __name__ == "__main__":
    main()
