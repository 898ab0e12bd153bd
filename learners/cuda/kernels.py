"""Compiles kernels.cu for the current device by NVRTC."""

from __future__ import annotations

from pathlib import Path

import cupy
import numpy as np

from gadei_ps.errors import DeviceError
from gadei_ps.learners.cuda.device_errors import is_full
from gadei_ps.machine.cuda import first_line
from gadei_ps.memory.weights import Model

PIECE = 2048
"""Values that a block of threads does: the best of 1024 to 8192 on an H200, for 1 to 25 MB. For
each piece, eight bytes travel beside the gradient."""

CHUNK = np.dtype(
    [("start", "u8"), ("begin", "u8"), ("padded", "u8"), ("count", "u4"), ("tensor", "u4")]
)
"""A piece of a tensor: struct chunk of kernels.cu."""
KERNELS = ("stage", "list_rows", "gather")
"""Their names, in the order of struct ps_cuda_kernels (native/ps_cuda.h)."""


def pieces(model: Model) -> np.ndarray:
    """Return the pieces that the blocks of `stage` each do, CHUNK: of all parameters, with their
    gaps."""
    found = []
    ends = [*(tensor.start for tensor in model.trained[1:]), model.parameters]
    for number, (tensor, end) in enumerate(zip(model.trained, ends, strict=True)):
        for begin in range(0, max(tensor.count, 1), PIECE):
            count = min(PIECE, tensor.count - begin)
            last = begin + count == tensor.count
            padded = end - tensor.start - begin if last else count
            found.append((tensor.start + begin, begin, padded, count, number))
    return np.array(found, CHUNK)


class Kernels:
    """Compiled for the current device. Raises DeviceError if that cannot be done, and CUDA's error
    if memory is lacking."""

    def __init__(self, index: int) -> None:
        try:
            source = Path(__file__).with_name("kernels.cu").read_text()
            # Kept: the functions live as long as their module.
            self._module = cupy.RawModule(code=source, options=("-std=c++17",))
            self._module.compile()
        except (OSError, RuntimeError, cupy.cuda.compiler.CompileException) as error:
            if is_full(error):
                raise
            raise DeviceError(
                f"GPU {index}: cannot compile the kernels ({first_line(error)})"
            ) from None

    @property
    def addresses(self) -> list[int]:
        """The driver's handles of KERNELS."""
        return [self._module.get_function(name).kernel.ptr for name in KERNELS]
