"""What a job has counted of its gradients, with those of learners that have left."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

COUNTED = ("applied", "dropped", "refused", "samples")


def total(control: np.void, what: str) -> int:
    """One of COUNTED: gradients applied, dropped or refused, or samples. control: CONTROL.

    Each row of the roster has the counts of its learner; `past_...` has those of learners that are
    gone.
    """
    return int(control[f"past_{what}"]) + int(control["roster"][what].sum())


def counts(control: np.void) -> dict[str, int]:
    """All of them, under the names of status: `gradients_applied`, ... and `samples`."""
    return named([total(control, what) for what in COUNTED])


def named(counts: Iterable[int]) -> dict[str, int]:
    """Numbers in the order of COUNTED, under those names."""
    return {
        what if what == "samples" else f"gradients_{what}": count
        for what, count in zip(COUNTED, counts, strict=True)
    }
