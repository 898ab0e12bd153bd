"""Choice of the learner that writes what scripts load at the start: weights and optimizer state.

Every learner of a job runs the same script, and loads the same. One of them writes it, before the
job's first gradient; the others wait for it. A learner that comes later does not: the job has
trained further. If a learner dies or fails after writing a part, the next learner that loads before
the job has made a step, or after a step of its own, writes the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gadei_ps.errors import ControlError
from gadei_ps.job.control import Load
from gadei_ps.watchdog.job_memory import JobMemory

KINDS = ("state", "weights")
GAVE_UP = 2**63  # in place of a generation: who was loading lives and does it no more


@dataclass(eq=False)
class Loading:
    """Its words are in state, for the next watchdog."""

    memory: JobMemory
    log: Any
    _reported: int = 0  # generation of a learner that has died

    def _is_dead(self, generation: int) -> bool:
        """Return whether this learner was loading and is gone or has failed; False for 0, none."""
        roster = self.memory.words["roster"]
        return bool(generation) and not bool((roster["wanted"] == generation).any())

    def tick(self) -> None:
        """Log once if the optimizer's state was not written to its end. Called every tick."""
        if self.memory.state is None:
            return
        loading = int(self.memory.state_words["loading"][KINDS.index("state")])
        before, self._reported = self._reported, loading if self._is_dead(loading) else 0
        if self._reported not in (0, before):
            did = "failed" if loading == GAVE_UP else "died"
            self.log.warning(
                f"a learner has {did} while it loaded the optimizer's state: a part of it may be "
                "stale until a learner loads it again"
            )

    def ask(self, request: Load) -> str:
        """Return the learner's task. Raises ControlError before there is a model.

        "write": it writes, and reports the end. "wait": it asks again. "same": this was written, or
        read. "other": something else was, or the job has made steps without it.
        """
        if self.memory.state is None:
            raise ControlError("the job has no model yet")
        control: np.void = self.memory.words
        state: np.void = self.memory.state_words
        which = KINDS.index(request.what)
        loading = int(state["loading"][which])
        if request.gives_up:
            if loading == request.generation:
                state["loading"][which] = GAVE_UP
            return "same"
        if request.done:
            if loading == request.generation:
                if not request.again:
                    state["loaded"][which] = request.digest
                state["loading"][which] = 0
            return "same"
        died = self._is_dead(loading)
        loaded = int(state["loaded"][which])
        if not request.again and not died:
            if loaded == request.digest:
                return "same"
            if loaded not in (0, request.after):
                return "other"
        if loading != request.generation and not request.again:
            allowed = {request.steps}
            if loading and request.what == "state":
                allowed.add(request.gives)  # which the other one may have written
            steps = state["record"]["steps"][: int(control["shards"])]
            if not allowed.issuperset(steps.tolist()):
                return "other"
        if loading and loading != request.generation and not died:
            return "wait"
        if died:
            state["loaded"][which] = 0  # it is not whole
        state["loading"][which] = request.generation
        return "write"
