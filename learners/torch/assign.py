"""What Optimizer.assign() is given, split into what is the job's and what stays in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.learners.torch import casts
from gadei_ps.learners.torch.model import Trained


class Assigned(NamedTuple):
    """Values by where they belong."""

    job: dict[str, np.ndarray]
    """By the name that the job knows, and not rounded yet."""
    local: list[tuple[torch.Tensor, torch.Tensor]]
    """What is no part of the job (frozen parameters, whole-number buffers), and its values."""

    def write_local(self) -> None:
        for tensor, values in self.local:
            tensor.data.copy_(values)


def split(trained: Trained, values: Mapping[str, Any]) -> Assigned:
    """values: by the names of state_dict(), those of tied weights included; some of them or all.

    Raises UsageError for a name that the model does not have, or two values of a tied weight;
    ModelMismatch for another shape.
    """
    if not isinstance(values, Mapping):
        raise UsageError(
            f"assign takes values by name, as model.state_dict() gives them, not a "
            f"{type(values).__name__}"
        )
    module = trained.module
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    of_job = {id(one): name for name, one in {**trained.parameters, **trained.buffers}.items()}
    found = Assigned({}, [])
    for name, given in values.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise UsageError(f"assign: the model has no parameter or buffer {name!r}")
        value = _as_tensor(name, given)
        if value.shape != tensor.shape:
            raise ModelMismatch(
                f"{name!r} was given values of shape {list(value.shape)}, the model has "
                f"{list(tensor.shape)}"
            )
        if id(tensor) not in of_job:
            found.local.append((tensor, value))
            continue
        known = of_job[id(tensor)]
        if known in trained.buffers and is_mask(value, tensor):
            continue
        array = casts.exact(value)
        if known in found.job and not np.array_equal(found.job[known], array, equal_nan=True):
            raise UsageError(f"assign: {name!r} and another name of the same tensor differ")
        found.job[known] = array
    return found


def is_mask(value: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether a buffer has these values already, and the job would refuse them."""
    return not bool(value.isfinite().all()) and torch.equal(value.to(buffer), buffer)


def _as_tensor(name: str, given: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"assign: {name!r} is a {type(given).__name__}: give a tensor") from None
