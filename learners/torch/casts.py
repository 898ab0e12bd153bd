"""Tensors of other types than float32: the job keeps their values in float32."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Of parameters, and of buffers beside parameters of the same type."""


def differs(tensor: torch.Tensor) -> bool:
    """Whether it is kept in another type than the job has it in."""
    return tensor.dtype is not torch.float32


def all_differ(layer: torch.nn.Module) -> bool:
    """Whether all parameters of a layer do."""
    return all(map(differs, layer.parameters()))


# None of these is under no_grad(): an interrupt in the middle of that leaves gradients off.
def bring(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Writes the job's values into parameters of other types. pairs: a parameter, its values."""
    for parameter, values in pairs:
        parameter.data.copy_(values)


def host(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values as the job has them: float32, on the host."""
    return tensor.detach().to("cpu", torch.float32).numpy()


def exact(tensor: torch.Tensor) -> np.ndarray:
    """The same, not rounded: the client says what the job cannot have."""
    known = tensor.dtype in (torch.float16, torch.float32, torch.float64)
    rounded = tensor.float() if tensor.is_floating_point() and not known else tensor
    return rounded.numpy(force=True)


def renew(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the job's values into a buffer of another type.

    What is the same to float32 stays as it is: a constant in float64 is not rounded.
    """
    own = buffer.data
    own.copy_(torch.where(own.float() == values, own, values.to(own.dtype)))


def numbers(buffer: torch.Tensor) -> np.ndarray:
    """A buffer's values as NumPy has them, without rounding: of its own memory, or a copy."""
    own = buffer.detach()
    return (own if own.dtype in (torch.float32, torch.float64) else own.float()).numpy()
