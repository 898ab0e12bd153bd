"""Which learner writes the optimizer's state that scripts load when they begin.

Every learner of a job runs the same script, and loads the same state. One of them writes it, before
the job's first gradient; the others wait for it. A learner that comes later does not: the job has
trained further.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gadei_ps.errors import ControlError
from gadei_ps.job.control import Load
from gadei_ps.memory import layout
from gadei_ps.watchdog.memory import JobMemory


@dataclass(eq=False)
class Loading:
    """Its words are in state, for the next watchdog."""

    memory: JobMemory

    def ask(self, request: Load) -> str:
        """What the learner is to do. Raises ControlError before there is a model.

        "write": it writes the state, and says when it is done. "wait": it asks again. "same": this
        state was written. "other": another one was, or the job has made steps without one.
        """
        if self.memory.state is None:
            raise ControlError("the job has no model yet")
        control: np.void = self.memory.control.view(layout.CONTROL)
        state: np.void = self.memory.state.view(layout.STATE)
        if request.done:
            if int(state["loading"]) == request.generation:
                state["loaded"] = request.digest
                state["loading"] = 0
            return "same"
        if int(state["loaded"]):
            return "same" if int(state["loaded"]) == request.digest else "other"
        loading = int(state["loading"])
        if loading and loading != request.generation:
            if (control["roster"]["wanted"] == loading).any():
                return "wait"
        elif not loading and (state["record"]["steps"][: int(control["shards"])] != 0).any():
            return "other"
        state["loading"] = request.generation
        return "write"
