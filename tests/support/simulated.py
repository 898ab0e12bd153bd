"""Simulated runs, and the calls of a training in them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from gadei_ps.simulate.outcome import Outcome
from gadei_ps.simulate.run_times import RecordedTimes, RunTimes
from gadei_ps.simulate.setting import Setting
from gadei_ps.simulate.simulator import Simulator
from gadei_ps.sync import parse


def simulate(spec: str, times: RunTimes | Sequence[Sequence[float]], **how: Any) -> Outcome:
    """One run; times: rows of run times by iteration, or a source."""
    source = times if isinstance(times, RunTimes) else RecordedTimes(np.array(times, np.float64))
    learners = how.pop("learners", None)
    if learners is None:
        assert not isinstance(times, RunTimes)
        learners = len(times[0])
    training = how.pop("training", None)
    return Simulator(parse(spec), Setting(learners, source, **how), training).run()


class Watch:
    """A training that moves nothing: records its calls, and computes the staleness itself."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.published: Counter[int] = Counter()
        self.applied: list[tuple[int, ...]] = []
        self.dropped: Counter[int] = Counter()
        self.progress: list[float] = []
        self.staleness: list[int] = []
        self._version = 0
        self._newest: dict[int, int] = {}
        self._pulled: dict[int, int] = {}
        self._rings: dict[int, deque[int]] = defaultdict(deque)

    def pull(self, learners: Sequence[int]) -> None:
        self._newest.update(dict.fromkeys(learners, self._version))

    def begin(self, learners: Sequence[int], iterations: Sequence[int]) -> None:
        self.begun += zip(learners, iterations, strict=True)
        self._pulled.update({k: self._newest[k] for k in learners})

    def publish(self, learner: int) -> None:
        self.published[learner] += 1
        self._rings[learner].append(self._pulled.pop(learner))

    def apply(self, learners: Sequence[int], *, on_arrival: bool) -> None:
        self.applied.append(tuple(learners))
        self.staleness += [self._version - self._rings[k].popleft() for k in learners]
        self._version += len(learners)

    def drop(self, learners: Sequence[int]) -> None:
        self.dropped.update(learners)
        for k in learners:
            self._rings[k].popleft()

    def add_point(self, now: float, progress: float, applied: int) -> None:
        self.progress.append(progress)
        assert applied == self._version
