"""State that a job takes from a checkpoint beside the values: counts and the batch ledger."""

from __future__ import annotations

import numpy as np

from gadei_ps.memory import totals
from gadei_ps.storage.snapshot import Snapshot


def enter(control: np.void, state: np.void, snapshot: Snapshot) -> None:
    """Into new memory. control, state: CONTROL and STATE."""
    state["record"]["steps"] = snapshot.steps
    state["record"]["supersteps"] = snapshot.supersteps
    control["superstep"] = control["supersteps_done"] = snapshot.supersteps
    state["record"]["gradients"] = snapshot.version
    control["version"] = snapshot.version
    control["checkpoint_version"] = snapshot.version
    for field_ in ("batches", "epochs", "seed", "next", "epochs_done"):
        control[field_] = snapshot.work[field_]
    control["requeue"][: snapshot.requeue.size] = snapshot.requeue
    control["requeued"] = snapshot.requeue.size
    totals.restore(control, snapshot.counts)
    control["work"] = snapshot.work["state"]
