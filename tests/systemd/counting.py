"""A learner that always retries: attaches to its job as often as there is one, and counts.

counting.py JOB LANE FILE

Each gradient adds one to its own value of the weights. Its FILE, mapped, has numbers of uint64, as
named in COUNTS: pushes that have begun and that have returned, the last reason for leaving,
how often it has left, and whether it is attached.
"""

import sys
import time
from pathlib import Path

import numpy as np

from gadei_ps.errors import GadeiError
from gadei_ps.learners.client import Client

COUNTS = ("begun", "returned", "told", "left", "attached")


def mapped(path: Path) -> np.ndarray:
    """The counts in this file, of shape (5,), as they are from now on."""
    if not path.exists():
        path.write_bytes(bytes(8 * len(COUNTS)))
    return np.memmap(path, np.uint64, "r+")


def main() -> None:
    job, lane, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    counts = mapped(file)
    before = 0
    while True:
        try:
            client = Client(job)
        except GadeiError:
            time.sleep(0.05)
            continue
        ones = np.zeros(client.model.elements, np.float32)
        ones[lane] = -1.0
        counts[4] = 1
        try:
            while True:
                counts[0] = before + client.published + 1
                client.push(ones, samples=1)
                counts[1] = before + client.published
                time.sleep(0.0005)
        except GadeiError:
            before += client.published
            counts[0] = counts[1] = counts[2] = before
            counts[3] += 1
            counts[4] = 0
        client.detach()


if __name__ == "__main__":
    main()
