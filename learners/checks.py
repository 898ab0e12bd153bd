"""What a virtual worker is given, looked at before anything is done with it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners import places
from gadei_ps.learners.places import Place
from gadei_ps.learners.plan import Plan


def devices(asked: Sequence[str | torch.device] | None, *, planned: bool) -> list[Place]:
    """Where the stages compute. planned: a plan says so. Raises UsageError."""
    try:
        return places.parse(asked)
    except UsageError as error:
        if not planned:
            raise
        raise UsageError(f"the plan's {error}; plan for this machine: gadei-ps partition") from None


def samples(what: str, given: object) -> None:
    """Raises UsageError if it is no tensor of samples."""
    if not isinstance(given, torch.Tensor) or not given.dim():
        raise UsageError(f"{what} must be a tensor with the samples along its first axis")
    if not len(given):
        raise UsageError(f"{what} has no samples: leave out mini-batches that are empty")


def loss(function: object) -> None:
    """Raises UsageError if it is no function."""
    if not callable(function):
        raise UsageError(f"loss_function is a {type(function).__name__}: give a function")


def planned(
    plan: Plan | str | os.PathLike[str],
    layers: Sequence[torch.nn.Module],
    devices: object,
    cuts: object,
) -> Plan:
    """The plan itself. Raises UsageError if it is for other layers, or not alone."""
    if devices is not None or cuts is not None:
        raise UsageError("plan says the devices and the cuts: leave out devices and cuts, or plan")
    if not isinstance(plan, Plan | str | os.PathLike):
        raise UsageError(f"plan is a {type(plan).__name__}: give a plan, or the path of its file")
    made = plan if isinstance(plan, Plan) else Plan.load(plan)
    made.check(layers)
    return made
