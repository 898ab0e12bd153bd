"""The sentence classifiers without PyTorch: their sizes and probabilities.

PyTorch's import alone takes longer than `gadei-ps predict` should take for a sentence, and as long
as the training of an ensemble on few rows, whose gradients are in gradients.py. `network.py` and
`ensemble.py` train the same networks by PyTorch and explain them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gadei_ps.classifier.calibration import log_softmax
from gadei_ps.classifier.features import Rows
from gadei_ps.classifier.words import Encoded

Floats = NDArray[np.float32]
SLICE: Final = 16
"""Texts that are computed at once."""
EMBEDDING_RANGE: Final = 0.05
"""Embeddings start uniform within this distance of zero.

Adagrad moves a word by about 0.01 at a time, at the paper's learning rate of 0.01. With 0.05 it
reaches a higher validation accuracy on TREC-6 than with Kim's 0.25, in 4 epochs instead of 7 (one
run each), and about the same on MR. Plain SGD moves words much less and needs 0.25.
"""
FEATURE_DROPOUT: Final = 0.3
HIDDEN_DROPOUT: Final = 0.2


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

    @property
    def features(self) -> int:
        """Number of filters."""
        return self.maps * len(self.widths)

    @cached_property
    def tap_features(self) -> list[int]:
        """Number of filters that have a tap, for each tap."""
        return [
            self.maps * sum(width > tap for width in self.widths) for tap in range(max(self.widths))
        ]

    @cached_property
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


class CnnForward(NamedTuple):
    """A forward pass of a CNN, with what its gradients need.

    logits: (rows, classes). tokens: words of all texts, each with padding after it. starts: int64,
    (rows + 1,), of each text in `tokens`. embedded: their embeddings. windows: (tokens, filters).
    peaks: maxima of each text over its windows and 0, (rows, filters). maxima: inputs of the last
    layer, (rows, filters).
    """

    logits: Floats
    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    embedded: Floats
    windows: Floats
    peaks: Floats
    maxima: Floats


class Classifier(NamedTuple):
    """A CNN. tensors: float32, as `Sizes.shapes` describes them; `prefix` begins their names."""

    sizes: Sizes
    tensors: Mapping[str, Floats]
    prefix: str = ""

    def parts(self, texts: Encoded, logits: bool = False) -> Floats:
        """Return log probabilities, or logits: (1, n, classes)."""
        found = np.empty((1, len(texts), self.sizes.classes), np.float32)
        for rows in _slices(len(texts)):
            found[:, rows] = self.forward(texts, rows).logits
        return found if logits else log_softmax(found)

    def forward(
        self, texts: Encoded | Rows, rows: NDArray[np.int64], rng: np.random.Generator | None = None
    ) -> CnnForward:
        """Compute the logits of these rows as SentenceClassifier does. rng: draws the dropout."""
        taps = self.sizes.tap_features
        embedding, filters, filter_bias, output_weight, output_bias = (
            self.tensors[self.prefix + name] for name in self.sizes.shapes
        )
        tokens, starts = texts.packed(rows, len(taps) - 1)
        embedded = embedding[tokens]
        products = embedded @ filters.T
        begin = taps[0]
        windows = products[:, :begin]
        for tap, count in enumerate(taps[1:], 1):
            windows[tap:, :count] += products[:-tap, begin : begin + count]
            begin += count
        # Faster than reduceat, and take than indices in brackets below.
        of_texts = [windows[begin:end].max(axis=0) for begin, end in pairwise(starts.tolist())]
        peaks = np.maximum(np.stack(of_texts), 0)
        maxima = dropped(np.maximum(peaks + filter_bias, 0), self.sizes.dropout, rng)
        logits = maxima @ output_weight.T + output_bias
        return CnnForward(logits, tokens, starts, embedded, windows, peaks, maxima)


class Forward(NamedTuple):
    """A forward pass of an ensemble, with what its gradients need.

    logits: (3, rows, classes). grams: int64, the distinct n-grams. wide, bag: their values, (rows,
    n-grams), those of `bag` after dropout. hidden: units of `bag`, (rows, hidden).
    """

    logits: Floats
    grams: NDArray[np.int64]
    wide: Floats
    bag: Floats
    hidden: Floats
    cnn: CnnForward


@dataclass(frozen=True, eq=False)
class EnsembleClassifier:
    """An ensemble. tensors: float32, as `EnsembleSizes.shapes` describes them."""

    sizes: EnsembleSizes
    tensors: Mapping[str, Floats]

    @cached_property
    def cnn(self) -> Classifier:
        """The part `cnn`."""
        return Classifier(self.sizes.cnn, self.tensors, "cnn.")

    def parts(self, texts: Rows, logits: bool = False) -> Floats:
        """Return log probabilities by each part, or logits: (3, n, classes)."""
        found = np.empty((3, len(texts), self.sizes.classes), np.float32)
        for rows in _slices(len(texts)):
            found[:, rows] = self.forward(texts, rows).logits
        return found if logits else log_softmax(found)

    def forward(
        self, texts: Rows, rows: NDArray[np.int64], rng: np.random.Generator | None = None
    ) -> Forward:
        """Compute the logits of these rows, at most about SLICE. rng: draws the dropout.

        The values of the rows' n-grams become a dense matrix, whose products with the rows of the
        tables read each of these once.
        """
        tensors = self.tensors
        features, starts, values = texts.bag(rows)
        row = np.repeat(np.arange(len(rows)), np.diff(starts))
        grams, place = np.unique(features, return_inverse=True)

        def matrix(values: Floats) -> Floats:
            found = np.zeros((len(rows), len(grams)), np.float32)
            found[row, place] = values
            return found

        wide = matrix(values)
        bag = wide if rng is None else matrix(dropped(values, FEATURE_DROPOUT, rng))
        units = np.maximum(bag @ tensors["bag"].take(grams, axis=0) + tensors["bag_bias"], 0)
        hidden = dropped(units, HIDDEN_DROPOUT, rng)
        cnn = self.cnn.forward(texts, rows, rng)
        logits = (
            wide @ tensors["wide"].take(grams, axis=0) + tensors["wide_bias"],
            hidden @ tensors["output_weight"].T + tensors["output_bias"],
            cnn.logits,
        )
        return Forward(np.stack(logits), grams, wide, bag, hidden, cnn)


def dropped(values: Floats, share: float, rng: np.random.Generator | None) -> Floats:
    """Set a share of the values to zero, and scale the others up; no change without `rng`."""
    if rng is None or not share:
        return values
    kept = rng.random(values.shape, np.float32) >= share
    found: Floats = values * kept * np.float32(1 / (1 - share))
    return found


def _slices(count: int) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, count, SLICE):
        yield np.arange(begin, min(begin + SLICE, count))
