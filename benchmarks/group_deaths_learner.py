"""A learner of `bench group_deaths`.

    python -m gadei_ps.benchmarks.group_deaths_learner DIRECTORY [BYTES]

It answers batches. The gradient of a batch is -1 at the batch's place, and at a second place a
number of its own, which it writes down first: so the weights show which batches are in them, and
whether one is in them twice. Without batches to be divided, it pushes a constant.
BYTES: the size of the model, of which the rest stays zero.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from pathlib import Path

import numpy as np

from gadei_ps.errors import JobStopped
from gadei_ps.learners.client import Client

BATCHES, EPOCHS = 360, 400
PLACES = BATCHES * EPOCHS
PAUSE_S = 0.01


def learn(directory: Path, size: int) -> None:
    """Learn until the job ends. size: of the model (bytes), if above that of its places."""
    floats = max(2 * PLACES, size // 4)
    chance = random.Random(os.getpid())
    log = directory / f"{os.getpid()}.pushed"
    with (
        Client(tensors={"w": np.zeros(floats, np.float32)}) as client,
        log.open("a", buffering=1) as lines,
    ):
        gradient = np.zeros(floats, np.float32)
        for batch in client.batches(BATCHES, 1, EPOCHS):
            place, number = batch.epoch * BATCHES + batch.index, chance.uniform(1, 1000)
            lines.write(f"{place} {number}\n")
            gradient[[place, PLACES + place]] = -1, -number
            client.push(gradient, samples=1)
            gradient[[place, PLACES + place]] = 0
            time.sleep(PAUSE_S)


def main() -> None:
    with contextlib.suppress(JobStopped):
        learn(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)


if __name__ == "__main__":
    main()
