"""The sentence classifiers without PyTorch: their sizes and probabilities.

PyTorch's import alone takes longer than `gadei-ps predict` should take for a sentence, and the
launcher of `train` needs no gradients. `network.py` and `ensemble.py` train the same networks and
explain them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gadei_ps.classifier.calibration import log_softmax
from gadei_ps.classifier.features import Rows
from gadei_ps.classifier.words import PADDING

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


@dataclass(frozen=True)
class EnsembleSizes:
    """Sizes of an ensemble. Raises ValueError if one is not positive.

    features: n-grams that it knows. hidden: units of its part `bag`.
    """

    features: int
    vocabulary_size: int
    classes: int
    hidden: int = 64
    embedding: int = 64
    maps: int = 64
    widths: Sequence[int] = (4, 3, 2)
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if not all(isinstance(n, int) and n > 0 for n in (self.features, self.hidden)):
            raise ValueError(f"sizes must be positive integers: {self.features}, {self.hidden}")
        object.__setattr__(self, "widths", self.cnn.widths)

    @property
    def cnn(self) -> Sizes:
        """Sizes of the part `cnn`."""
        sizes = asdict(self)
        return Sizes(**{name: sizes[name] for name in Sizes.__dataclass_fields__})

    def as_dict(self) -> dict[str, Any]:
        """The sizes as JSON values."""
        return asdict(self)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters, by name."""
        return {
            "wide": (self.features, self.classes),
            "wide_bias": (self.classes,),
            "bag": (self.features, self.hidden),
            "bag_bias": (self.hidden,),
            "output_weight": (self.classes, self.hidden),
            "output_bias": (self.classes,),
        } | {f"cnn.{name}": shape for name, shape in self.cnn.shapes.items()}


class Classifier(NamedTuple):
    """A trained CNN. tensors: float32, as `Sizes.shapes` describes them."""

    sizes: Sizes
    tensors: Mapping[str, Floats]

    def parts(self, tokens: NDArray[np.int32], batch_size: int = BATCH) -> Floats:
        """Return log probabilities (1, n, classes) of sentences (n, width), PADDING at the end."""
        found = np.empty((1, len(tokens), self.sizes.classes), np.float32)
        for rows, batch in batches(tokens, batch_size):
            found[0, rows] = log_softmax(self.logits(batch))
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


class EnsembleClassifier(NamedTuple):
    """A trained ensemble. tensors: float32, as `EnsembleSizes.shapes` describes them."""

    sizes: EnsembleSizes
    tensors: Mapping[str, Floats]

    def parts(self, texts: Rows, batch_size: int = BATCH, logits: bool = False) -> Floats:
        """Return log probabilities by each part, or logits: (3, n, classes)."""
        found = np.empty((3, len(texts), self.sizes.classes), np.float32)
        prefix = "cnn."
        of_cnn = {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }
        cnn = Classifier(self.sizes.cnn, of_cnn)
        order = np.argsort(np.diff(texts.word_starts), kind="stable")
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            wide, hidden = self._summed(texts, rows)
            bag = hidden @ self.tensors["output_weight"].T + self.tensors["output_bias"]
            parts = np.stack([wide, bag, cnn.logits(texts.tokens(rows))])
            found[:, rows] = parts if logits else log_softmax(parts)
        return found

    def _summed(self, texts: Rows, rows: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return logits of the part `wide`, and hidden units of `bag`."""
        wide = np.tile(self.tensors["wide_bias"], (len(rows), 1))
        hidden = np.tile(self.tensors["bag_bias"], (len(rows), 1))
        for at, row in enumerate(rows.tolist()):
            part = slice(*texts.starts[row : row + 2].tolist())
            features, values = texts.features[part], texts.values[part]
            wide[at] += values @ self.tensors["wide"][features]
            hidden[at] += values @ self.tensors["bag"][features]
        return wide, np.maximum(hidden, 0)


def batches(
    tokens: NDArray[np.int32], batch_size: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Row numbers and their sentences, shortest sentences first, for less padding."""
    lengths = (tokens != PADDING).sum(axis=1)
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        yield rows, tokens[rows, : max(1, lengths[rows[-1]])]
