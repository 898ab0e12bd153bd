"""The default classifier: three small networks that share a mini-batch and nothing else.

    wide   TF-IDF of n-grams (B, F) -> logits                                     F x K, from zero
    bag    the same -> 64 -> ReLU -> logits                                       F x 64
    cnn    words -> 64 -> filters of width 2, 3, 4, 64 of each -> maximum -> logits   (network.py)

Each part has a loss of its own, and each is better where the others are weak: `wide` with many
classes, `bag` with few rows, `cnn` where the order of words matters. `calibration.py` mixes them.
A mini-batch reads and changes only the rows of its own n-grams and words.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from gadei_ps.classifier.calibration import PRIOR
from gadei_ps.classifier.features import Rows
from gadei_ps.classifier.inference import EnsembleSizes
from gadei_ps.classifier.network import Linear, Lookup, SentenceClassifier

FEATURE_DROPOUT: Final = 0.3
HIDDEN_DROPOUT: Final = 0.2
MARGIN: Final = 2.0
"""Logits of `wide` that have no hinge loss. Its share is then about as large as the others'."""

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits of each part."""


class Losses(NamedTuple):
    """Losses of a mini-batch.

    minimized: the sum of the parts' losses, whose gradients are independent. reported: the
    cross-entropy of the prediction (nats), by parts with equal shares, to be compared with that of
    the held-out rows.
    """

    minimized: torch.Tensor
    reported: torch.Tensor


class Ensemble(torch.nn.Module):
    """The three networks.

    Parameters besides those of `cnn`, all float32:

    wide           (features, classes)
    wide_bias      (classes,)
    bag            (features, hidden)
    bag_bias       (hidden,)
    output_weight  (classes, hidden)
    output_bias    (classes,)

    The initial weights depend only on the sizes and `seed`. `linear` and `lookup`: as in
    SentenceClassifier.
    """

    def __init__(
        self,
        sizes: EnsembleSizes,
        *,
        seed: int = 0,
        linear: Linear = functional.linear,
        lookup: Lookup = functional.embedding,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.lookup = lookup
        generator = torch.Generator().manual_seed(seed)
        features, hidden, classes = sizes.features, sizes.hidden, sizes.classes

        def uniform(rows: int, columns: int, bound: float) -> torch.nn.Parameter:
            values = torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)
            return torch.nn.Parameter(values)

        def zero(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape))

        self.wide, self.wide_bias = zero(features, classes), zero(classes)
        self.bag, self.bag_bias = uniform(features, hidden, 1 / hidden), zero(hidden)
        self.output_weight = uniform(classes, hidden, hidden**-0.5)
        self.output_bias = zero(classes)
        self.cnn = SentenceClassifier(
            **sizes.cnn.as_dict(), seed=seed, sparse=True, linear=linear, lookup=lookup
        )

    @property
    def is_on_host(self) -> bool:
        """Whether all rows of the tables can be read where they are."""
        return self.wide.device.type == "cpu"

    def forward(self, texts: Rows, rows: NDArray[np.int64]) -> Parts:
        """Compute the logits of these rows: three tensors, float32 (rows, classes)."""
        device = self.wide.device
        features, starts, values = texts.bag(rows)
        distinct = places = features
        if not self.is_on_host:  # which would fetch repeated rows repeatedly
            distinct, places = np.unique(features, return_inverse=True)
        at, place, start, value = (
            torch.from_numpy(one).to(device, non_blocking=True)
            for one in (distinct, places, starts, values)
        )

        def summed(table: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            direct = self.is_on_host
            found = table if direct else self.lookup(at, table, sparse=True)
            return functional.embedding_bag(
                place, found, start, mode="sum", sparse=direct, per_sample_weights=value
            )

        wide = summed(self.wide, value) + self.wide_bias
        value = functional.dropout(value, FEATURE_DROPOUT, self.training)
        hidden = functional.relu(summed(self.bag, value) + self.bag_bias)
        hidden = functional.dropout(hidden, HIDDEN_DROPOUT, self.training)
        bag = functional.linear(hidden, self.output_weight, self.output_bias)
        tokens, lengths = (
            torch.from_numpy(one).to(device, non_blocking=True)
            for one in texts.packed(rows, self.cnn.widest - 1)
        )
        return wide, bag, self.cnn.packed(tokens, lengths)


def losses(parts: Parts, labels: torch.Tensor) -> Losses:
    """Return the losses of these texts: the squared hinge of `wide`, else cross-entropies."""
    wide, *others = parts
    found = [functional.cross_entropy(one, labels) for one in others]
    found.append(squared_hinge(wide, labels))
    return Losses(torch.stack(found).sum(), functional.cross_entropy(_mixed(parts), labels))


def squared_hinge(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean squared hinge loss of each label against all others, as of a linear SVM."""
    signs = torch.full_like(logits, -1).scatter_(1, labels[:, None], 1)
    return functional.relu(1 - signs * logits / MARGIN).square().sum(dim=1).mean()


def multi_label_losses(parts: Parts, truth: torch.Tensor) -> Losses:
    """Return the losses of texts of several labels, all cross-entropies (nats).

    truth: 0 or 1, (rows, classes).
    """

    def loss(logits: torch.Tensor) -> torch.Tensor:
        summed = functional.binary_cross_entropy_with_logits(logits, truth, reduction="sum")
        return summed / len(truth)

    return Losses(torch.stack([loss(one) for one in parts]).sum(), loss(_mixed(parts)))


def _mixed(parts: Parts) -> torch.Tensor:
    """Return logits of the prediction. Shares are fitted after training: they are equal here."""
    return torch.stack(parts).detach().sum(dim=0) * (PRIOR / len(parts))
