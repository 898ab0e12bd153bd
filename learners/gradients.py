"""Gradients, and values that replace weights, as the addresses that the native half reads.

A tensor's gradient is four numbers: address of the values, address of the row indices, number of
rows, address of the factors (struct ps_gradient in native/ps_learner.h).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gadei_ps import _native
from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import F32, FloatArray, Model, Tensor


class Rows(NamedTuple):
    """The gradient of some rows of a tensor, as mini-batches touch an embedding's.

    indices: int64 of shape (n,), in any order; the values of repeated ones are added up. values:
    float32 of shape (n, and the tensor's without its first dimension). Where rows are single
    values, a list of more than a third of them would take more room than all values: then all are
    pushed, and rows that are not named move as by a gradient of zero.
    """

    indices: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


Gradients = Mapping[str, npt.NDArray[Any] | Rows | None]
Values = Mapping[str, npt.ArrayLike]
"""Values of tensors by name, each of its tensor's shape."""

Where = tuple[int, int, int, int]
"""A tensor's gradient by its addresses: values, indices, count, factors."""

NONE: Where = (0, 0, 0, 0)
"""A tensor without a gradient."""


def whole_at(values: int) -> Where:
    """Return all of a tensor, by its address."""
    return values, 0, 0, 0


def rows_at(indices: int, values: int, count: int) -> Where:
    """Return rows of a tensor: int64 indices and their float32 values, by address."""
    # No rows are also rows, not a whole tensor; an empty array may have no address.
    return (values, indices, count, 0) if count else (1, 1, 0, 0)


def product_at(factors: int, vectors: int, count: int) -> Where:
    """Return the transpose of `factors` times `vectors`, by address.

    factors: float32 of shape (count, rows of the tensor). vectors: (count, values of a row).
    """
    return (vectors, 0, count, factors) if count else NONE


UNTOUCHED = rows_at(0, 0, 0)
"""No rows of a tensor: it stays as it is, with the optimizer's state of it."""


def row_indices(tensor: str, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the indices as int64. Raises ModelMismatch unless they are integers."""
    given = np.asarray(indices)
    check_integers(tensor, given)
    return np.ascontiguousarray(given, np.int64)


def check_integers(tensor: str, indices: Any) -> None:
    """Raise ModelMismatch unless the indices of a tensor's rows are integers."""
    if indices.size and indices.dtype.kind not in "iu":
        raise ModelMismatch(f"rows of {tensor!r}: indices of {indices.dtype}, not integers")


def addresses(model: Model, gradients: Gradients | FloatArray, kept: list[object]) -> list[int]:
    """Return the addresses of gradients, as Client.push_from() takes them.

    kept: receives the arrays, which must live as long as the addresses are used. Raises
    ModelMismatch.
    """
    if isinstance(gradients, np.ndarray):
        if gradients.shape != (model.elements,):
            raise ModelMismatch(
                f"gradient has shape {list(gradients.shape)}, the model [{model.elements}]"
            )
        flat = np.ascontiguousarray(gradients, np.float32)
        kept.append(flat)
        return [_native.address(flat)]
    if not isinstance(gradients, Mapping):
        raise ModelMismatch(
            f"gradients are a {type(gradients).__name__}, not arrays by name or one flat array"
        )
    where: list[int] = []
    named = 0
    for tensor in model.tensors:
        gradient = gradients.get(tensor.name)
        named += tensor.name in gradients
        if gradient is None:
            where += NONE
        elif tensor.role is Role.BUFFER:
            raise no_gradient(tensor)
        elif isinstance(gradient, Rows):
            indices, values = _rows(tensor, gradient)
            kept += (indices, values)
            where += rows_at(_native.address(indices), _native.address(values), indices.size)
        else:
            source = _source(tensor, gradient)
            kept.append(source)
            where += whole_at(_native.address(source))
    if named < len(gradients):
        check_names(gradients, {tensor.name for tensor in model.tensors})
    return where


def check_names(given: Iterable[str], known: Container[str]) -> None:
    """Raise ModelMismatch if a tensor is given that the job's model does not have."""
    for name in given:
        if name not in known:
            raise ModelMismatch(f"the job's model has no tensor {name!r}")


def no_gradient(buffer: Tensor) -> ModelMismatch:
    """Return the error for a gradient of a buffer."""
    return ModelMismatch(
        f"{buffer.name!r} is a buffer, which no gradient changes: write it with assign()"
    )


def _rows(tensor: Tensor, given: Rows) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Return indices and values as C reads them. Raises ModelMismatch."""
    indices = row_indices(tensor.name, given.indices)
    values = np.ascontiguousarray(given.values, np.float32)
    check_rows(tensor, indices, values)
    return indices, values


def check_rows(tensor: Tensor, indices: Any, values: Any) -> None:
    """Raise ModelMismatch unless these arrays, of NumPy or CuPy, are rows of the tensor."""
    if indices.ndim != 1 or values.shape != (indices.size, *tensor.shape[1:]):
        raise ModelMismatch(
            f"rows of {tensor.name!r}: {list(indices.shape)} indices and values of shape "
            f"{list(values.shape)}; the tensor has shape {list(tensor.shape)}"
        )


def check_whole(tensor: Tensor, gradient: Any) -> None:
    """Raise ModelMismatch unless an array, of NumPy or CuPy, has the tensor's shape."""
    if gradient.shape != tensor.shape:
        raise ModelMismatch(
            f"gradient of {tensor.name!r} has shape {list(gradient.shape)}, "
            f"the tensor {list(tensor.shape)}"
        )


def _source(tensor: Tensor, gradient: npt.NDArray[Any]) -> FloatArray:
    """Return the gradient of a whole tensor as C reads it. Raises ModelMismatch."""
    if not hasattr(gradient, "shape"):
        raise ModelMismatch(
            f"gradient of {tensor.name!r} is a {type(gradient).__name__}, not an array or Rows"
        )
    check_whole(tensor, gradient)
    return np.ascontiguousarray(gradient, np.float32)


class Assigned(NamedTuple):
    """Values that were checked against the model, for Client.assign() and its relatives."""

    where: list[int]
    """Four numbers for each tensor of the model, as Client.push_from() takes them."""
    arrays: list[FloatArray]
    """The arrays at these addresses."""


def assigned(model: Model, values: Values, *, finite: bool) -> Assigned:
    """Check values and return them as C reads them.

    finite: whether parameters must not hold a NaN or an infinity. Raises ModelMismatch, UsageError.
    """
    if not isinstance(values, Mapping):
        raise ModelMismatch(f"assign takes arrays by name, not a {type(values).__name__}")
    check_names(values, {tensor.name for tensor in model.tensors})
    where: list[int] = []
    arrays: list[FloatArray] = []
    for tensor in model.tensors:
        if tensor.name not in values:
            where += NONE
            continue
        array = _values(tensor, values[tensor.name], finite and tensor.role is Role.PARAMETER)
        arrays.append(array)
        where += whole_at(_native.address(array))
    return Assigned(where, arrays)


def _values(tensor: Tensor, given: npt.ArrayLike, finite: bool) -> FloatArray:
    """Return the elements that hold a tensor's values. Raises ModelMismatch, UsageError."""
    found = _numbers(tensor.name, given)
    if found.shape != tensor.shape:
        raise ModelMismatch(
            f"{tensor.name!r} was given values of shape {list(found.shape)}, "
            f"the tensor has shape {list(tensor.shape)}"
        )
    if tensor.dtype != F32:
        packed = np.zeros(max(tensor.count, 1), np.float32)
        replace(tensor, start=0).of(packed)[...] = found
        return packed
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(found, np.float32)
    if finite and not np.isfinite(array).all():
        beyond = found.dtype.kind == "f" and np.isfinite(found).all()
        what = "a number beyond float32's range" if beyond else "a NaN or an infinity"
        raise UsageError(
            f"assign: {tensor.name!r} holds {what}, which the job refuses; nothing is changed"
        )
    return array


def _numbers(name: str, given: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise ModelMismatch(f"{name!r}: give numbers to assign: {why}") from None
    if found.dtype.kind not in "biuf" and not np.can_cast(found.dtype, np.float32):
        raise ModelMismatch(f"{name!r}: give numbers to assign, not {found.dtype}")
    return found
