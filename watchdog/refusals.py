"""Warnings while a job refuses gradients, such as those of a model that has diverged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, Reason
from gadei_ps.memory.totals import total
from gadei_ps.watchdog.job_memory import JobMemory

COUNT_INTERVAL_S = 0.5
WARNING_INTERVAL_S = 10.0
DIVERGED = (
    "the weights stay as they are. If this continues, the model has diverged: lower the learning "
    "rate, or set clip_norm"
)


@dataclass(eq=False)
class Refusals:
    """Refused gradients of a job, and the warnings about them."""

    memory: JobMemory
    log: Any
    _looked: float = float("-inf")
    _warned_at: float = float("-inf")
    _warned_of: int | None = None

    def tick(self, now: float) -> None:
        """Warn of the first refused gradient, then now and then. Called every tick."""
        if now < self._looked + COUNT_INTERVAL_S:
            return
        self._looked = now
        control = self.memory.control.view(CONTROL)
        refused = total(control, "refused")
        if self._warned_of is None:
            self._warned_of = refused  # of a watchdog before this one
        if refused == self._warned_of or now < self._warned_at + WARNING_INTERVAL_S:
            return
        self._warned_of, self._warned_at = refused, now
        reason = _reason(control)
        what = layout.REASON_TEXT.get(reason, "")
        self.log.warning(
            f"gradients are refused: the last one {what}; {DIVERGED}"
            if reason == Reason.NOT_FINITE
            else f"gradients are refused{': ' + what if what else ''}",
            refused=refused,
            applied=total(control, "applied"),
        )


def _reason(control: np.void) -> int:
    """Return the reason of the attached learner refused most often; else the last reason."""
    roster = control["roster"]
    reason, refused = roster["reason"].copy(), roster["refused"].copy()
    refused[reason == Reason.OK] = 0  # it is just being counted
    if not refused.any():  # it has left; a row keeps its reason until the next one
        return int(reason.max())
    return int(reason[refused.argmax()])
