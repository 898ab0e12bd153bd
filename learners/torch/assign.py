"""Values for Optimizer.assign(), split into those of the job and those of this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.learners.torch import casts
from gadei_ps.learners.torch.buffers import put
from gadei_ps.learners.torch.model import Trained
from gadei_ps.memory.weights import Model


class Assigned(NamedTuple):
    """Values by where they belong."""

    job: dict[str, np.ndarray]
    """Values by the job's names, not rounded yet."""
    local: dict[str, torch.Tensor]
    """Values of the learner's own (frozen parameters, buffers), by the model's names."""

    def write_local(self, trained: Trained) -> None:
        for name, values in self.local.items():
            if (buffer := trained.buffer(name)) is not None:
                put(trained, name, buffer, values)
            else:
                trained.module.get_parameter(name).data.copy_(values)


def split(trained: Trained, model: Model, values: Mapping[str, Any]) -> Assigned:
    """Split values by where they belong.

    values: by the names of state_dict(), those of tied weights included; some of them or all.
    model: the job's.

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
    names = {id(one): name for name, one in trained.parameters.items()}
    names |= {
        id(one): name for name in trained.buffers if (one := trained.buffer(name)) is not None
    }
    of_job = {tensor.name: tensor for tensor in model.tensors}
    found = Assigned({}, {})
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
        known = names.get(id(tensor), "")
        if known not in trained.parameters:
            found.local[name] = value
        if known not in of_job or of_job[known].shape != tensor.shape:
            continue
        if known in trained.parameters:
            array = casts.exact(value)
        else:
            array = casts.copy(value, of_job[known].dtype)
        if known in found.job and not np.array_equal(found.job[known], array, equal_nan=True):
            raise UsageError(f"assign: {name!r} and another name of the same tensor differ")
        found.job[known] = array
    return found


def _as_tensor(name: str, given: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"assign: {name!r} is a {type(given).__name__}: give a tensor") from None
