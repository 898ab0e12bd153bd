"""A learner of `gadei-ps chaos`: pushes whole numbers that can be counted in the weights.

    parameter `w`       every value gets the same gradient
    parameter `ledger`  LANES lanes | body; under SGD only

Under SGD with a rate of 1 the sums are whole numbers. Each gradient adds 1 to the lane of the
learner's generation, +1 or -1 to every value of the body, and the contrary to `w`. The sign changes
from one generation to the next, so that float32 represents the sums exactly. Another optimizer
gives the same result in every shard only if all gradients are equal, because shards may apply them
in different orders. So then all are equal, and they are counted by the optimizer's steps.

`python -m gadei_ps.chaos.counted_learner OPTIMIZER` prints its row and generation in one line. It
starts when it reads a line on standard input. By then its parent has mapped its ring, where the
parent counts the gradients.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import numpy.typing as npt

from gadei_ps.errors import ControlError, GadeiError, JobNotFound
from gadei_ps.learners.client import Client

EXACT = "sgd"  # the optimizer under which whole numbers stay exact
LANES = 4096  # even, so that all generations of a lane have one sign
BODY = 16384
LEDGER = LANES + BODY
MOST = 2**21  # gradients of one generation, at most
PATIENCE_S = 30.0  # wait for the next watchdog


def sign(generation: int) -> int:
    """The sign of what a learner of this generation adds to the body."""
    return -1 if generation % 2 else 1


def gradient(generation: int, values: int, optimizer: str) -> dict[str, npt.NDArray[np.float32]]:
    """The gradient of each push of this generation. values: number of values of `w`."""
    if optimizer != EXACT:
        return {"w": np.ones(values, np.float32)}
    ledger = np.zeros(LEDGER, np.float32)
    ledger[LANES:] = -sign(generation)
    ledger[generation % LANES] = -1.0
    return {"w": np.full(values, sign(generation), np.float32), "ledger": ledger}


def _connect() -> Client:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return Client()
        except (JobNotFound, ControlError):
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def push(optimizer: str) -> None:
    """Push until it is killed or has pushed MOST gradients. Raises GadeiError."""
    client = _connect()
    print(client.row, client.generation, flush=True)
    if not sys.stdin.readline():
        return
    (values,) = client.weights["w"].shape
    flat = client.model.flatten(gradient(client.generation, values, optimizer))
    while client.published < MOST:
        client.push(flat, samples=1, loss=0.0)
    client.wait_applied()


def main() -> None:
    """The program."""
    try:
        push(sys.argv[1])
    except GadeiError as error:
        sys.exit(f"chaos learner: {error}")


if __name__ == "__main__":
    main()
