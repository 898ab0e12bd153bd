"""embedding(): on a GPU, rows of a weight are read straight from the job's memory."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch.casts import differs
from gadei_ps.learners.torch.model import Trained

GATHER = "_gadei_ps_gather"
"""Attribute of a weight on a GPU: the function that reads its rows from the segment."""

Gather = Callable[[torch.Tensor], torch.Tensor]


def embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    *,
    sparse: bool = True,
) -> torch.Tensor:
    """Look rows up as torch.nn.functional.embedding does, for a weight whose gradient an Optimizer
    pushes.

    On a GPU with sparse=True, rows are read straight from the job's memory, and pulls leave the
    tensor out: a mini-batch needs few of a vocabulary's rows. The weight itself is then not kept
    current on the device; use it in no other way.
    """
    gather: Gather | None = getattr(weight, GATHER, None)
    if gather is not None and indices.device != weight.device:
        raise UsageError(f"indices on {indices.device} into an embedding on {weight.device}")
    if gather is None or not sparse:
        return torch.nn.functional.embedding(indices, weight, padding_idx, sparse=sparse)
    rows: torch.Tensor = _Gathered.apply(indices, weight, padding_idx, gather)  # type: ignore[no-untyped-call]
    return rows


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        indices: torch.Tensor,
        weight: torch.Tensor,
        padding_idx: int | None,
        gather: Gather,
    ) -> torch.Tensor:
        flat = indices.reshape(-1).to(torch.int64).contiguous()
        context.save_for_backward(flat)
        context.shape = weight.shape
        context.padding_idx = padding_idx
        return gather(flat).view(*indices.shape, *weight.shape[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        context: Any, gradient: torch.Tensor
    ) -> tuple[None, torch.Tensor | None, None, None]:
        (flat,) = context.saved_tensors
        values = gradient.reshape(len(flat), *context.shape[1:])
        if context.padding_idx is not None:
            padding = flat == context.padding_idx % context.shape[0]
            values = values.masked_fill(padding.view(-1, *[1] * (values.dim() - 1)), 0)
        # The push checks the indices; a check here would wait for the GPU.
        return (
            None,
            torch.sparse_coo_tensor(flat[None], values, context.shape, check_invariants=False),
            None,
            None,
        )


def adapt(
    trained: Trained,
    gather: Callable[[str, torch.Tensor], torch.Tensor],
    undo: contextlib.ExitStack,
) -> None:
    """Have embedding(), and layers made with sparse=True, read rows by `gather` (name, indices).

    A layer keeps torch's own forward() if other layers use its weight, or if it writes to it.
    """
    _silence()
    for name, parameter in trained.parameters.items():
        if parameter.dim() > 1 and not differs(parameter):
            setattr(parameter, GATHER, functools.partial(gather, name))
            undo.callback(delattr, parameter, GATHER)
    users: dict[int, int] = {}
    for layer in trained.module.modules():
        for parameter in layer.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for layer in trained.module.modules():
        if type(layer) is not torch.nn.Embedding or not layer.sparse:
            continue
        alone = users[id(layer.weight)] == 1 and layer.max_norm is None
        if alone and hasattr(layer.weight, GATHER):
            layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
            undo.callback(delattr, layer, "forward")


def _silence() -> None:
    """Have torch give its warning of unchecked sparse tensors now, unheard.

    Releases before 2.13 give it once, even if the check is declined explicitly.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indices = torch.zeros(1, 0, dtype=torch.int64)
        torch.sparse_coo_tensor(indices, torch.zeros(0), (1,), check_invariants=False)


def _forward(layer: torch.nn.Embedding, indices: torch.Tensor) -> torch.Tensor:
    return embedding(indices, layer.weight, layer.padding_idx)
