"""MNIST for comparisons of accuracy, and the gradient of a small network in NumPy."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gadei_ps.benchmarks.nlc_texts import VARIABLE, data_directory
from gadei_ps.errors import UsageError

FloatArray = npt.NDArray[np.float32]

PIXELS = 28 * 28
CLASSES = 10
HIDDEN = 64
SHAPES = {"hidden": (HIDDEN, PIXELS + 1), "out": (CLASSES, HIDDEN + 1)}
"""Shapes of the network's tensors. The last column of each is its bias."""


@dataclass(frozen=True)
class Images:
    """pixels: float32 (n, 784) in [0, 1]. labels: int64 (n,)."""

    pixels: FloatArray
    labels: npt.NDArray[np.int64]


def load(kind: str) -> Images:
    """Read `train` (60,000 images) or `t10k` (10,000). Raises UsageError if a file is missing."""
    directory = data_directory() / "mnist"
    try:
        pixels = _read(directory / f"{kind}-images-idx3-ubyte.gz", 16).reshape(-1, PIXELS)
        labels = _read(directory / f"{kind}-labels-idx1-ubyte.gz", 8)
    except OSError as error:
        raise UsageError(
            f"{directory}: no MNIST ({error.strerror}); set {VARIABLE} to a directory with it"
        ) from None
    return Images(pixels.astype(np.float32) / np.float32(255), labels.astype(np.int64))


def _read(path: Path, head: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=head)


def start(seed: int = 0) -> dict[str, FloatArray]:
    """Initial weights by name, uniform as in torch.nn.Linear."""
    chance = np.random.default_rng(seed)
    made = {}
    for name, shape in SHAPES.items():
        bound = 1 / np.sqrt(shape[1] - 1)
        made[name] = chance.uniform(-bound, bound, shape).astype(np.float32)
    return made


def _forward(
    weights: dict[str, FloatArray], pixels: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    hidden, out = weights["hidden"], weights["out"]
    units = np.maximum(pixels @ hidden[:, :-1].T + hidden[:, -1], 0)
    scores = units @ out[:, :-1].T + out[:, -1]
    scores -= scores.max(axis=1, keepdims=True)
    likely = np.exp(scores)
    likely /= likely.sum(axis=1, keepdims=True)
    return units, scores, likely


def gradient(
    weights: dict[str, FloatArray], pixels: FloatArray, labels: npt.NDArray[np.int64]
) -> tuple[dict[str, FloatArray], float]:
    """The gradient of a mini-batch's mean cross-entropy, by name, and the loss."""
    count = len(labels)
    units, _, likely = _forward(weights, pixels)
    rows = np.arange(count)
    loss = float(-np.log(np.maximum(likely[rows, labels], 1e-12)).mean())
    at_scores = likely
    at_scores[rows, labels] -= 1
    at_scores /= count
    out = weights["out"]
    at_units = (at_scores @ out[:, :-1]) * (units > 0)
    found = {}
    for name, values, inputs in (("hidden", at_units, pixels), ("out", at_scores, units)):
        found[name] = np.concatenate([values.T @ inputs, values.sum(axis=0)[:, None]], axis=1)
    return found, loss


def accuracy(weights: dict[str, FloatArray], images: Images) -> tuple[float, float]:
    """Share of the images that are classified correctly, and the mean cross-entropy."""
    _, _, likely = _forward(weights, images.pixels)
    right = float((likely.argmax(axis=1) == images.labels).mean())
    found = likely[np.arange(len(images.labels)), images.labels]
    return right, float(-np.log(np.maximum(found, 1e-12)).mean())
