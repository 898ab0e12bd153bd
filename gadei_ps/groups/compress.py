"""Wire formats of models and differences: float32, bfloat16, or 8 bits, with error feedback.

Eight bits: each chunk of 64 values has a scale, the greatest absolute value divided by 127, in
float32; then come its values in steps of the scale, as signed bytes. So 64 values take 68 bytes.

Bounds of the error of one value x: none in float32; in bfloat16 |x| / 256 (x not subnormal); in 8
bits, half a step: the chunk's greatest absolute value / 254, and some roundings of float32.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from gadei_ps import _native
from gadei_ps.groups.parts import BLOCK, Floats
from gadei_ps.memory.layout import CHUNK, WireType

Bytes = npt.NDArray[np.uint8]

GREATEST = np.float32(255 * 2.0**120)
"""The greatest value of bfloat16; what is rounded up from it is an infinity."""
STEPS = 127
SCALE_BYTES = 4


class Wire(StrEnum):
    """The number format in which values travel."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


def size(values: int, wire: Wire) -> int:
    """Return the size of an encoded array of `values` values (bytes)."""
    if wire is Wire.FLOAT32:
        return 4 * values
    if wire is Wire.BFLOAT16:
        return 2 * values
    return SCALE_BYTES * -(-values // CHUNK) + values


def encode(values: Floats, wire: Wire, out: Bytes) -> None:
    """Encode `values`, shape (n,), into `out`, shape (size(n, wire),).

    bfloat16 is rounded to the nearest, ties to even, and keeps NaN. Raises ValueError if a value
    is not finite and the format is 8 bits, which have no such values.
    """
    _check(len(values), wire, out)
    if wire is Wire.FLOAT32:
        out.view(np.float32)[:] = values
    elif wire is Wire.BFLOAT16:
        values = np.ascontiguousarray(values)
        _native.copy(WireType.BFLOAT16, out.ctypes.data, values.ctypes.data, len(values), 0)
    else:
        _to_int8(values, out)


def decode(data: Bytes, wire: Wire, out: Floats) -> None:
    """Decode the n values that `encode` has encoded into `out`, shape (n,)."""
    _check(len(out), wire, data)
    if wire is Wire.FLOAT32:
        out[:] = data.view(np.float32)
    elif wire is Wire.BFLOAT16:
        words = out.view(np.uint32)
        words[:] = data.view(np.uint16)
        np.left_shift(words, np.uint32(16), out=words)
    else:
        _from_int8(data, out)


class Feedback:
    """A sender that adds to what it sends next what rounding has left out (error feedback).

    So over many rounds the sum of what was received follows the sum of what was to be sent: they
    differ by `residual` alone, whose size is that of one rounding. Values must be finite.
    """

    def __init__(self, values: int, wire: Wire) -> None:
        self.wire = wire
        self.residual: Floats = np.zeros(values, np.float32)

    def encode(self, values: Floats, out: Bytes) -> Floats:
        """Encode the values and the residual; return what receivers decode.

        The sender must use the returned values as well.
        """
        np.add(self.residual, values, out=self.residual)
        np.clip(self.residual, -GREATEST, GREATEST, out=self.residual)
        encode(self.residual, self.wire, out)
        received = np.empty_like(values)
        decode(out, self.wire, received)
        np.subtract(self.residual, received, out=self.residual)
        return received


def _check(values: int, wire: Wire, data: Bytes) -> None:
    if len(data) != size(values, wire):
        raise ValueError(
            f"{values} values in {wire} take {size(values, wire)} bytes, not {len(data)}"
        )


def _to_int8(values: Floats, out: Bytes) -> None:
    chunks = -(-len(values) // CHUNK)
    scales = out[: SCALE_BYTES * chunks].view(np.float32)
    steps = out[SCALE_BYTES * chunks :].view(np.int8)
    for begin in range(0, len(values), BLOCK):
        here = slice(begin, begin + BLOCK)
        part = values[here]
        rows = np.zeros((-(-len(part) // CHUNK), CHUNK), np.float32)
        rows.ravel()[: len(part)] = part
        scale = np.abs(rows).max(axis=1) / np.float32(STEPS)
        if not np.isfinite(scale).all():
            raise ValueError("values that are not finite cannot be sent in 8 bits")
        scales[begin // CHUNK : begin // CHUNK + len(rows)] = scale
        scale[scale == 0] = 1
        rows /= scale[:, None]
        np.rint(rows, out=rows)
        # Where the scale is subnormal, its own rounding may give more steps.
        np.clip(rows, -STEPS, STEPS, out=rows)
        steps[here] = rows.ravel()[: len(part)]


def _from_int8(data: Bytes, out: Floats) -> None:
    chunks = -(-len(out) // CHUNK)
    scales = data[: SCALE_BYTES * chunks].view(np.float32)
    steps = data[SCALE_BYTES * chunks :].view(np.int8)
    whole = len(out) // CHUNK * CHUNK
    rows = steps[:whole].reshape(-1, CHUNK)
    np.multiply(rows, scales[: len(rows), None], out=out[:whole].reshape(-1, CHUNK))
    if whole < len(out):
        np.multiply(steps[whole:], scales[-1], out=out[whole:])
