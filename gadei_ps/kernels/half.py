"""Conversion of float16 to float32 by an instruction, if the processor has one."""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _has_conversion() -> bool:
    """Return whether Numba's target has the instruction.

    Without it, LLVM would call a missing function.
    """
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:  # not for this processor
        return False
    features: dict[str, bool] = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("f16c", False))


HAS_CONVERSION = _has_conversion()


@intrinsic
def from_bits(context: Any, bits: Any) -> tuple[Any, Any]:
    """Convert a float16, given as uint16, to float32: exact, but a signalling NaN becomes quiet."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), build
