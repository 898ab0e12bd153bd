"""embedding(): on a GPU, rows of a weight are read straight from the job's memory."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Where, rows_at
from gadei_ps.learners.torch import hooks
from gadei_ps.learners.torch.casts import differs
from gadei_ps.learners.torch.model import Trained
from gadei_ps.learners.torch.products import accumulates, gradient_at

TABLE = "_gadei_ps_table"
"""Attribute of a weight on a GPU: its Table."""

Read = Callable[[torch.Tensor], torch.Tensor]
"""Reads rows of a weight from the segment, by indices of any shape, int64 or int32."""


class Given(NamedTuple):
    """A gradient of rows that backward() has left to step()."""

    indices: torch.Tensor
    values: torch.Tensor
    """(*indices.shape, *shape of a row), contiguous."""
    padding: int | None
    versions: tuple[int, int]
    """Versions of the indices and the values, by which a later change is noticed."""

    @property
    def is_changed(self) -> bool:
        return self.versions != (self.indices._version, self.values._version)


class Table(NamedTuple):
    """A weight on a GPU, whose rows can be read."""

    read: Read
    given: list[Given]
    """Gradients whose sum, with `weight.grad`, is the gradient."""


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

    There, backward() leaves the gradient of the rows to step(), and `weight.grad` stays None: the
    indices, and a gradient given to backward(), must not be changed before step(), and only the
    optimizer's zero_grad() undoes a backward(). `weight.grad` is a sparse tensor, as torch's, under
    autocast, in a CUDA graph, in compiled code, and if the weight has hooks. Elsewhere torch's
    clip_grad_norm_ leaves the rows out, and so does a GradScaler: use the job's clip_norm, and call
    this under autocast. Once differentiable.
    """
    table: Table | None = getattr(weight, TABLE, None)
    if table is None or not sparse:
        return torch.nn.functional.embedding(indices, weight, padding_idx, sparse=sparse)
    # A GradScaler, which goes with autocast, divides weight.grad.
    leaves = not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda"))
    return _look_up(indices, weight, padding_idx, table, table.given if leaves else None)


def _look_up(
    indices: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None,
    table: Table,
    given: list[Given] | None,
) -> torch.Tensor:
    """Look rows up. given: takes the gradient in place of weight.grad."""
    if indices.device != weight.device:
        raise UsageError(f"indices on {indices.device} into an embedding on {weight.device}")
    rows: torch.Tensor = _Gathered.apply(indices, weight, padding_idx, table.read, given)  # type: ignore[no-untyped-call]
    return rows


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        indices: torch.Tensor,
        weight: torch.Tensor,
        padding_idx: int | None,
        read: Read,
        given: list[Given] | None,
    ) -> torch.Tensor:
        if indices.dtype is not torch.int32:
            indices = indices.to(torch.int64)
        indices = indices.contiguous()
        context.save_for_backward(indices)
        context.weight = weight  # a leaf: it outlives the graph
        context.padding = None if padding_idx is None else padding_idx % weight.shape[0]
        context.given = given
        return read(indices)

    @staticmethod
    def backward(
        context: Any, gradient: torch.Tensor
    ) -> tuple[None, torch.Tensor | None, None, None, None]:
        if context.given is None or _is_seen(context.weight) or not accumulates(context, 1):
            return None, _sparse_gradient(context, gradient), None, None, None
        (indices,) = context.saved_tensors
        values = gradient.contiguous()
        versions = indices._version, values._version
        context.given.append(Given(indices, values, context.padding, versions))
        return None, None, None, None, None


def _is_seen(weight: torch.Tensor) -> bool:
    """Return whether a weight's gradient is used before step(), or after steps to come.

    By a second differentiation, by hooks, or by a CUDA graph, which computes it again.
    """
    return bool(
        torch.is_grad_enabled()
        or hooks.reads_gradient(weight)
        or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
    )


@torch.autograd.function.once_differentiable
def _sparse_gradient(context: Any, gradient: torch.Tensor) -> torch.Tensor:
    (indices,) = context.saved_tensors
    return _sparse(context.weight, indices, gradient, context.padding)


def _sparse(
    weight: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, padding: int | None
) -> torch.Tensor:
    flat, values = _without_padding(weight, indices, values, padding)
    # The push checks the indices; a check here would wait for the GPU.
    flat = flat.to(torch.int64)
    return torch.sparse_coo_tensor(flat[None], values, weight.shape, check_invariants=False)


def _without_padding(
    weight: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, padding: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flat indices and their rows, those of the padding zero."""
    flat = indices.view(-1)
    values = values.reshape(len(flat), *weight.shape[1:])
    if padding is not None:
        of_padding = (flat == padding).view(-1, *[1] * (values.dim() - 1))
        values = values.masked_fill(of_padding, 0)
    return flat, values


def rows_of(weight: torch.Tensor, given: list[Given], kept: list[Any]) -> Where:
    """Return the addresses of the weight's gradient for CudaLink.push_from; see gradient_at().

    Raises UsageError if the indices or the gradient were changed after backward().
    """
    if any(one.is_changed for one in given):
        raise UsageError(
            "the indices, or the gradient of an embedding's rows, were changed between backward() "
            "and step(), which still needs them: change a copy"
        )
    if weight.grad is not None:  # the weight was used in another way as well
        whole = sum((_sparse(weight, *one[:3]) for one in given), start=weight.grad)
        kept.append(whole)
        return gradient_at(whole, kept)
    indices, values, padding, _ = given[0]
    if len(given) > 1:
        if any(one.padding != padding for one in given):
            parts = [_without_padding(weight, *one[:3]) for one in given]
            padding = None
        else:
            parts = [_without_padding(weight, *one[:2], None) for one in given]
        indices, values = (torch.cat(some) for some in zip(*parts, strict=True))
    kept += (indices, values)
    where = rows_at(indices.data_ptr(), values.data_ptr(), indices.numel())
    skipped = 0 if padding is None else 1 + padding
    return *where[:3], 2 * skipped + (indices.dtype is torch.int32)


def adapt(
    trained: Trained,
    read: Callable[[str, torch.Tensor], torch.Tensor],
    given: Mapping[torch.nn.Parameter, list[Given]],
    undo: contextlib.ExitStack,
) -> None:
    """Have embedding(), and layers made with sparse=True, read rows by `read` (name, indices).

    given: of each parameter the list that takes gradients of rows.
    A layer keeps torch's own forward() if other layers use its weight, or if it writes to it.
    """
    _silence()
    for name, parameter in trained.parameters.items():
        if parameter.dim() > 1 and not differs(parameter):
            table = Table(functools.partial(read, name), given[parameter])
            setattr(parameter, TABLE, table)
            undo.callback(delattr, parameter, TABLE)
    users: dict[int, int] = {}
    for layer in trained.module.modules():
        for parameter in layer.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for layer in trained.module.modules():
        if type(layer) is not torch.nn.Embedding or not layer.sparse:
            continue
        alone = users[id(layer.weight)] == 1 and layer.max_norm is None
        if alone and hasattr(layer.weight, TABLE):
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
    weight = layer.weight
    table: Table | None = getattr(weight, TABLE, None)
    if table is None:  # the layer has got another one
        return embedding(indices, weight, layer.padding_idx)
    return _look_up(indices, weight, layer.padding_idx, table, None)
