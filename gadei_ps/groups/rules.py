"""Rules of exchange: with which weights a group continues after a round.

A round is k local epochs or mini-batches of each replica of a group, then the aggregation, then the
broadcast to neighbouring groups, which waits for nobody. What has arrived from other groups lies in
buffers. When a group has its own aggregate, its rule makes of both the weights for the next round.

A rule works value by value, in float32 and in place. So a replica may keep the whole model, or the
part that it sums alone: the result has the same bits. A rule holds arrays of the length that it was
given, and no other memory that grows with the model.

What each replica sends for a rule is in `gadei_ps.simulate.groups_traffic`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from gadei_ps.groups import parts
from gadei_ps.groups.parts import Floats
from gadei_ps.sync.parameters import Parameter, short_repr


def number(low: float, high: float) -> Parameter:
    """Return a parameter that is a number in [low, high]."""

    def convert(value: object) -> float:
        try:
            found = float(value) if isinstance(value, str | int | float) else float("nan")
        except ValueError:
            found = float("nan")
        if not low <= found <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}, not {short_repr(value)}")
        return found

    return Parameter(convert)


class Rule(ABC):
    """A rule of exchange, and its state for one model or for one part of it.

    A rule begins without state. `begin` gives it the weights that all replicas of the group have at
    first; `restore` gives it what a checkpoint or another replica has kept.
    """

    name: ClassVar[str]
    """The word by which `parse` finds the rule."""

    forms: ClassVar[tuple[str, ...]]
    """Examples of what `parse` accepts, for its error messages."""

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({})
    """The constructor's keyword arguments, each also an attribute, in the order of `parse`."""

    sends_result: ClassVar[bool]
    """Kind of model that a group broadcasts.

    True: the weights with which it continues. False: its own aggregate, before models of other
    groups are mixed in.
    """

    takes_all: ClassVar[bool]
    """True: all models that have arrived since the last round count. False: the newest alone."""

    state_arrays: tuple[str, ...] = ()
    """Names of the arrays of the state, each as long as the model. A joining member needs them
    beside the weights, and so does a member whose part has changed."""

    state_counts: ClassVar[tuple[str, ...]] = ()
    """Names of the whole numbers of the state."""

    def __str__(self) -> str:
        """Return the text from which `parse` makes an equal rule."""
        values = [str(getattr(self, key)).removesuffix(".0") for key in self.parameters]
        return ":".join([self.name, *values])

    def begin(self, weights: Floats) -> None:  # noqa: B027 (rules without state do nothing)
        """Start with these weights, float32 of shape (values,). They are not kept."""

    @abstractmethod
    def end_round(self, aggregate: Floats, arrived: Sequence[Floats]) -> None:
        """Turn the group's own aggregate, in place, into the weights of the next round.

        aggregate, arrived: float32 of the shape that the rule has begun with; the arrived models of
        other groups from the oldest to the newest, in the same order on each replica of the group.
        """

    def state(self) -> tuple[dict[str, Floats], dict[str, int]]:
        """Return arrays, not copied, and whole numbers, for checkpoints and joining members."""
        arrays = {name: getattr(self, name) for name in self.state_arrays}
        return arrays, {name: getattr(self, name) for name in self.state_counts}

    def restore(self, arrays: Mapping[str, Floats], counts: Mapping[str, int]) -> None:
        """Restore a copy of a result of `state`. Raises ValueError if it is another rule's."""
        if set(arrays) != set(self.state_arrays) or set(counts) != set(self.state_counts):
            given = ", ".join([*arrays, *counts]) or "nothing"
            raise ValueError(f"{self.name} cannot continue from the state of another rule: {given}")
        for name, values in arrays.items():
            setattr(self, name, np.array(values, np.float32))
        for name, count in counts.items():
            setattr(self, name, int(count))


class Replace(Rule):
    """The paper's rule: the newest whole model that has arrived takes the place of the own one.

    'The receiving worker group j holds w_i in the buffer to wait for the completion of its own
    model aggregation after which w_j is replaced by w_i' (Yan and Shao, section 3). The own
    aggregate was broadcast before, so it continues in another group, or is lost there in a buffer.
    """

    name = "replace"
    forms = ("replace",)
    sends_result = False
    takes_all = False

    def end_round(self, aggregate: Floats, arrived: Sequence[Floats]) -> None:
        """See Rule."""
        if arrived:
            aggregate[:] = arrived[-1]


class Mix(Rule):
    """A mixture: (1 - weight) times the own aggregate plus weight times the mean of arrived models.

    If every group mixes the same p - 1 others, the mean of all p models stays as it is.
    """

    name = "mix"
    forms = ("mix:0.5", "mix:weight=0.5")
    parameters = MappingProxyType({"weight": number(0, 1)})
    sends_result = False
    takes_all = True

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def end_round(self, aggregate: Floats, arrived: Sequence[Floats]) -> None:
        """See Rule."""
        if not arrived:
            return
        own, each = np.float32(1 - self.weight), np.float32(self.weight / len(arrived))
        counted = [(aggregate, own), *((model, each) for model in arrived)]
        if own < each:  # small values of the first model are lost beside great ones of another
            counted = [*counted[1:], counted[0]]
        models, weights = zip(*counted, strict=True)
        parts.aggregate(models, np.array(weights), aggregate)
