"""Warnings while a job refuses gradients, such as those of a model that has diverged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gadei_ps.memory import layout
from gadei_ps.memory.layout import Reason
from gadei_ps.memory.totals import total
from gadei_ps.watchdog.job_memory import JobMemory

WARNING_INTERVAL_S = 10.0
DIVERGED = (
    "the weights stay as they are. If this continues, the model has diverged: lower the learning "
    "rate, or set clip_norm"
)


@dataclass(eq=False)
class RefusalWarnings:
    """Warnings of the refused gradients of a job: of the first one, then now and then."""

    memory: JobMemory
    log: Any
    _warned_at: float = float("-inf")
    _warned_of: int | None = None

    def tick(self, now: float) -> None:
        """Warn if gradients were refused since the last warning. Called once a second."""
        control = self.memory.words
        refused = total(control, "refused")
        if self._warned_of is None:
            self._warned_of = refused  # of a watchdog before this one
        if refused == self._warned_of or now < self._warned_at + WARNING_INTERVAL_S:
            return
        self._warned_of, self._warned_at = refused, now
        reason = most_frequent_reason(control)
        what = layout.REASON_TEXT.get(reason, "")
        self.log.warning(
            f"gradients are refused: the last one {what}; {DIVERGED}"
            if reason == Reason.NOT_FINITE
            else f"gradients are refused{': ' + what if what else ''}",
            refused=refused,
            applied=total(control, "applied"),
        )


def most_frequent_reason(control: np.void) -> int:
    """Return the reason of the attached learner refused most often; else the last reason."""
    roster = control["roster"]
    reason, refused = roster["reason"].copy(), roster["refused"].copy()
    refused[reason == Reason.OK] = 0  # it is just being counted
    if not refused.any():  # it has left; a row keeps its reason until the next one
        return int(reason.max())
    return int(reason[refused.argmax()])
