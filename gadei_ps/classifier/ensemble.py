"""The default classifier in PyTorch: three small networks that share a mini-batch and nothing else.

    wide   TF-IDF of n-grams (B, F) -> logits                                     F x K, from zero
    bag    the same -> 64 -> ReLU -> logits                                       F x 64
    cnn    words -> 64 -> filters of width 2, 3, 4, 64 of each -> maximum -> logits   (network.py)

Each part has a loss of its own, and each is better where the others are weak: `wide` with many
classes, `bag` with few rows, `cnn` where the order of words matters. `calibration.py` mixes them.
A mini-batch reads and changes only the rows of its own n-grams and words. On the host, learners use
gradients.py instead.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from gadei_ps.classifier.calibration import PRIOR
from gadei_ps.classifier.features import Rows
from gadei_ps.classifier.gradients import MARGIN, first_weights
from gadei_ps.classifier.inference import FEATURE_DROPOUT, HIDDEN_DROPOUT, EnsembleSizes, Floats
from gadei_ps.classifier.network import Linear, Lookup, SentenceClassifier

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
        self.cnn = SentenceClassifier(
            **asdict(sizes.cnn), sparse=True, linear=linear, lookup=lookup
        )
        first = {name: torch.from_numpy(one) for name, one in first_weights(sizes, seed).items()}

        def parameter(name: str) -> torch.nn.Parameter:
            return torch.nn.Parameter(first[name])

        self.wide, self.wide_bias = parameter("wide"), parameter("wide_bias")
        self.bag, self.bag_bias = parameter("bag"), parameter("bag_bias")
        self.output_weight, self.output_bias = parameter("output_weight"), parameter("output_bias")
        self.load_state_dict(first)

    def forward(self, texts: Rows, rows: NDArray[np.int64]) -> Parts:
        """Compute the logits of these rows: three tensors, float32 (rows, classes)."""
        features, starts, values = texts.bag(rows)
        tokens, word_starts = texts.packed(rows, self.cnn.widest - 1)
        # A GPU would fetch repeated rows of the tables repeatedly.
        distinct, places = np.unique(features, return_inverse=True)
        of_tokens = np.repeat(np.arange(len(rows)), np.diff(word_starts))
        at, place, start, value, token, of_token = (
            torch.from_numpy(one).to(self.wide.device, non_blocking=True)
            for one in (distinct, places, starts[:-1], values, tokens, of_tokens)
        )

        def summed(table: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            found = self.lookup(at, table, sparse=True)
            return functional.embedding_bag(
                place, found, start, mode="sum", per_sample_weights=value
            )

        wide = summed(self.wide, value) + self.wide_bias
        value = functional.dropout(value, FEATURE_DROPOUT, self.training)
        hidden = functional.relu(summed(self.bag, value) + self.bag_bias)
        hidden = functional.dropout(hidden, HIDDEN_DROPOUT, self.training)
        bag = functional.linear(hidden, self.output_weight, self.output_bias)
        return wide, bag, self.cnn.packed(token, of_token, len(rows))

    def penalty(self, texts: Rows, rows: NDArray[np.int64], frequency: Floats) -> torch.Tensor:
        """Return what these rows pay for the weights of `wide`: see gradients.py."""
        features, _, values = texts.bag(rows)
        distinct, counts = np.unique(features[values != 0], return_counts=True)
        paid = (counts / frequency[distinct] / (2 * len(rows) * MARGIN**2)).astype(np.float32)
        at, share = (
            torch.from_numpy(one).to(self.wide.device, non_blocking=True)
            for one in (distinct, paid)
        )
        return share @ self.lookup(at, self.wide, sparse=True).square().sum(dim=1)


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
