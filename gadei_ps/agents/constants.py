"""Buffers of a model that hold infinities, such as a mask of attention: constants.

No sum, difference or short format has a place for them, and all machines have the same. So they are
no part of what a group exchanges: a copy has zeros in their place, and so have the group's weights;
each job keeps its own. An infinity that comes later, and one in a parameter, is none of these: then
the machine has diverged.
"""

from __future__ import annotations

import numpy as np

from gadei_ps.agents.plan import Floats
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import Model


class Constants:
    """Of one job, in one life of its agent."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._found: dict[str, slice] | None = None

    def take_out(self, weights: Floats) -> None:
        """Writes zeros in their place. The first weights of the job tell which they are."""
        if self._found is None:
            self._found = {
                one.name: slice(one.start, one.start + one.count)
                for one in self._model.tensors
                if one.role is Role.BUFFER
                and np.isinf(weights[one.start : one.start + one.count]).any()
            }
        for place in self._found.values():
            weights[place] = 0

    def keep(self, group: Floats) -> bool:
        """Keeps those that the group's weights have zeros for; whether these are all.

        Others are none in the group: this job had diverged before its agent began.
        """
        found = self._found or {}
        self._found = {name: place for name, place in found.items() if not group[place].any()}
        return len(self._found) == len(found)

    def rest(self, weights: Floats) -> dict[str, Floats]:
        """Views of all other tensors, by their names."""
        views = self._model.views(weights).items()
        return {name: values for name, values in views if name not in (self._found or {})}
