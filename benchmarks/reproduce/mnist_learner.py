"""A learner on MNIST whose iterations take a given time. It sleeps for the rest of the time.

    python -m gadei_ps.benchmarks.reproduce.mnist_learner SECONDS BATCH EPOCHS SEED

GADEI_PS_LEARNER, which `gadei_ps.machine.launch` sets, has its number among the learners.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from gadei_ps.benchmarks.reproduce import mnist
from gadei_ps.errors import JobStopped
from gadei_ps.learners.client import Client


def main() -> None:
    speeds = [float(one) for one in sys.argv[1].split(",")]
    batch_size, epochs, seed = (int(one) for one in sys.argv[2:5])
    number = int(os.environ["GADEI_PS_LEARNER"])
    images = mnist.load("train")
    chance = np.random.default_rng([seed, number])
    with Client() as client:
        try:
            for batch in client.batches(len(images.labels), batch_size, epochs, seed):
                # Normal with a deviation of 5%, as in a stable environment.
                until = time.monotonic() + speeds[number] * chance.normal(1, 0.05)
                found, loss = mnist.gradient(
                    client.weights, images.pixels[batch.indices], images.labels[batch.indices]
                )
                time.sleep(max(0.0, until - time.monotonic()))
                client.push(found, loss=loss, samples=len(batch.indices))
        except JobStopped:
            pass


if __name__ == "__main__":
    main()
