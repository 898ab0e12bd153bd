"""What an Optimizer needs of the place where its model computes; a file for each kind."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from gadei_ps import _native
from gadei_ps.errors import JobStopped, ModelMismatch, UsageError
from gadei_ps.learners.client import Client, Where, rows_at, whole_at
from gadei_ps.learners.torch.model import Trained

LOADED = (
    "load_state_dict after Optimizer(model): the weights are the job's, and this learner can only "
    "read them: write optimizer.assign(state_dict) instead, or load before Optimizer(model), or "
    "after optimizer.close()"
)
LOST = (
    "load_state_dict after Optimizer(model) changes this learner's copy only, until the next step "
    "brings the job's weights; write optimizer.assign(state_dict) to change those"
)


class Backend(Protocol):
    """One model's weights and gradients, where the model computes.

    Making a backend points the model's parameters to the job's weights. All calls are made by the
    thread that trains.
    """

    def loss(self, loss: torch.Tensor) -> float | torch.Tensor:
        """A reported loss in the form that push() takes. Does not wait for a GPU."""

    def push(self, loss: float | torch.Tensor, *, samples: int, rate_scale: _native.Scales) -> None:
        """Publishes what backward() has left, and the changes of buffers.

        Waits for a free slot. Raises what Client.push raises.
        """

    def forget(self) -> None:
        """Drops what backward() has left outside of `parameter.grad`."""

    def refresh(self) -> None:
        """Brings weights and buffers for the next step."""

    def assigned(self, names: Collection[str]) -> None:
        """Brings what was assigned to these tensors of the job."""

    def close(self) -> None:
        """Publishes what was pushed; gives the model its own memory, with the current weights."""


def wait_for_own(client: Client) -> None:
    """Waits until the learner's last gradient is in the weights or dropped, or the job ends."""
    with contextlib.suppress(JobStopped):  # the next push says so
        client.wait_applied()


def gradient_at(gradient: torch.Tensor, kept: list[Any]) -> Where:
    """The gradient's addresses for Client.push_from, valid as long as it and `kept` live.

    kept: takes the copies that are made. Raises ModelMismatch for complex numbers.
    """
    if gradient.dtype is not torch.float32:
        if not gradient.is_floating_point():
            raise ModelMismatch(f"a gradient is {gradient.dtype}, not of real numbers")
        gradient = gradient.to(torch.float32)
        kept.append(gradient)
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        # Not coalesced: rows that a batch names twice are added up on their way.
        indices, values = gradient._indices().contiguous(), gradient._values().contiguous()
        kept += (indices, values)
        return rows_at(indices.data_ptr(), values.data_ptr(), indices.shape[1])
    if gradient.is_sparse:
        gradient = gradient.to_dense()
        kept.append(gradient)
    elif not gradient.is_contiguous():
        gradient = gradient.contiguous()
        kept.append(gradient)
    return whole_at(gradient.data_ptr())


def at_loading(trained: Trained, hook: Callable[..., None], undo: contextlib.ExitStack) -> None:
    """Has `hook` called before load_state_dict() of any module with parameters of the job."""
    for module in trained.module.modules():
        if any(one.requires_grad for one in module.parameters(recurse=False)):
            made = module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
            undo.callback(made.remove)


def refuse_loading(*_: object) -> None:
    """Where parameters are views of the job's weights."""
    raise UsageError(LOADED)


def warn_of_loading(*_: object) -> None:
    """Where they are a copy, which the next pull overwrites."""
    warnings.warn(LOST, stacklevel=2)
