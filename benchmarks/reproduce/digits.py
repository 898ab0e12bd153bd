"""MNIST as a problem of the simulator: real gradients in virtual time."""

from __future__ import annotations

import numpy as np

from gadei_ps.benchmarks.reproduce import mnist
from gadei_ps.simulate.problems import Rows


class Digits:
    """The network of mnist.py. Weights are flat float32, one tensor after the other."""

    name = "mnist"

    def __init__(self, lr: float, held_out: int | None = None) -> None:
        """held_out: number of test images for the loss; None: all."""
        self.lr = lr
        self._images = mnist.load("train")
        test = mnist.load("t10k")
        self._test = mnist.Images(test.pixels[:held_out], test.labels[:held_out])
        self.samples = len(self._images.labels)

    def initial(self) -> mnist.FloatArray:
        """Return weights as mnist.start() gives them."""
        return np.concatenate([part.ravel() for part in mnist.start().values()])

    def gradient(self, weights: mnist.FloatArray, rows: Rows) -> mnist.FloatArray:
        """The gradient of the mean cross entropy."""
        parts = _cut(weights)
        found, _ = mnist.gradient(parts, self._images.pixels[rows], self._images.labels[rows])
        return np.concatenate([found[name].ravel() for name in parts])

    def loss(self, weights: mnist.FloatArray) -> dict[str, float]:
        """The loss of the test images."""
        right, entropy = mnist.accuracy(_cut(weights), self._test)
        return {"loss": entropy, "accuracy": right}


def _cut(weights: mnist.FloatArray) -> dict[str, mnist.FloatArray]:
    """The tensors by name, without a copy."""
    parts = {}
    begin = 0
    for name, shape in mnist.SHAPES.items():
        end = begin + shape[0] * shape[1]
        parts[name] = weights[begin:end].reshape(shape)
        begin = end
    return parts
