"""Limits that end a job: a number of gradients, samples or epochs."""

from __future__ import annotations

import numpy as np

from gadei_ps.job.config import StopAfterConfig
from gadei_ps.memory.totals import total


def reached(limits: StopAfterConfig, control: np.void, state: np.void | None) -> str:
    """The limit that the job has reached, for messages; empty if there is none.

    control: CONTROL. state: STATE; None before it is there.
    """
    done = {
        "gradients": total(control, "applied", state) if limits.gradients else 0,
        "samples": total(control, "samples", state) if limits.samples else 0,
        "epochs": int(control["epochs_done"]),
    }
    for what, limit in limits.model_dump().items():
        if limit and done[what] >= limit:
            return f"stop_after: {done[what]:,} of {limit:,} {what}"
    return ""
