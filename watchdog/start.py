"""Start of a job whose learners begin together: the learners awaited before the first gradient.

So that each run of such a job gives the same weights: learner 0 makes the model, and batches are
handed out once all learners ask for them, in the order of rows. The server awaits them as well
(gadei_ps.server.start). Learners that have ended for good are not awaited, and what does not come
within the learners' time limit is awaited no longer.
"""

from __future__ import annotations

import time

import numpy as np

from gadei_ps import _native
from gadei_ps.job import modes
from gadei_ps.memory import finished, layout
from gadei_ps.memory.layout import CONTROL, Work
from gadei_ps.watchdog.memory import JobMemory


class Start:
    """learners: how many are to begin together."""

    def __init__(self, memory: JobMemory, learners: int) -> None:
        self._memory = memory
        self._learners = learners
        self._since = 0.0

    @property
    def _control(self) -> np.void:
        return self._memory.control.view(CONTROL)

    @property
    def awaits(self) -> bool:
        """Whether learners of this job begin together, and have not begun yet."""
        return self._learners > 1 and modes.awaits_start(self._memory.control)

    @property
    def awaits_first(self) -> bool:
        """Whether learner 0, which makes the model, is awaited."""
        return self.awaits and not finished.has(self._control, 0)

    @property
    def _awaited(self) -> int:
        return max(1, self._learners - finished.count(self._control))

    def leave_out(self, number: int) -> None:
        """The learner of this number has ended for good."""
        finished.add(self._control, number)
        self._memory.ring_bells()

    def report(self) -> dict[str, int] | None:
        """Return attached and awaited learners for the status; None once begun."""
        if not self.awaits:
            return None
        return {"learners": min(self._asking(0xFFFFFFFF), self._awaited), "of": self._awaited}

    def is_late(self, since: float) -> bool:
        """Return whether a learner that has waited since then has waited long enough."""
        limit_s = self._memory.config.learner_timeout_s
        return bool(limit_s) and time.monotonic() - since > limit_s

    def hand_out(self, stopping: bool) -> None:
        """Let batches that learners have set be handed out, once all learners ask for them."""
        control = self._control
        if int(control["work"]) != Work.NONE or not int(control["batches"]):
            return
        self._since = self._since or time.monotonic()
        all_ask = self._asking(layout.WANTS_WORK) >= self._awaited
        if self.awaits and not all_ask and not stopping and not self.is_late(self._since):
            return
        at = self._memory.control.word(CONTROL, "work")
        _native.store32(at, Work.WORKING)  # SYNC POINT: work
        self._memory.ring_bells()

    def _asking(self, what: int) -> int:
        """Count the attached learners that have asked for any of this."""
        rings = self._memory.rings.values()
        return sum(bool(int(one.view(layout.RING)["wants"]) & what) for one in rings)
