"""The sentence classifier that the paper trains (Figure 2).

    word numbers (B, L) -> embedding (B, L, 300) -> filters of width 3, 4, 5, 100 of each
    -> maximum over positions (B, 300) -> ReLU -> dropout 1/2 -> linear -> logits (B, classes)

This is the CNN-rand of Kim (2014), "Convolutional neural networks for sentence classification".
The module does not use the parameter server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from gadei_ps.classifier.calibration import scores
from gadei_ps.classifier.inference import EMBEDDING_RANGE, Classifier, Sizes
from gadei_ps.classifier.words import PADDING, Encoded

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Lookup = Callable[..., torch.Tensor]


class SentenceClassifier(torch.nn.Module):
    """Kim's network with one trained embedding (paper, Figure 2).

    Parameters, all float32 and dense:

    embedding      (vocabulary_size, embedding)       row PADDING is zero and has no gradient
    filters        (maps * sum(widths), embedding)    tap by tap, see `forward`
    filter_bias    (maps * len(widths),)              features of the widest filters first
    output_weight  (classes, maps * len(widths))
    output_bias    (classes,)

    The initial weights depend only on the arguments and `seed`, not on the global generator, which
    draws the dropout. With `sparse`, the gradient of `embedding` is a sparse tensor. `linear` and
    `lookup` replace torch's functions that multiply by the filters and look words up. Raises
    ValueError for sizes that are not positive.
    """

    def __init__(
        self,
        vocabulary_size: int,
        classes: int,
        *,
        embedding: int = 300,
        maps: int = 100,
        widths: Sequence[int] = (3, 4, 5),
        dropout: float = 0.5,
        embedding_range: float = EMBEDDING_RANGE,
        seed: int = 0,
        sparse: bool = False,
        linear: Linear = functional.linear,
        lookup: Lookup = functional.embedding,
    ) -> None:
        super().__init__()
        sizes = Sizes(vocabulary_size, classes, embedding, maps, widths, dropout)
        self.sizes = asdict(sizes)
        self.dropout = dropout
        self.sparse = sparse
        self.linear = linear
        self.lookup = lookup
        self.widest = max(widths)
        self.tap_features = sizes.tap_features
        features = sizes.features
        generator = torch.Generator().manual_seed(seed)

        def uniform(shape: tuple[int, ...], bound: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(
                torch.empty(shape).uniform_(-bound, bound, generator=generator)
            )

        self.embedding = uniform((vocabulary_size, embedding), embedding_range)
        with torch.no_grad():
            self.embedding[PADDING] = 0
        # The bound of torch's own layers: 1 / sqrt(number of inputs). A row's filter has `width`
        # taps. `forward` explains the order of the rows.
        filters = uniform((sum(self.tap_features), embedding), 1.0)
        scale = torch.tensor(
            [(embedding * width) ** -0.5 for width in self.sizes["widths"] for _ in range(maps)]
        )
        with torch.no_grad():
            filters.mul_(torch.cat([scale[:count] for count in self.tap_features])[:, None])
        self.filters = filters
        self.filter_bias = torch.nn.Parameter(torch.zeros(features))
        self.output_weight = uniform((classes, features), features**-0.5)
        self.output_bias = torch.nn.Parameter(torch.zeros(classes))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 (B, classes), for word numbers (B, L), int32 or int64; L >= 1.

        Each sentence is treated as surrounded by endless padding, so its logits do not depend on
        the padding of its row. The result equals one convolution for each width, zero-padded by
        width - 1 on both sides, the maximum over positions and 0, then bias and ReLU.

        It is computed as one product of the embedded words with all taps of all filters. The blocks
        of columns of the product are then added, tap k shifted by k positions. A tap's block has
        the features of all filters that have this tap, the widest filters first.

        A feature is a row of the filters. A small mini-batch does not change all rows: at
        mini-batch 1, half of the peaks are below zero or dropped out. Such rows need not be pushed.

        At mini-batch 2 with one thread, forward and backward take half the time of a `conv1d` for
        each width for sentences of 12 words, and three quarters for 25 words. Windows that are
        gathered for a matrix product lie between. At mini-batch 32 this takes a fifth more time
        than `conv1d`.
        """
        batch, length = tokens.shape
        embedded = self.lookup(tokens, self.embedding, PADDING, sparse=self.sparse)
        words = embedded.reshape(batch * length, -1)
        products = self.linear(words, self.filters).view(batch, length, -1)
        return self._output(self._windows(products).amax(dim=1))

    def packed(self, tokens: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return the same logits for sentences one after the other: less padding in large batches.

        tokens: (N,), each sentence followed by `widest` - 1 PADDING. rows: int64 (N,), the sentence
        of each token, from 0. count: number of sentences.
        """
        embedded = self.lookup(tokens, self.embedding, PADDING, sparse=self.sparse)
        # The padding keeps each window within its sentence.
        windows = self._windows(self.linear(embedded, self.filters)[None])[0, : len(tokens)]
        # Not segment_reduce, whose gradient is wrong where windows are equal (torch 2.13).
        peaks = windows.new_zeros(count, windows.shape[1])
        peaks = peaks.scatter_reduce(0, rows[:, None].expand_as(windows), windows, "amax")
        return self._output(peaks)

    def _windows(self, products: torch.Tensor) -> torch.Tensor:
        """Add the taps of each window: (B, L, all taps) -> (B, L + widest - 1, filters)."""
        features = self.tap_features[0]
        windows: torch.Tensor | None = None
        for tap, block in enumerate(torch.split(products, self.tap_features, dim=2)):
            shifted = functional.pad(
                block, (0, features - block.shape[2], tap, self.widest - 1 - tap)
            )
            windows = shifted if windows is None else windows + shifted
        assert windows is not None
        return windows

    def _output(self, peaks: torch.Tensor) -> torch.Tensor:
        """Return logits from the maxima over positions."""
        # ReLU and bias commute with the maximum. A window of padding only is 0 without its bias.
        peaks = peaks.clamp(min=0)
        hidden = functional.dropout(
            functional.relu(peaks + self.filter_bias), self.dropout, self.training
        )
        return functional.linear(hidden, self.output_weight, self.output_bias)


def evaluate(
    model: SentenceClassifier, texts: Encoded, labels: NDArray[np.int64]
) -> tuple[float, float]:
    """Accuracy (0 to 1) and mean cross-entropy (nats) without dropout, computed by NumPy.

    labels: (n,). A sentence with a negative label is wrong and has no loss. If all have one, the
    loss is NaN. Raises ValueError if there is no sentence.
    """
    if not len(texts) or len(texts) != len(labels):
        raise ValueError(f"cannot evaluate {len(texts)} sentences with {len(labels)} labels")
    tensors = {name: one.detach().cpu().numpy() for name, one in model.named_parameters()}
    (found,) = Classifier(Sizes(**model.sizes), tensors).parts(texts)
    return scores(np.exp(found), labels)
