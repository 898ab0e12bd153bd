"""The outer optimizer: Nesterov's momentum on the difference that a round has made."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from gadei_ps.groups.parts import Floats
from gadei_ps.groups.rules import Rule, blocks, number
from gadei_ps.sync.parameters import Parameter, whole


class Outer(Rule):
    """DiLoCo's outer step (arXiv 2311.08105), and its delayed form for models that come late.

    The difference of a model is the group's last common weights minus that model. The difference of
    the own aggregate is fresh. Models of other groups give differences that are delayed: they began
    from weights that this group never had. g is the mean of all differences of a round.

    delay = 0: one step of Nesterov's momentum with g, as torch.optim.SGD makes it:

        momentum <- m * momentum + g
        weights  <- last common weights - rate * (g + m * momentum)

    delay = N: delayed Nesterov (arXiv 2401.09135, algorithm 3 with c = 0). Every round steps by
    rate * g. The momentum moves once every N differences, by their mean, and is added in that round
    alone. So stale differences do not gather speed. The paper divides each difference by N, because
    a server gets N of them for one synchronous step; here a round's differences are averaged, so
    that a group whose neighbours are silent keeps its own progress.

    With rate 1 and momentum 0 the weights become the mean of the aggregate and what has arrived.
    """

    name = "outer"
    forms = ("outer:0.7:0.9", "outer:rate=0.7,momentum=0.9,delay=4")
    parameters = MappingProxyType(
        {
            "rate": Parameter(number(0, 10).convert, required=False),
            "momentum": Parameter(number(0, 0.9999).convert, required=False),
            "delay": Parameter(whole(0, 10_000), required=False),
        }
    )
    sends_result = True
    takes_all = True
    state_counts = ("differences",)

    def __init__(self, rate: float = 0.7, momentum: float = 0.9, delay: int = 0) -> None:
        """rate, momentum: DiLoCo's are 0.7 and 0.9. delay: differences for one momentum step."""
        self.rate, self.momentum, self.delay = rate, momentum, delay
        self.state_arrays = ("common", "momentum_values", *(("late",) if delay else ()))
        self.common = np.empty(0, np.float32)
        """The group's last common weights."""
        self.momentum_values = np.empty(0, np.float32)
        self.late = np.empty(0, np.float32)
        """Sum of the differences since the last momentum step; empty if delay is 0."""
        self.differences = 0
        """Number of differences in `late`."""

    def begin(self, weights: Floats) -> None:
        """See Rule."""
        self.common = np.array(weights, np.float32)
        self.momentum_values = np.zeros_like(self.common)
        self.late = np.zeros_like(self.common[: len(self.common) if self.delay else 0])
        self.differences = 0

    def end_round(self, aggregate: Floats, arrived: Sequence[Floats]) -> None:
        """See Rule."""
        if len(aggregate) != len(self.common):
            raise ValueError(
                f"{len(aggregate)} values after a beginning with {len(self.common)} values"
            )
        models = (aggregate, *arrived)
        self.differences += len(models) if self.delay else 0
        steps = not self.delay or self.differences >= self.delay
        for here in blocks(len(aggregate)):
            self._step([model[here] for model in models], here, steps)
        if steps:
            self.differences = 0

    def _step(self, models: Sequence[Floats], here: slice, steps: bool) -> None:
        """One block. steps: whether the momentum moves."""
        common, momentum = self.common[here], self.momentum_values[here]
        mean = common - models[0]
        for model in models[1:]:
            mean += common - model
        if self.delay:
            late = self.late[here]
            late += mean
        mean *= np.float32(1 / len(models))
        by = np.float32(self.momentum)
        moved = mean
        if steps:
            momentum *= by
            if self.delay:
                late *= np.float32(1 / self.differences)
                momentum += late
                late[:] = 0
            else:
                momentum += mean
            moved = mean + by * momentum
        moved *= np.float32(self.rate)
        common -= moved
        models[0][:] = common
