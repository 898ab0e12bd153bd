"""Small learning problems. Their gradients are really computed, in virtual time.

Weights are one flat array of floats. NumPy alone: a run of some thousand gradients takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gadei_ps.simulate.draws import FloatArray

Rows = npt.NDArray[np.int64]
Weights = npt.NDArray[Any]
"""Weights of shape (weights,). float64 here; other problems may use another type."""


class Problem(Protocol):
    """Weights, the gradient of a mini-batch of samples, and the loss on held-out samples."""

    @property
    def name(self) -> str:
        """Name in tables."""

    @property
    def samples(self) -> int:
        """Number of training samples."""

    @property
    def lr(self) -> float:
        """A good learning rate for the mean gradient of all learners."""

    def initial(self) -> Weights:
        """The weights to begin with, shape (weights,)."""

    def gradient(self, weights: Weights, rows: Rows) -> Weights:
        """The gradient of the mean loss of these samples, shape (weights,)."""

    def loss(self, weights: Weights) -> dict[str, float]:
        """Return values by name on held-out samples: `loss`, the mean, and others to plot."""


class Logistic:
    """Logistic regression, convex: two overlapping classes of Gaussian samples."""

    name = "convex"
    lr = 1.0

    def __init__(self, seed: int, samples: int = 4096, features: int = 20) -> None:
        chance = np.random.default_rng([seed, 1])
        self.samples = samples
        truth = chance.normal(size=features)
        # Features of unequal spread make the problem as badly conditioned as real ones are.
        spread = np.geomspace(1.0, 0.1, features)
        inputs = chance.normal(size=(samples + samples // 4, features)) * spread
        chances = 1 / (1 + np.exp(-2.0 * inputs @ truth))
        labels = (chance.random(len(inputs)) < chances).astype(np.float64)
        self._inputs, self._held = inputs[:samples], inputs[samples:]
        self._labels, self._held_labels = labels[:samples], labels[samples:]

    def initial(self) -> FloatArray:
        """Return zeros."""
        return np.zeros(self._inputs.shape[1])

    def gradient(self, weights: FloatArray, rows: Rows) -> FloatArray:
        """See Problem."""
        inputs = self._inputs[rows]
        wrong = _sigmoid(inputs @ weights) - self._labels[rows]
        found: FloatArray = inputs.T @ wrong / len(rows)
        return found

    def loss(self, weights: FloatArray) -> dict[str, float]:
        """Cross entropy in nats."""
        signed = (self._held @ weights) * (1 - 2 * self._held_labels)
        right = signed < 0
        return {"loss": float(np.logaddexp(0, signed).mean()), "accuracy": float(right.mean())}


class Network:
    """One hidden layer of tanh units and a softmax, not convex; any labelled samples.

    inputs: float (samples, features). labels: int (samples,), from 0. The weights are those of the
    hidden layer with its biases, then those of the output layer with its biases.
    """

    def __init__(
        self,
        seed: int,
        inputs: npt.NDArray[np.floating],
        labels: npt.NDArray[np.integer],
        held: npt.NDArray[np.floating],
        held_labels: npt.NDArray[np.integer],
        *,
        hidden: int,
        lr: float,
        name: str,
    ) -> None:
        self.name, self.lr = name, lr
        self.samples = len(inputs)
        self._inputs, self._labels = inputs, labels
        self._held, self._held_labels = held, held_labels
        self._seed = seed
        classes = int(max(labels.max(), held_labels.max())) + 1
        self._shapes = ((inputs.shape[1] + 1, hidden), (hidden + 1, classes))

    def initial(self) -> FloatArray:
        """Normal, with deviation 1 / sqrt(inputs of the unit). Biases are zero."""
        chance = np.random.default_rng([self._seed, 2])
        parts = []
        for rows, columns in self._shapes:
            part = chance.normal(size=(rows, columns)) / np.sqrt(rows - 1)
            part[-1] = 0
            parts.append(part.ravel())
        return np.concatenate(parts)

    def gradient(self, weights: FloatArray, rows: Rows) -> FloatArray:
        """See Problem."""
        first, second = self._cut(weights)
        inputs = self._inputs[rows]
        units = np.tanh(inputs @ first[:-1] + first[-1])
        wrong = _softmax(units @ second[:-1] + second[-1])
        wrong[np.arange(len(rows)), self._labels[rows]] -= 1
        wrong /= len(rows)
        back = (wrong @ second[:-1].T) * (1 - units**2)
        parts = (inputs.T @ back, back.sum(0), units.T @ wrong, wrong.sum(0))
        return np.concatenate([part.ravel() for part in parts]).astype(np.float64, copy=False)

    def loss(self, weights: FloatArray) -> dict[str, float]:
        """Cross entropy in nats."""
        first, second = self._cut(weights)
        units = np.tanh(self._held @ first[:-1] + first[-1])
        chances = _softmax(units @ second[:-1] + second[-1])
        of_label = chances[np.arange(len(chances)), self._held_labels]
        right = chances.argmax(1) == self._held_labels
        return {
            "loss": float(-np.log(np.maximum(of_label, 1e-30)).mean()),
            "accuracy": float(right.mean()),
        }

    def _cut(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        (rows, hidden), last = self._shapes
        dtype = self._inputs.dtype
        cut = rows * hidden
        first = weights[:cut].reshape(rows, hidden).astype(dtype, copy=False)
        return first, weights[cut:].reshape(last).astype(dtype, copy=False)


def clusters(seed: int, samples: int = 4096, classes: int = 5, features: int = 10) -> Network:
    """A network and samples whose classes consist of three clusters each."""
    chance = np.random.default_rng([seed, 3])
    centres = chance.normal(size=(3 * classes, features)) * 1.2
    which = chance.integers(len(centres), size=samples + samples // 4)
    inputs = centres[which] + chance.normal(size=(len(which), features))
    labels = which % classes
    parts = (inputs[:samples], labels[:samples], inputs[samples:], labels[samples:])
    return Network(seed, *parts, hidden=32, lr=0.5, name="network")


PROBLEMS: Mapping[str, Callable[[int], Problem]] = {"convex": Logistic, "network": clusters}


def _sigmoid(x: FloatArray) -> FloatArray:
    # tanh does not overflow.
    return 0.5 * (1 + np.tanh(0.5 * x))


def _softmax(x: FloatArray) -> FloatArray:
    powers = np.exp(x - x.max(1, keepdims=True))
    result: FloatArray = powers / powers.sum(1, keepdims=True)
    return result
