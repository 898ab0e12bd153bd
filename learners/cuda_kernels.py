"""The kernels of kernels.cu, compiled for the device at hand by NVRTC, and what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cupy
import numpy as np

from gadei_ps import layout
from gadei_ps.weights import Model

THREADS = 256
ITEMS = 224  # tensors that one launch of `stage` knows: its argument may have 4 KB
BLOCKS = 1024  # of kernels that go over any number of values
SKIPPED = 2**64 - 1
PIECE = 16384  # values, for one block of threads


def _words(names: str) -> list[tuple[str, str]]:
    return [(name, "u8") for name in names.split()]


def _halves(names: str) -> list[tuple[str, str]]:
    return [(name, "u4") for name in names.split()]


# As in kernels.cu, each a struct of C.
CHUNK = np.dtype(_halves("tensor buffer") + _words("start begin") + _halves("count padded"))
ITEM = np.dtype(_words("from to"))
STAGE = np.dtype(
    [*_words("chunks base left staging parts"), *_halves("wire first"), ("items", ITEM, (ITEMS,))]
)
ROWS = np.dtype(
    _words("indices values count rows width first next head listed sums parts to left tensor")
    + _halves("wire whole")
)
GATHER = np.dtype(_words("table indices to rows width count"))

NAMES = ("stage", "link_rows", "list_rows", "add_rows", "gather")


def pieces(model: Model) -> np.ndarray:
    """What the blocks of `stage` each do, CHUNK: the whole model, gaps between tensors included."""
    found = []
    ends = [*(tensor.start for tensor in model.tensors[1:]), model.elements]
    for number, (tensor, end) in enumerate(zip(model.tensors, ends, strict=True)):
        for begin in range(0, tensor.count, PIECE):
            count = min(PIECE, tensor.count - begin)
            last = begin + count == tensor.count
            padded = end - tensor.start - begin if last else count
            is_buffer = tensor.role is layout.Role.BUFFER
            found.append((number, is_buffer, tensor.start + begin, begin, count, padded))
    return np.array(found, CHUNK)


class Kernels:
    """Launches them. Streams and memory are given by address."""

    def __init__(self) -> None:
        source = Path(__file__).with_name("kernels.cu").read_text()
        # Kept: the functions live as long as their module.
        self._module = cupy.RawModule(code=source, options=("-std=c++17",))
        self._functions = {name: self._module.get_function(name).kernel for name in NAMES}

    def launch(self, name: str, stream: int, blocks: int, argument: np.ndarray) -> None:
        """argument: the kernel's struct, shape (1,); it may be changed as soon as this returns."""
        parameters = np.array([argument.ctypes.data], np.uintp)
        function = self._functions[name].ptr
        shape: tuple[Any, ...] = (blocks, 1, 1, THREADS, 1, 1)
        cupy.cuda.driver.launchKernel(function, *shape, 0, stream, parameters.ctypes.data, 0)
