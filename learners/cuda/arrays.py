"""Gradients on the device as addresses: arrays of CuPy, and of others that speak DLPack."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from gadei_ps.errors import ModelMismatch
from gadei_ps.learners.client import NONE, Rows, Where, rows_at, whole_at
from gadei_ps.memory.weights import Tensor


def where_is(tensor: Tensor, gradient: Any, kept: list[Any]) -> Where:
    """The addresses of a tensor's gradient, valid as long as `kept`, which takes the arrays.

    Raises ModelMismatch.
    """
    if gradient is None:
        return NONE
    if isinstance(gradient, Rows):
        given = _array(tensor, gradient.indices)
        if given.size and given.dtype.kind not in "iu":
            raise ModelMismatch(f"rows of {tensor.name!r}: indices of {given.dtype}, not integers")
        indices = cupy.ascontiguousarray(given, np.int64)
        values = cupy.ascontiguousarray(_array(tensor, gradient.values), np.float32)
        if indices.ndim != 1 or values.shape != (indices.size, *tensor.shape[1:]):
            raise ModelMismatch(
                f"rows of {tensor.name!r}: {list(indices.shape)} indices and values of shape "
                f"{list(values.shape)}; the tensor has shape {list(tensor.shape)}"
            )
        kept += (indices, values)
        return rows_at(indices.data.ptr, values.data.ptr, indices.size)
    array = _array(tensor, gradient)
    if array.shape != tensor.shape:
        raise ModelMismatch(
            f"gradient of {tensor.name!r} has shape {list(array.shape)}, "
            f"the tensor {list(tensor.shape)}"
        )
    array = cupy.ascontiguousarray(array, np.float32)
    kept.append(array)
    return whole_at(array.data.ptr)


def _array(tensor: Tensor, given: Any) -> cupy.ndarray:
    """Without a copy. Raises ModelMismatch for what is not on a device."""
    if isinstance(given, cupy.ndarray):
        return given
    if not isinstance(given, np.ndarray) and hasattr(given, "__dlpack__"):
        try:
            return cupy.from_dlpack(given)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, runtime.CUDARuntimeError):
                raise
    raise ModelMismatch(
        f"gradient of {tensor.name!r} is a {type(given).__module__}.{type(given).__name__}, not an "
        "array on the GPU"
    )
