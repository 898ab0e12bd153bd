"""The start of a job whose learners begin together, so that each run of it gives the same weights.

The first superstep of BSP takes in all learners that the job is to have, as the watchdog says on
the server's command line, except those that have ended for good. Who asks for a turn or for work is
there. A learner that does not come is awaited for as long as one that holds up others may do
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gadei_ps.memory import finished, layout, owned
from gadei_ps.memory.layout import Work

EPOCHS = 2  # at most so many are open at once


@dataclass(eq=False)
class Start:
    """learners: how many are to begin together. patience_s: how long to wait; 0: for ever."""

    learners: int
    patience_s: float
    log: Any
    _came: int = 0
    _since: float = 0.0

    def is_over(self, control: np.void, joined: int, wants: Iterable[int]) -> bool:
        """Return whether the first superstep may end. Logs a warning if not all have come.

        control: CONTROL. joined: learners that have a turn or batches. wants: what each of the
        others asks for.
        """
        there = joined
        if _all_handed(control):  # of few batches there are none for some of them
            there += sum(bool(one & layout.WANTS_WORK) for one in wants)
        awaited = max(1, self.learners - finished.count(control))
        if there >= awaited:
            return True
        now = time.monotonic()
        if there != self._came:
            self._came, self._since = there, now
        if not there or not self.patience_s or now - self._since < self.patience_s:
            return False
        self.log.warning(
            "not all learners have come, continuing without them: this run cannot be repeated "
            "to the last bit; see their output",
            learners=there,
            awaited=awaited,
        )
        return True


def _all_handed(control: np.void) -> bool:
    """Return whether all batches that can be handed out at first are handed out."""
    if int(control["work"]) == Work.NONE:
        return False
    if owned.is_on(control):
        return not owned.left(control)
    batches, following = int(control["batches"]), int(control["next"])
    handed = (following >> 32) * batches + (following & 0xFFFFFFFF)
    return handed >= batches * min(EPOCHS, int(control["epochs"]))
