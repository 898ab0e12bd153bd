"""What the processes that a benchmark starts have in common: orders, a gradient, its update."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gadei_ps.machine import process

Floats = NDArray[np.float32]

# So small that weights stay in the range where they began, however many gradients are applied.
LR = 1e-6
# Values that an update in numpy takes at a time: its scratch stays in the core's own cache.
CHUNK = 65536


def orders() -> Iterator[dict[str, Any]]:
    """Says that this process is ready, then yields what it is told until its input ends."""
    answer({"ready": True})
    for line in sys.stdin:
        yield json.loads(line)


def answer(what: Mapping[str, Any]) -> None:
    """Answers the last order."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def gradient(count: int) -> Floats:
    """A gradient of that many values, its pages in memory."""
    return np.full(count, 1e-3, np.float32)


class Numpy:
    """The update of a server in numpy, in place and without a temporary array of the model."""

    def __init__(self) -> None:
        self._scratch = np.empty(CHUNK, np.float32)
        self._lr = np.float32(LR)

    def __call__(self, weights: Floats, gradient: Floats) -> None:
        """weights -= lr * gradient."""
        for start in range(0, weights.size, CHUNK):
            part = weights[start : start + CHUNK]
            scaled = self._scratch[: part.size]
            np.multiply(gradient[start : start + CHUNK], self._lr, out=scaled)
            np.subtract(part, scaled, out=part)


def die_with(parent: int) -> None:
    """Called by a child of such a process: it ends with the parent."""
    process.dies_with_parent(parent)()
