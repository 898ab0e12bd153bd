"""Tensors of other types than float32: the job has parameters in float32, and all else as it is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types of parameters."""
KINDS = {
    "F32": torch.float32,
    "F64": torch.float64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of buffers and frozen parameters, by the names of weights.DTYPES."""


def differs(tensor: torch.Tensor) -> bool:
    """Return whether it is kept in another type than the job has it in."""
    return tensor.dtype is not torch.float32


def all_differ(layer: torch.nn.Module) -> bool:
    """Return whether all parameters of a layer do."""
    return all(map(differs, layer.parameters()))


# None of these is under no_grad(): an interrupt in the middle of that leaves gradients off.
def copy_to_parameters(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write the job's values into parameters of other types. pairs: a parameter, its values."""
    for parameter, values in pairs:
        parameter.data.copy_(values)


def host(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's values as the job has them: float32, on the host."""
    return tensor.detach().to("cpu", torch.float32).numpy()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a job can have a tensor that no gradient moves."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return False
    plain = type(tensor.data) is torch.Tensor and not tensor.is_meta
    return plain and tensor.dtype in KINDS.values()


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a buffer or frozen tensor for NumPy, mostly in the same memory."""
    own = tensor.detach().to("cpu")
    if own.dtype is torch.bfloat16:
        return own.view(torch.int16).numpy().view(np.uint16)
    return own.numpy()


def copy(tensor: torch.Tensor, dtype: str = "") -> np.ndarray:
    """Return the same in memory of its own: torch resizes no tensor whose memory NumPy has seen.

    dtype: of KINDS, if not the tensor's own.
    """
    return bits(tensor.detach().to("cpu", KINDS.get(dtype, tensor.dtype), copy=True))


def tensor(values: np.ndarray, dtype: str) -> torch.Tensor:
    """Convert what bits() returns to a tensor of its own. dtype: of KINDS."""
    if dtype == "BF16":
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


def exact(tensor: torch.Tensor) -> np.ndarray:
    """Return the same, not rounded: the client rejects what the job cannot have."""
    known = tensor.dtype in (torch.float16, torch.float32, torch.float64)
    rounded = tensor.float() if tensor.is_floating_point() and not known else tensor
    return rounded.numpy(force=True)
