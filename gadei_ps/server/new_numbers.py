"""A change of hyperparameters while the job runs: at the same gradient for all shards.

    hold       on arrival: the shards let frames lie, and all have consumed the same
               in a model that collects: no superstep is open
    take       hyper_next -> hyper, then the number
    continue   the mode of the model in force

No gradient is in flight between the first two, and none is begun before the third. If the server
dies in between, the shards of the next one still let frames lie, and its manager begins again.
"""

from __future__ import annotations

import numpy as np

from gadei_ps.job import modes, numbers
from gadei_ps.machine import log
from gadei_ps.memory.layout import CONTROL
from gadei_ps.memory.segment import Segment
from gadei_ps.server.change import hold
from gadei_ps.sync import SyncModel


def counts_agree(control: Segment, state: np.void, shards: int) -> bool:
    """Return whether all shards have consumed the same of each ring. state: STATE."""
    roster = control.view(CONTROL)["roster"]
    used = np.flatnonzero(roster["generation"] != roster["retired"])
    counts = state["applied"][:shards, used]
    return bool((counts == counts[0]).all())


class NewNumbers:
    """Changes of the optimizer's numbers, by the manager of the active server."""

    def __init__(self, control: Segment, state: np.void, shards: int) -> None:
        """state: STATE."""
        self._control = control
        self._state = state
        self._shards = shards

    @property
    def are_due(self) -> bool:
        """Whether others are wanted."""
        return numbers.wanted(self._control) != numbers.done(self._control)

    def settle(self, in_force: int, model: SyncModel, *, serving: bool, superstep: bool) -> bool:
        """Make one step of a due change. False until it is complete: nothing else may continue.

        in_force: number of the model. serving: whether all shards serve. superstep: whether one is
        open.
        """
        number = numbers.wanted(self._control)
        if model.on_arrival:
            held = hold(self._control, in_force + number, self._shards)
            if not (held and serving and counts_agree(self._control, self._state, self._shards)):
                return False
        elif superstep:
            return False
        numbers.take_effect(self._control, number)
        modes.enforce(self._control, in_force, model)
        version = int(self._control.view(CONTROL)["version"])
        log.get().info("the optimizer's numbers changed", version=version)
        return True
