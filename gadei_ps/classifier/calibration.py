"""Calibrated probabilities of a classifier of one part or several, and a threshold for "none".

    log probabilities of the parts (P, n, K), shares (P,) -> softmax(sum of share * part)

The sum of the shares is the inverse of a temperature. They are fitted on held-out texts, and so is
the threshold: the probability below which a text has none of the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
LossAt = Callable[[Doubles], tuple[float, Doubles, Doubles]]
"""Loss at given shares, with its gradient and Hessian matrix."""

PRIOR: Final = 1.2
"""Sum of the shares to which few held-out texts are drawn, as much as by one unit of loss."""
REFUSED: Final = 0.05
"""Share of held-out texts that the threshold refuses at most."""
STEPS: Final = 50
HALVINGS = 60  # at most, of a step that does not go downhill
BINS: Final = 15


@dataclass(frozen=True)
class Calibration:
    """Shares of the parts, and the threshold (0 to 1).

    multi_label: whether a text may have several labels. Then the parts are logits, each label has a
    probability of its own, and a text has the labels that reach the threshold.
    """

    shares: tuple[float, ...] = (1.0,)
    threshold: float = 0.0
    multi_label: bool = False

    def probabilities(self, parts: Floats) -> Floats:
        """Return probabilities (n, classes) from log probabilities (parts, n, classes)."""
        mixed = np.tensordot(np.asarray(self.shares, np.float32), parts, axes=1)
        return sigmoid(mixed) if self.multi_label else softmax(mixed)

    def as_dict(self) -> dict[str, Any]:
        """Return the values as JSON."""
        found = {"shares": list(self.shares), "threshold": self.threshold}
        return found | ({"multi_label": True} if self.multi_label else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], parts: int) -> Calibration:
        """Return the reverse of `as_dict`. Raises ValueError unless it fits so many parts."""
        try:
            shares = tuple(float(one) for one in values["shares"])
            threshold = float(values["threshold"])
        except (KeyError, TypeError, ValueError):
            raise ValueError('the calibration lacks "shares" or "threshold"') from None
        if len(shares) != parts or not all(0 < one < np.inf for one in shares):
            raise ValueError(f"the calibration has shares {shares}, not {parts} above 0")
        return cls(shares, threshold, values.get("multi_label") is True)


def fit(parts: Floats, labels: NDArray[np.int64]) -> Calibration:
    """Fit shares and threshold to held-out texts: labels (n,), of log probabilities (parts, n, K).

    REFUSED of the texts are below the threshold, or fewer: it is at most halfway between chance and
    1. Without that limit, a model that is nearly certain of all held-out texts would refuse a text
    of which it is slightly less certain.
    """
    values = parts.astype(np.float64)
    truth = values[:, np.arange(len(labels)), labels]

    def loss_at(shares: Doubles) -> tuple[float, Doubles, Doubles]:
        mixed = np.tensordot(shares, values, axes=1)
        most = mixed.max(axis=1, keepdims=True)
        chosen = np.exp(mixed - most)
        sums = chosen.sum(axis=1, keepdims=True)
        chosen /= sums
        loss = (most + np.log(sums)).sum() - (shares @ truth).sum()
        weighted = values * chosen
        mean = weighted.sum(axis=2)
        hessian = _products(weighted, values) - mean @ mean.T
        return float(loss), (mean - truth).sum(axis=1), hessian

    shares = _fitted(loss_at, len(parts))
    surest = Calibration(shares).probabilities(parts).max(axis=1)
    halfway = (1 / parts.shape[2] + 1) / 2
    return Calibration(shares, min(float(np.quantile(surest, REFUSED)), halfway))


def fit_multi_label(parts: Floats, truth: Floats) -> Calibration:
    """Do the same for texts of several labels: truth (n, K), 0 or 1, of logits (parts, n, K).

    The threshold is that of the best micro-averaged F1 score.
    """
    values = parts.astype(np.float64)

    def loss_at(shares: Doubles) -> tuple[float, Doubles, Doubles]:
        mixed = np.tensordot(shares, values, axes=1)
        chosen = sigmoid(mixed)
        loss = np.logaddexp(0, mixed).sum() - (mixed * truth).sum()
        gradient = (values * (chosen - truth)).sum(axis=(1, 2))
        hessian = _products(values * (chosen * (1 - chosen)), values)
        return float(loss), gradient, hessian

    found = Calibration(_fitted(loss_at, len(parts)), multi_label=True)
    probabilities = found.probabilities(parts)
    tried = sorted(range(1, 20), key=lambda n: abs(n - 10))  # of equal ones, that nearest to 1/2
    best = max(tried, key=lambda n: micro_f1(probabilities >= n / 20, truth))
    return replace(found, threshold=best / 20)


def _fitted(loss_at: LossAt, count: int) -> tuple[float, ...]:
    """Find the shares of the least loss, by Newton's method on their logarithms.

    The loss has the squared distances from the logarithms of equal shares added, so that shares of
    few texts stay near them.
    """
    prior = np.log(PRIOR / count)
    theta = np.full(count, prior)
    loss, gradient, hessian = loss_at(np.exp(theta))
    for _ in range(STEPS):
        shares = np.exp(theta)
        # The Hessian matrix without the term that may be negative: each step then goes downhill.
        matrix = np.outer(shares, shares) * hessian + 2 * np.eye(count)
        step = np.linalg.solve(matrix, shares * gradient + 2 * (theta - prior))
        now = loss + ((theta - prior) ** 2).sum()
        for _ in range(HALVINGS):
            tried = theta - step
            loss, gradient, hessian = loss_at(np.exp(tried))
            gained = now - loss - ((tried - prior) ** 2).sum()
            if gained >= 0 or np.abs(step).max() < 1e-6:
                break
            step /= 2
        theta = tried
        if gained < 1e-6:
            break
    return tuple(float(one) for one in np.exp(theta))


def _products(ones: Doubles, others: Doubles) -> Doubles:
    """Return the sums of the products of each with each: (parts, parts)."""
    found: Doubles = ones.reshape(len(ones), -1) @ others.reshape(len(others), -1).T
    return found


def micro_f1(chosen: NDArray[np.bool_], truth: Floats) -> float:
    """Compute the F1 score of all labels together."""
    both = float((chosen * truth).sum())
    return 2 * both / max(1.0, float(chosen.sum() + truth.sum()))


def sigmoid(logits: NDArray[Any]) -> NDArray[Any]:
    """Return probabilities of independent labels."""
    found: NDArray[Any] = 0.5 * (1 + np.tanh(0.5 * logits))
    return found


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Return probabilities along the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    found: NDArray[Any] = powers / powers.sum(axis=-1, keepdims=True)
    return found


def log_softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Return log probabilities along the last axis."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    found: NDArray[Any] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return found


def calibration_error(probabilities: Floats, labels: NDArray[np.int64]) -> float:
    """Expected calibration error: mean distance of confidence and accuracy, in BINS bins."""
    surest, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bins = np.minimum((surest * BINS).astype(np.int64), BINS - 1)
    sums = np.bincount(bins, right - surest.astype(np.float64), minlength=BINS)
    return float(np.abs(sums).sum() / len(labels))


def scores(probabilities: Floats, labels: Sequence[int] | NDArray[np.int64]) -> tuple[float, float]:
    """Accuracy (0 to 1) and mean cross-entropy (nats).

    A negative label counts as wrong and has no loss; if all are negative, the loss is NaN.
    """
    truth = np.asarray(labels)
    known = truth >= 0
    chosen = probabilities[known, truth[known]]
    loss = float(-np.log(np.maximum(chosen, 1e-30)).mean()) if known.any() else float("nan")
    return float((probabilities.argmax(axis=1) == truth).mean()), loss


def multi_label_scores(
    probabilities: Floats, truth: Floats, threshold: float, unseen: NDArray[np.bool_] | None = None
) -> tuple[float, float]:
    """Return the share of texts whose labels are all right, and the mean loss (nats).

    unseen: texts that count as wrong, because `truth` lacks some of their labels.
    """
    right = ((probabilities >= threshold) == (truth > 0)).all(axis=1)
    if unseen is not None:
        right &= ~unseen
    clipped = np.clip(probabilities, 1e-7, 1 - 1e-7)
    losses = -(truth * np.log(clipped) + (1 - truth) * np.log(1 - clipped)).sum(axis=1)
    return float(right.mean()), float(losses.mean())
