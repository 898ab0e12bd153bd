"""Learners that draw the same random numbers, and so perhaps the same mini-batches."""

from __future__ import annotations

import warnings

import torch

from gadei_ps.learners.attach import LEARNER_VARIABLE, to_the_script

SAME = (
    "another learner has the same seed as this one, {seed}: if the mini-batches are drawn by it, "
    "both train with the same ones, and two learners are worth little more than one. Add "
    f"int(os.environ.get({LEARNER_VARIABLE!r}, 0)) to the seed, or take the mini-batches from "
    "optimizer.sampler(dataset)"
)


def warn_if_still(seed: int) -> None:
    """Unless torch has another seed by now. seed: as of when the learner attached."""
    if torch.initial_seed() == seed:
        warnings.warn(SAME.format(seed=seed), stacklevel=to_the_script())
