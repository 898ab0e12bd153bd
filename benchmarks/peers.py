"""Shared by the processes that a benchmark starts: orders, a gradient, its update."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gadei_ps.machine import process

Floats = NDArray[np.float32]

# So small that the weights hardly change over all gradients.
LR = 1e-6
# Values that an update in numpy processes at a time, so that its scratch stays in the core's cache.
CHUNK = 65536


def orders() -> Iterator[dict[str, Any]]:
    """Report that this process is ready, then yields orders until its input ends."""
    answer({"ready": True})
    for line in sys.stdin:
        yield json.loads(line)


def answer(what: Mapping[str, Any]) -> None:
    """Answer the last command."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def gradient(count: int) -> Floats:
    """A gradient of `count` values, with its pages in memory."""
    return np.full(count, 1e-3, np.float32)


class Numpy:
    """The update of a server in numpy, in place, without a temporary array of the model's size."""

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
    """Make the calling child process end with its parent."""
    process.die_with_parent(parent)
