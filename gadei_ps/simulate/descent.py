"""Stochastic gradient descent in virtual time: loss against time, not only gradients against time.

A gradient uses the weights that the learner pulled when its iteration began. A wave's gradient is
the mean of its mini-batches': the last uses the weights pulled before it, the others those of the
pull in the wave before. A gradient is computed when it is applied, so dropped gradients cost
nothing. A learner's i-th iteration draws the same mini-batch under every model. Weights are never
changed in place: learners share the versions that they have pulled, so the number of learners
bounds the memory, not the length of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gadei_ps.simulate.draws import Stream, words
from gadei_ps.simulate.problems import Problem, Rows, Weights
from gadei_ps.simulate.setting import Setting


class _Begun(NamedTuple):
    """A gradient. last: the weights of its last mini-batch; first: of those before."""

    first: Weights
    last: Weights
    iteration: int


@dataclass(frozen=True)
class Learning:
    """Settings of the training of a run's weights.

    batch: number of samples of a mini-batch, drawn with replacement. lr: rate for the mean of a
    superstep's gradients; None: the problem's. lr_on_arrival: rate for a gradient that is applied
    alone; None: lr / learners, as in the paper on cutoffs (Teng and Wood 2018, figure 4), so that n
    gradients move the weights as far as one mean of n. points: the most points of the curve. decay:
    L2 penalty; decay times the weights is added to each gradient.
    """

    problem: Problem
    batch: int = 32
    lr: float | None = None
    lr_on_arrival: float | None = None
    points: int = 100
    decay: float = 0.0


class Descent:
    """Trains the weights of one run.

    wave: number of mini-batches of one push, whose updates are added (WSP).
    """

    def __init__(self, learning: Learning, setting: Setting, wave: int = 1) -> None:
        problem = learning.problem
        self.weights = problem.initial()
        self.curve: list[dict[str, float]] = []
        self._problem = problem
        self._seed = setting.seed
        self._batch = learning.batch
        self._lr = problem.lr if learning.lr is None else learning.lr
        alone = learning.lr_on_arrival
        self._lr_on_arrival = self._lr / setting.learners if alone is None else alone
        self._wave = wave
        self._points = learning.points
        self._decay = learning.decay
        self._pulled: dict[int, Weights] = {}
        self._computing: dict[int, tuple[Weights, int]] = {}
        self._published: dict[int, deque[_Begun]] = {}
        self._next_point = 0

    def pull(self, learners: Sequence[int]) -> None:
        """Let these learners pull: they compute from the weights as they are now."""
        for learner in learners:
            self._pulled[learner] = self.weights

    def begin(self, learners: Sequence[int], iterations: Sequence[int]) -> None:
        """Begin gradients of these learners, with the iterations of these numbers."""
        for learner, iteration in zip(learners, iterations, strict=True):
            self._computing[learner] = self._pulled[learner], iteration

    def publish(self, learner: int) -> None:
        """Publish the gradient that the learner began last, computed or given up."""
        first, iteration = self._computing.pop(learner)
        begun = _Begun(first, self._pulled[learner], iteration)
        self._published.setdefault(learner, deque()).append(begun)

    def drop(self, learners: Sequence[int]) -> None:
        """Drop these learners' oldest gradients."""
        for learner in learners:
            self._taken(learner)

    def apply(self, learners: Sequence[int], *, on_arrival: bool) -> None:
        """Apply the mean of these learners' oldest gradients."""
        # Learners that pulled the same weights count as one large mini-batch.
        alike: dict[int, tuple[Weights, list[Rows]]] = {}
        for learner in learners:
            begun = self._taken(learner)
            rows = self._rows(learner, begun.iteration)
            cut = len(rows) - self._batch if begun.first is not begun.last else 0
            for weights, part in ((begun.first, rows[:cut]), (begun.last, rows[cut:])):
                if len(part):
                    alike.setdefault(id(weights), (weights, []))[1].append(part)
        total = np.zeros_like(self.weights)
        for weights, parts in alike.values():
            together = np.concatenate(parts)
            share = len(together) / (len(learners) * self._batch * self._wave)
            total += share * self._problem.gradient(weights, together)
            total += share * self._decay * weights
        rate = (self._lr_on_arrival if on_arrival else self._lr) * self._wave
        self.weights = self.weights - rate * total

    def add_point(self, now: float, progress: float, applied: int) -> None:
        """Add a point to the curve if one is due. progress: share of the run that is done."""
        if progress >= self._next_point / self._points:
            # The small number makes up for rounding errors.
            self._next_point = int(progress * self._points + 1e-6) + 1
            losses = self._problem.loss(self.weights)
            self.curve.append({"seconds": now, "gradients": applied * self._wave, **losses})

    def _taken(self, learner: int) -> _Begun:
        """Remove and return the learner's oldest gradient."""
        waiting = self._published[learner]
        begun = waiting.popleft()
        if not waiting:
            del self._published[learner]
        return begun

    def _rows(self, learner: int, iteration: int) -> Rows:
        """The samples of the mini-batches of one push."""
        size = self._batch * self._wave
        numbers = np.arange(iteration * self._batch, iteration * self._batch + size)
        drawn = words(self._seed, Stream.BATCH, np.array([learner]), numbers)
        return (drawn % np.uint64(self._problem.samples)).astype(np.int64)
