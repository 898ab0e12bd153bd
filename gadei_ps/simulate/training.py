"""Stochastic gradient descent in virtual time: loss against time, not only gradients against time.

A gradient uses the weights that the learner pulled when its iteration began. It is computed when it
is applied, so dropped gradients cost nothing. A learner's i-th iteration draws the same mini-batch
under every model. Weights are never changed in place: learners share the versions that they have
pulled, so the number of learners bounds the memory, not the length of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gadei_ps.simulate.draws import Stream, words
from gadei_ps.simulate.problems import Problem, Rows, Weights


class _Begun(NamedTuple):
    weights: Weights
    iteration: int


class Descent:
    """Trains the weights of one run.

    batch: number of samples of a mini-batch, drawn with replacement. lr: rate for the mean of a
    superstep's gradients. lr_on_arrival: rate for a gradient that is applied alone. The paper on
    cutoffs (Teng and Wood 2018, figure 4) uses lr / learners there, so that n gradients move the
    weights as far as one mean of n. wave: number of mini-batches of one push, whose updates are
    added (WSP). points: the most points of the curve. decay: L2 penalty; decay times the
    weights is added to each gradient.
    """

    def __init__(
        self,
        problem: Problem,
        seed: int,
        *,
        batch: int,
        lr: float,
        lr_on_arrival: float,
        wave: int = 1,
        points: int = 100,
        decay: float = 0.0,
    ) -> None:
        self.weights = problem.initial()
        self.curve: list[dict[str, float]] = []
        self._problem = problem
        self._seed = seed
        self._batch = batch
        self._lr, self._lr_on_arrival = lr, lr_on_arrival
        self._wave = wave
        self._points = points
        self._decay = decay
        self._computing: dict[int, _Begun] = {}
        self._published: dict[int, deque[_Begun]] = {}
        self._next_point = 0

    def begin(self, learners: Sequence[int], iterations: Sequence[int]) -> None:
        """See server.Training."""
        for learner, iteration in zip(learners, iterations, strict=True):
            self._computing[learner] = _Begun(self.weights, iteration)

    def publish(self, learner: int) -> None:
        """See server.Training."""
        self._published.setdefault(learner, deque()).append(self._computing.pop(learner))

    def drop(self, learners: Sequence[int]) -> None:
        """See server.Training."""
        for learner in learners:
            self._taken(learner)

    def apply(self, learners: Sequence[int], *, on_arrival: bool) -> None:
        """See server.Training."""
        # Learners that pulled the same weights count as one large mini-batch.
        alike: dict[int, tuple[Weights, list[Rows]]] = {}
        for learner in learners:
            begun = self._taken(learner)
            rows = self._rows(learner, begun.iteration)
            alike.setdefault(id(begun.weights), (begun.weights, []))[1].append(rows)
        total = np.zeros_like(self.weights)
        for weights, parts in alike.values():
            share = len(parts) / len(learners)
            total += share * self._problem.gradient(weights, np.concatenate(parts))
            total += share * self._decay * weights
        rate = (self._lr_on_arrival if on_arrival else self._lr) * self._wave
        self.weights = self.weights - rate * total

    def look(self, now: float, progress: float, applied: int) -> None:
        """Adds a point to the curve if one is due."""
        if progress >= self._next_point / self._points:
            # The small number makes up for rounding errors.
            self._next_point = int(progress * self._points + 1e-6) + 1
            told = self._problem.loss(self.weights)
            self.curve.append({"seconds": now, "gradients": applied * self._wave, **told})

    def _taken(self, learner: int) -> _Begun:
        """Removes and returns the learner's oldest gradient."""
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
