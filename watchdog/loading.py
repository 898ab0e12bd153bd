"""Which learner writes what scripts load when they begin: weights, and the optimizer's state.

Every learner of a job runs the same script, and loads the same. One of them writes it, before the
job's first gradient; the others wait for it. A learner that comes later does not: the job has
trained further.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gadei_ps.errors import ControlError
from gadei_ps.job.control import Load
from gadei_ps.memory import layout
from gadei_ps.watchdog.memory import JobMemory

KINDS = ("state", "weights")


@dataclass(eq=False)
class Loading:
    """Its words are in state, for the next watchdog."""

    memory: JobMemory

    def ask(self, request: Load) -> str:
        """What the learner is to do. Raises ControlError before there is a model.

        "write": it writes, and says when it is done. "wait": it asks again. "same": this was
        written. "other": something else was, or the job has made steps without it.
        """
        if self.memory.state is None:
            raise ControlError("the job has no model yet")
        control: np.void = self.memory.control.view(layout.CONTROL)
        state: np.void = self.memory.state.view(layout.STATE)
        which = KINDS.index(request.what)
        if request.done:
            if int(state["loading"][which]) == request.generation:
                state["loaded"][which] = request.digest
                state["loading"][which] = 0
            return "same"
        loaded = int(state["loaded"][which])
        if loaded == request.digest:
            return "same"
        if loaded not in (0, request.after):
            return "other"
        loading = int(state["loading"][which])
        if loading and loading != request.generation:
            if (control["roster"]["wanted"] == loading).any():
                return "wait"
        elif not loading:
            steps = state["record"]["steps"][: int(control["shards"])]
            if (steps != request.steps).any():
                return "other"
        state["loading"][which] = request.generation
        return "write"
