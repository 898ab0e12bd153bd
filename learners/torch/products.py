"""Gradients as addresses, and linear(): one that stays a product until step() writes it into the
ring."""

from __future__ import annotations

from typing import Any

import torch

from gadei_ps import _native
from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.learners.client import Where, product_at, rows_at, whole_at
from gadei_ps.learners.torch import hooks

PRODUCTS = "_gadei_ps_products"
"""Attribute of a weight: the products whose sum is its gradient."""
Products = list[tuple[torch.Tensor, torch.Tensor, tuple[int, int]]]
"""Factors, vectors, and the versions of both, by which a later change is noticed."""
FEW_VECTORS = 4  # a product of so few is bound by memory, however it is computed
SPARSE = 8  # factors are sparse if at most one value in so many differs from zero


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply torch.nn.functional.linear to a weight whose gradient an Optimizer pushes.

    That gradient is the product of the outputs' gradients and the inputs. For a small mini-batch,
    or where most outputs have no gradient (after a maximum over positions), backward() does not
    compute the product: `weight.grad` stays None, and step() writes the product into the ring row
    by row, where it is converted and checked too. So the gradient is written once, and only the
    server reads it. Poseidon (Zhang et al. 2017) sends such factors for the same reason.

    The inputs, and a gradient given to backward(), must not be changed before step(), and only the
    optimizer's zero_grad() undoes a backward(). torch's clip_grad_norm_ leaves the product out: use
    the job's clip_norm; so does a GradScaler without autocast. Once differentiable. The gradient of
    a weight with hooks is computed. Under autocast, and for a weight of no Optimizer, this is
    torch's own function.
    """
    plain = inputs.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    if not plain or not torch.is_grad_enabled() or not hasattr(weight, PRODUCTS):
        return torch.nn.functional.linear(inputs, weight, bias)
    outputs: torch.Tensor = _Linear.apply(inputs, weight)  # type: ignore[no-untyped-call]
    return outputs if bias is None else outputs + bias


def forward(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """Compute in place of torch.nn.Linear.forward."""
    return linear(inputs, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(inputs)
        context.weight = weight  # a leaf: it outlives the graph
        return torch.nn.functional.linear(inputs, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        context: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (inputs,), weight = context.saved_tensors, context.weight
        factors = gradient.reshape(-1, weight.shape[0]).contiguous()
        vectors = inputs.reshape(-1, weight.shape[1])
        back = None
        sparse = _is_sparse(factors) and weight.is_contiguous()
        if context.needs_input_grad[0]:
            back = _times(factors, weight) if sparse else factors @ weight
            back = back.view(inputs.shape)
        if not context.needs_input_grad[1]:
            return back, None
        few = sparse or len(factors) <= FEW_VECTORS
        leaves = few and hasattr(weight, PRODUCTS) and not hooks.reads_gradient(weight)
        if leaves and accumulates(context, 1):
            vectors = vectors.contiguous()
            versions = factors._version, vectors._version
            getattr(weight, PRODUCTS).append((factors, vectors, versions))
            return back, None
        return back, factors.t() @ vectors


def accumulates(context: Any, number: int) -> bool:
    """Return whether the gradient of a function's input, a leaf, is to be added to its `grad`.

    It is not in torch.autograd.grad(), and in backward() for other inputs.
    """
    try:
        return bool(torch._C._will_engine_execute_node(context.next_functions[number][0]))
    except (AttributeError, RuntimeError):  # a torch without it; autograd.grad() returns this one
        return False


def _is_sparse(factors: torch.Tensor) -> bool:
    """Return whether a product row by row is faster than one of matrices."""
    return _native.nonzeros(factors.data_ptr(), factors.numel()) * SPARSE <= factors.numel()


def _times(factors: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(factors), weight.shape[1])
    _native.sparse_product(
        out.data_ptr(), factors.data_ptr(), weight.data_ptr(), len(factors), *weight.shape
    )
    return out


def product_of(weight: torch.Tensor, products: Products, kept: list[Any]) -> Where:
    """Return the addresses of the weight's gradient for Client.push_from; see gradient_at().

    Raises UsageError if the inputs or the gradient were changed after backward().
    """
    if any((one._version, two._version) != versions for one, two, versions in products):
        raise UsageError(
            "the inputs of a linear layer, or the gradient of its outputs, were changed between "
            "backward() and step(), which still needs them: change a copy"
        )
    if weight.grad is not None:  # the weight was used in another way as well
        whole = sum((one.t() @ two for one, two, _ in products), start=weight.grad)
        kept.append(whole)
        return gradient_at(whole, kept)
    factors, vectors, _ = products[0]
    if len(products) > 1:
        factors = torch.cat([one for one, _, _ in products])
        vectors = torch.cat([two for _, two, _ in products])
        kept += (factors, vectors)
    return product_at(factors.data_ptr(), vectors.data_ptr(), len(factors))


def gradient_at(gradient: torch.Tensor, kept: list[Any]) -> Where:
    """Return the gradient's addresses for Client.push_from, valid as long as it and `kept` live.

    kept: takes the copies that are made. Raises ModelMismatch for complex numbers.
    """
    if gradient.dtype is not torch.float32:
        if not gradient.is_floating_point():
            raise ModelMismatch(f"a gradient is {gradient.dtype}, not of real numbers")
        gradient = gradient.to(torch.float32)
        kept.append(gradient)
    if gradient.is_sparse:
        if gradient.sparse_dim() == 1:
            # Not coalesced: rows that a batch names twice are added up by the push.
            indices, values = gradient._indices().contiguous(), gradient._values().contiguous()
            kept += (indices, values)
            return rows_at(indices.data_ptr(), values.data_ptr(), indices.shape[1])
        gradient = gradient.to_dense()
        kept.append(gradient)
    elif not gradient.is_contiguous():
        gradient = gradient.contiguous()
        kept.append(gradient)
    return whole_at(gradient.data_ptr())
