"""The outer optimizer: Nesterov's momentum on the difference that a round has made."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from gadei_ps.groups.parts import BLOCK, Floats
from gadei_ps.groups.rules import Rule, number
from gadei_ps.sync.parameters import Parameter, whole_number

MOST_RATE = 2
"""Greatest rate: a step with more leads away from the aggregate, further than before the round."""


class Outer(Rule):
    """DiLoCo's outer step (arXiv 2311.08105), and its delayed form for models that come late.

    The difference of a model is the group's last common weights minus that model. `own` is the
    difference of the group's aggregate. Models of other groups give delayed differences; `late` is
    their mean, and n is their number. They are compared with weights that are about as old as they
    are, so they take nothing away from what this round has trained.

        momentum <- m * momentum + own
        weights  <- last common weights - rate * (own + m * momentum) - n / (n + 1) * late

    With n = 0 this is a step of torch.optim.SGD with Nesterov's momentum, and with rate 1 and m = 0
    the weights become the aggregate. The late differences draw the groups together. They are not in
    the momentum: with them in it, groups overshoot one another.

    delay = N, from 1: after delayed Nesterov (arXiv 2401.09135, algorithm 3 with c = 0). As there,
    the momentum moves once N differences have come, by their mean, in which all count alike, and is
    in the step of that round alone. There a server takes one difference at a time, and applies each
    by rate / N. Here a round brings several, so the mean may be of some more than N. And as without
    a delay, the group's own difference counts with the whole rate in each round, and late ones draw
    the groups together. N = 1 is naive asynchrony: whatever comes is in the momentum at once.
    """

    name = "outer"
    forms = ("outer:0.7:0.9", "outer:rate=0.7,momentum=0.9,delay=4")
    parameters = MappingProxyType(
        {
            "rate": Parameter(number(0, MOST_RATE).convert, required=False),
            "momentum": Parameter(number(0, 0.9999).convert, required=False),
            "delay": Parameter(whole_number(0, 10_000), required=False),
        }
    )
    sends_result = True
    takes_all = True
    state_counts = ("differences",)

    def __init__(self, rate: float = 0.7, momentum: float = 0.9, delay: int = 0) -> None:
        """Set the hyperparameters; DiLoCo's are 0.7 and 0.9. delay: see the class."""
        self.rate, self.momentum, self.delay = rate, momentum, delay
        self.state_arrays = ("common", "momentum_values", *(("late",) if delay else ()))
        self.common = np.empty(0, np.float32)
        """The group's last common weights."""
        self.momentum_values = np.empty(0, np.float32)
        self.late = np.empty(0, np.float32)
        """Sum of the differences since the last step of the momentum, with a delay."""
        self.differences = 0
        """Number of differences in this sum, with a delay."""

    def __str__(self) -> str:
        return super().__str__() if self.delay else super().__str__().removesuffix(":0")

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
        self.differences += (1 + len(arrived)) if self.delay else 0
        moves = self.differences >= self.delay
        for begin in range(0, len(aggregate), BLOCK):
            here = slice(begin, begin + BLOCK)
            self._step(aggregate[here], [model[here] for model in arrived], here, moves)
        if moves:
            self.differences = 0

    def _step(self, own: Floats, arrived: Sequence[Floats], here: slice, moves: bool) -> None:
        """Step one block; `own` becomes the weights. moves: whether the momentum moves."""
        common, momentum = self.common[here], self.momentum_values[here]
        np.subtract(common, own, out=own)
        late = np.zeros_like(own)
        for model in arrived:
            late += common - model
        if self.delay:
            together = self.late[here]
            together += own
            together += late
        if moves:
            momentum *= np.float32(self.momentum)
            if self.delay:
                together *= np.float32(1 / self.differences)
                momentum += together
                together[:] = 0
            else:
                momentum += own
            own += np.float32(self.momentum) * momentum
        own *= np.float32(self.rate)
        late *= np.float32(1 / (1 + len(arrived)))
        common -= own
        common -= late
        own[:] = common
