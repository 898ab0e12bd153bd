"""Trains the weights of all replicas of all groups, in the order of virtual time.

Each replica descends from its group's weights, by mini-batches of its own subset of the training
set. What is sent within a group in fewer bits than float32 is the difference to the last common
weights, with error feedback; what is sent between groups is the model, with error feedback as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gadei_ps.groups import compress, parts, reading
from gadei_ps.groups.compress import Feedback, Wire
from gadei_ps.groups.parts import Floats
from gadei_ps.simulate.draws import IntArray
from gadei_ps.simulate.problems import Problem


class NotFinite(ArithmeticError):
    """The weights of a group have left the range of float32."""


def _finite(values: Floats) -> Floats:
    if not np.isfinite(values).all():
        raise NotFinite
    return values


class _Group:
    """The weights of one group, its samples, and those that each replica has left in this pass."""

    def __init__(self, weights: Floats, rule: str, samples: IntArray, size: int) -> None:
        self.weights = weights.copy()
        self.rule = reading.parse(rule)
        self.rule.begin(self.weights)
        self.samples = samples
        self.passes = 0
        self.left = [samples[:0]] * size
        self.within: dict[int, Feedback] = {}
        self.sums: Feedback | None = None
        self.between: Feedback | None = None


class GroupTraining:
    """Weights and data of one run.

    sizes: replicas of each group. lr: rate of their plain gradient descent. batch: samples of a
    mini-batch; the last one of a pass may be smaller.
    """

    def __init__(
        self,
        problem: Problem,
        rule: str,
        sizes: Sequence[int],
        *,
        batch: int,
        lr: float,
        wire: Wire,
        seed: int,
    ) -> None:
        self.problem, self.batch, self.wire, self.seed = problem, batch, wire, seed
        self.lr = np.float32(lr)
        self.samples = 0
        self.curve: list[dict[str, float]] = []
        weights = np.asarray(problem.initial(), np.float32)
        # The samples are dealt like cards, so that each group has samples of all kinds.
        ends = np.cumsum(sizes) * problem.samples // sum(sizes)
        dealt = np.random.default_rng([seed, 0]).permutation(problem.samples)
        self._groups = [
            _Group(weights, rule, samples, size)
            for samples, size in zip(np.split(dealt, ends[:-1]), sizes, strict=True)
        ]

    def round(self, group: int, k: int) -> Floats:
        """Train each replica for k mini-batches, or for what its subset has left in this pass.

        Returns the aggregate, which is weighted by the samples that each has trained with. Raises
        NotFinite, as `end_round` does.
        """
        one = self._groups[group]
        if not any(map(len, one.left)):
            chance = np.random.default_rng([self.seed, 1, group, one.passes])
            order = one.samples[chance.permutation(len(one.samples))]
            one.left = np.array_split(order, len(one.left))
            one.passes += 1
        models, counts = [], []
        for replica, left in enumerate(one.left):
            rows, one.left[replica] = np.split(left, [k * self.batch])
            models.append(self._descend(one, replica, rows))
            counts.append(len(rows))
        self.samples += sum(counts)
        aggregate = np.empty_like(one.weights)
        parts.aggregate(models, parts.shares(counts), aggregate)
        if self.wire is not Wire.FLOAT32:
            one.sums = one.sums or Feedback(len(aggregate), self.wire)
            aggregate = one.weights + self._sent(one.sums, aggregate - one.weights)
        return _finite(aggregate)

    def end_round(self, group: int, aggregate: Floats, arrived: Sequence[Floats]) -> Floats:
        """The group continues with what its rule makes of these. Returns what it broadcasts."""
        one = self._groups[group]
        own = aggregate.copy()
        one.rule.end_round(own, arrived)
        one.weights = _finite(own)
        model = own if one.rule.sends_result else aggregate
        if self.wire is Wire.FLOAT32:
            return model
        one.between = one.between or Feedback(len(model), self.wire)
        return self._sent(one.between, model)

    def look(self, now: float) -> None:
        """Add a point to the curve: the mean, over the groups, of loss and accuracy."""
        losses = [self.problem.loss(one.weights) for one in self._groups]
        point = {key: float(np.mean([each[key] for each in losses])) for key in losses[0]}
        self.curve.append({"seconds": now, "samples": float(self.samples), **point})

    def outcome(self) -> dict[str, float]:
        """Loss and accuracy at the end: of the groups, and of the mean of their models."""
        losses = [self.problem.loss(one.weights) for one in self._groups]
        mean = np.empty_like(self._groups[0].weights)
        parts.aggregate(
            [one.weights for one in self._groups], parts.shares([0] * len(losses)), mean
        )
        of_mean = self.problem.loss(mean)
        accuracies = [each["accuracy"] for each in losses]
        return {
            "loss": float(np.mean([each["loss"] for each in losses])),
            "accuracy": float(np.mean(accuracies)),
            "accuracy_least": min(accuracies),
            "accuracy_most": max(accuracies),
            "loss_of_mean": of_mean["loss"],
            "accuracy_of_mean": of_mean["accuracy"],
            "passes": self.samples / self.problem.samples,
        }

    def _descend(self, one: _Group, replica: int, rows: np.ndarray) -> Floats:
        weights = one.weights.copy()
        for begin in range(0, len(rows), self.batch):
            gradient = self.problem.gradient(weights, rows[begin : begin + self.batch])
            weights -= self.lr * np.asarray(gradient, np.float32)
        if self.wire is Wire.FLOAT32:
            return weights
        sender = one.within.setdefault(replica, Feedback(len(weights), self.wire))
        return one.weights + self._sent(sender, weights - one.weights)

    def _sent(self, sender: Feedback, values: Floats) -> Floats:
        """Return these values as receivers get them."""
        return sender.encode(
            _finite(values), np.empty(compress.size(len(values), self.wire), np.uint8)
        )
