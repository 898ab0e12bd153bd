"""The sentence classifier without PyTorch: its sizes, its probabilities, and its model directory.

`gadei-ps predict` needs only this: PyTorch's import alone takes longer than a sentence should.
`network.py` trains the same network, explains it, and writes the directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from gadei_ps.classifier.words import PADDING, Vocabulary
from gadei_ps.errors import GadeiError
from gadei_ps.machine import user_files
from gadei_ps.show.counts import counted

Floats = NDArray[np.float32]
BATCH = 64
"""Sentences whose features are in memory at once."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a network, with Kim's as defaults. Raises ValueError if one is not positive."""

    vocabulary_size: int
    classes: int
    embedding: int = 300
    maps: int = 100
    widths: Sequence[int] = (3, 4, 5)
    dropout: float = 0.5

    def __post_init__(self) -> None:
        sizes = (self.vocabulary_size, self.classes, self.embedding, self.maps, *self.widths)
        if not self.widths or not all(isinstance(n, int) and n > 0 for n in sizes):
            raise ValueError(f"sizes must be positive integers: {sizes}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1: {self.dropout}")
        object.__setattr__(self, "widths", sorted(self.widths, reverse=True))

    def as_dict(self) -> dict[str, Any]:
        """The sizes as JSON values."""
        return asdict(self)

    @property
    def features(self) -> int:
        """Number of filters."""
        return self.maps * len(self.widths)

    @property
    def tap_features(self) -> list[int]:
        """Number of filters that have a tap, for each tap."""
        return [
            self.maps * sum(width > tap for width in self.widths) for tap in range(max(self.widths))
        ]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters, by name."""
        return {
            "embedding": (self.vocabulary_size, self.embedding),
            "filters": (sum(self.tap_features), self.embedding),
            "filter_bias": (self.features,),
            "output_weight": (self.classes, self.features),
            "output_bias": (self.classes,),
        }


class Classifier(NamedTuple):
    """A trained network. tensors: float32, as `Sizes.shapes` describes them."""

    sizes: Sizes
    tensors: Mapping[str, Floats]

    def probabilities(self, tokens: NDArray[np.int32], batch_size: int = BATCH) -> Floats:
        """Return the probabilities (n, classes) of sentences (n, width) with trailing PADDING."""
        found = np.empty((len(tokens), self.sizes.classes), np.float32)
        for rows, batch in batches(tokens, batch_size):
            logits = self.logits(batch)
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            found[rows] = powers / powers.sum(axis=1, keepdims=True)
        return found

    def logits(self, tokens: NDArray[np.int32]) -> Floats:
        """Return logits (B, classes) for word numbers (B, L); see `SentenceClassifier.forward`."""
        count, length = tokens.shape
        taps = self.sizes.tap_features
        words = self.tensors["embedding"][tokens].reshape(count * length, -1)
        products = (words @ self.tensors["filters"].T).reshape(count, length, -1)
        windows = np.zeros((count, length + len(taps) - 1, self.sizes.features), np.float32)
        for tap, block in enumerate(np.split(products, np.cumsum(taps)[:-1], axis=2)):
            windows[:, tap : tap + length, : taps[tap]] += block
        peaks = np.maximum(windows.max(axis=1), 0)
        hidden = np.maximum(peaks + self.tensors["filter_bias"], 0)
        logits: Floats = hidden @ self.tensors["output_weight"].T + self.tensors["output_bias"]
        return logits


def batches(
    tokens: NDArray[np.int32], batch_size: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Row numbers and their sentences, shortest sentences first, for less padding."""
    lengths = (tokens != PADDING).sum(axis=1)
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        yield rows, tokens[rows, : max(1, lengths[rows[-1]])]


# The model directory

FORMAT = 2
FORMAT_OF_CUTS = 3
"""Format of a model whose texts are not cut into words. Releases without it refuse the model."""
WEIGHTS, VOCABULARY, LABELS, CONFIG, METRICS = RESULT_FILES = (
    "weights.safetensors",
    "vocabulary.json",
    "labels.json",
    "config.json",
    "metrics.json",
)


class ModelDirectoryError(GadeiError):
    """A result directory cannot be written or read. The message is one line with the remedy."""


class ModelDirectoryMistake(ModelDirectoryError):
    """Another try would fail as well: the directory must change, or another one be named."""

    exit_code = 2


class Result(NamedTuple):
    """Content of a result directory."""

    model: Classifier
    vocabulary: Vocabulary
    label_names: tuple[str, ...]
    config: dict[str, Any]
    metrics: dict[str, Any]


def load_result(directory: str | os.PathLike[str]) -> Result:
    """Read what `save_result` wrote. Raises ModelDirectoryError if a file is missing or damaged."""
    path = resolved(directory)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "there is no such directory"
        raise failure(path, what, "give the directory of a finished training")
    config = _read_object(path / CONFIG)
    if config.get("format") not in (FORMAT, FORMAT_OF_CUTS):
        what = f"has format {config.get('format')!r}, not {FORMAT} or {FORMAT_OF_CUTS}"
        raise failure(path / CONFIG, what, "load it with the version that wrote it")
    metrics = _read_object(path / METRICS)
    labels = _read_object(path / LABELS).get("labels")
    if not isinstance(labels, list) or not all(isinstance(name, str) for name in labels):
        raise _damaged(path / LABELS, "labels must be a list of strings")
    try:
        vocabulary = Vocabulary.from_json(_read(path / VOCABULARY).decode())
    except ValueError as error:
        raise _damaged(path / VOCABULARY, str(error)) from None
    sizes = config.get("model")
    if not isinstance(sizes, dict):
        raise _damaged(path / CONFIG, "the sizes of the model are missing")
    for name, file, number in (
        ("vocabulary_size", VOCABULARY, len(vocabulary)),
        ("classes", LABELS, len(labels)),
    ):
        if sizes.get(name) != number:
            entries = counted(number, "entry", "entries")
            raise _damaged(path / file, f"{entries}, but config.json has {sizes.get(name)!r}")
    return Result(_load_model(path, sizes), vocabulary, tuple(labels), config, metrics)


def _load_model(path: Path, sizes: dict[str, Any]) -> Classifier:
    try:
        tensors = safetensors.numpy.load(_read(path / WEIGHTS))
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise _damaged(path / WEIGHTS, str(error)) from None
    try:
        known = Sizes(**sizes)
    except (TypeError, ValueError) as error:
        raise _damaged(path / CONFIG, str(error)) from None
    found = {name: (one.shape, one.dtype) for name, one in tensors.items()}
    if found != {name: (shape, np.float32) for name, shape in known.shapes.items()}:
        raise _damaged(path / WEIGHTS, "the tensors are not those that config.json describes")
    return Classifier(known, tensors)


def resolved(directory: str | os.PathLike[str]) -> Path:
    """The path without links."""
    return Path(os.path.realpath(directory))


def _read(path: Path) -> bytes:
    try:
        with user_files.open_file(path) as file:
            return file.read()
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _damaged(path, "not a JSON object")
    return value


def _damaged(path: Path, what: str) -> ModelDirectoryMistake:
    return failure(path, f"missing or damaged ({what})", "restore the directory or train again")


def failure(path: Path, what: str, remedy: str) -> ModelDirectoryMistake:
    """The error for this path, in one line."""
    return ModelDirectoryMistake(" ".join(f"{path}: {what}; {remedy}".split()))
