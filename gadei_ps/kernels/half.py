"""float16 as float32 by the processor's own conversion, where it has one."""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic


def _has_conversion() -> bool:
    """Whether what Numba compiles for has it; without, LLVM calls a function that is not there."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:  # not for this processor
        return False
    features: dict[str, bool] = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("f16c", False))


HAS_CONVERSION = _has_conversion()


@intrinsic
def from_bits(context: Any, bits: Any) -> tuple[Signature, Any]:
    """The float32 of a float16's bits, given as uint16. Exact; a signalling NaN becomes quiet."""

    def build(context: Any, builder: ir.IRBuilder, signature: Signature, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), build
