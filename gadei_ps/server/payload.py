"""Values of a frame's payload, as the loops that apply them read them.

float32 and bfloat16 are read in place; float16 is decoded into the shard's own memory. Compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from gadei_ps.kernels import cpu
from gadei_ps.kernels.compiled import inlined, inner
from gadei_ps.memory import layout
from gadei_ps.server.constants import BFLOAT16, FLOAT32
from gadei_ps.server.context import Shard
from gadei_ps.server.structs import PART
from gadei_ps.server.symbols import array_at, floats, halves

AS_FLOAT32 = np.float32(0)
AS_BFLOAT16 = np.uint16(0)
# Loops are compiled for each of these; a form's number is its place here.
FORMS = (AS_FLOAT32, AS_BFLOAT16)
FLOAT32_FORM = 0
BFLOAT16_FORM = 1
SCRATCH = np.uint64(layout.offset(PART, "scratch"))
MEAN = np.uint64(layout.offset(PART, "mean"))


class Values(NamedTuple):
    """Values of a gradient, one after the other in memory."""

    at: np.uint64
    """Address."""
    form: Any
    """AS_FLOAT32 or AS_BFLOAT16: by its type, each form gets loops of its own."""


@intrinsic
def values_of(context: Any, form: Any, address: Any, count: Any) -> Any:
    """Return `count` values at an address as an array, of uint16 for bfloat16."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return array_at(context, builder, signature.return_type, *args[1:])

    return types.Array(form, 1, "C")(form, types.uint64, types.intp), build


@intrinsic
def bytes_of(context: Any, form: Any) -> Any:
    """Return the size of one value (bytes)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.uint64, form.bitwidth // 8)

    return types.uint64(form), build


@inlined
def size_of(dtype: int) -> int:
    """Return the size of one value of a payload (bytes)."""
    return 4 if dtype == FLOAT32 else 2


@inner
def _decode(payload: np.uint64, dtype: int, start: int, count: int, out: np.uint64) -> None:
    source = halves(payload + np.uint64(start * 2), count)
    if dtype == BFLOAT16:
        cpu.decode_bfloat16(source, floats(out, count))
    else:
        cpu.decode_float16(source, floats(out, count))


@inlined
def as_float32(
    payload: np.uint64, dtype: int, start: int, count: int, scratch: np.uint64
) -> np.uint64:
    """Return the address of values start to start + count of a payload as float32.

    scratch: where they are decoded to, unless they are float32; at most WINDOW values.
    """
    if dtype == FLOAT32:
        return payload + np.uint64(start * 4)
    _decode(payload, dtype, start, count, scratch)
    return scratch


@inner
def scale_of(s: Shard, member: int) -> float:
    """Return the factor by which clipping scales a frame in flight."""
    scale: float = s.current[member].scale
    return scale


@inner
def mean_at(address: np.uint64, count: int) -> np.ndarray:
    """Return the memory for the mean of `count` values, all zero."""
    mean: np.ndarray = floats(address, count)
    mean[:] = np.float32(0)
    return mean
