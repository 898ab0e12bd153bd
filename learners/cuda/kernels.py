"""Compiles kernels.cu for the current device by NVRTC, and launches its kernels."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from gadei_ps.errors import DeviceError
from gadei_ps.learners.cuda.device_errors import is_full
from gadei_ps.machine.cuda import first_line
from gadei_ps.memory.layout import WireType
from gadei_ps.memory.weights import Model

THREADS = 256
ITEMS = 224  # tensors that one launch of `stage` takes: its argument may have 4 KB
BLOCKS = 1024  # of kernels that go over any number of values
FEW = 2048  # rows named, which each block of `add_rows` lists in its own memory
MANY_THREADS = 1024  # of the one block that lists more
FEW_BLOCKS = 256  # that list them: about two for each multiprocessor
SKIPPED = 2**64 - 1
PIECE = 8192  # values, for one block of threads: enough that its begin and end take little

# Words of the sums, which travel beside a gradient (native/ps_land.h): from LISTED on, the number
# of rows listed of each tensor, then the parts of the sum of squares.
BAD, LOSS, LISTED = 0, 1, 2


def _words(names: str) -> list[tuple[str, str]]:
    return [(name, "u8") for name in names.split()]


def _halves(names: str) -> list[tuple[str, str]]:
    return [(name, "u4") for name in names.split()]


# As in kernels.cu, each a struct of C.
CHUNK = np.dtype(_words("start begin padded") + _halves("count tensor"))
ITEM = np.dtype(_words("from to"))
STAGE = np.dtype(
    [
        *_words("chunks residue staging parts sums loss tensors dense"),
        *_halves("wire first"),
        ("items", ITEM, (ITEMS,)),
    ]
)
ROWS = np.dtype(
    _words("indices values count rows width padding keys heads listed sums parts to residue tensor")
    + _halves("wire whole")
)
GATHER = np.dtype(_words("table indices to rows width count"))

STRUCTS = {"stage": STAGE, "list_rows": ROWS, "add_rows": ROWS, "gather": GATHER}


def bytes_of(wire: WireType) -> int:
    """Return the size of a value in a frame (bytes)."""
    return 4 if wire is WireType.FLOAT32 else 2


def blocks_for(threads: int) -> int:
    return min(-(-threads // THREADS), BLOCKS)


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


class Launch:
    """A kernel and its argument, a struct, which is copied at each launch."""

    def __init__(self, function: Any, fields: np.dtype[np.void]) -> None:
        self.argument = np.zeros(1, fields)
        self._bytes = self.argument.view(np.uint8).data
        words = "".join("Q" if fields[name].itemsize == 8 else "I" for name in fields.names or ())
        self._struct = struct.Struct(f"={words}")
        self._function = function
        self._parameters = np.array([self.argument.ctypes.data], np.uintp)
        self._at = self._parameters.ctypes.data

    def set(self, *values: int) -> None:
        """Set all fields of an argument of single numbers."""
        self._struct.pack_into(self._bytes, 0, *values)

    def __call__(self, stream: int, blocks: int, threads: int = THREADS) -> None:
        cupy.cuda.driver.launchKernel(
            self._function.ptr, blocks, 1, 1, threads, 1, 1, 0, stream, self._at, 0
        )


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

    def launch(self, name: str) -> Launch:
        return Launch(self._module.get_function(name).kernel, STRUCTS[name])
