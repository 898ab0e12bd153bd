"""Memory of the gradients that are in flight, on the device and beside it."""

from __future__ import annotations

import ctypes

import cupy
import numpy as np
from cupy.cuda import runtime

from gadei_ps import _native
from gadei_ps.learners.client import Client
from gadei_ps.learners.cuda import kernels
from gadei_ps.memory import weights
from gadei_ps.memory.layout import WireType


class Staging:
    """Two gradients in flight, on the current device, which take turns.

    Each has a staging buffer, sums that are transferred beside it, and pinned memory for them: a
    transfer into other memory would make the host wait.
    """

    def __init__(self, client: Client) -> None:
        model = client.model
        self._elements = model.elements
        self._is_converted = client.wire is not WireType.FLOAT32
        chunks = kernels.pieces(model)
        self._chunks = cupy.asarray(chunks.view(np.uint8))
        counts = np.bincount(chunks["tensor"], minlength=len(model.trained))
        self._first_chunk = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
        rounds = client.error_feedback and self._is_converted
        self._residue = cupy.zeros(model.elements if rounds else 0, np.float32)
        words = _native.PS_SUMS_ROWS + len(model.tensors) + len(chunks)
        self._pinned = cupy.cuda.alloc_pinned_memory(2 * 8 * words)
        ctypes.memset(self._pinned.ptr, 0, 2 * 8 * words)
        size = weights.payload_bytes(model)
        self._buffers = [cupy.zeros(size, np.uint8) for _ in range(2)]
        self._sums = [cupy.zeros(words, np.uint64) for _ in range(2)]
        self._lists: cupy.ndarray | None = None

    @property
    def addresses(self) -> list[int]:
        """The end of struct ps_cuda_setup, from `residue` on."""
        found = [
            self._residue.data.ptr if self._residue.size else 0,
            self._chunks.data.ptr,
            self._first_chunk.ctypes.data,
        ]
        for number, (buffer, sums) in enumerate(zip(self._buffers, self._sums, strict=True)):
            landed = self._pinned.ptr + number * sums.nbytes
            found += buffer.data.ptr, buffer.nbytes, sums.data.ptr, landed
        return found

    def room(self, number: int) -> cupy.ndarray | None:
        """Return a staging buffer as float32, (model.elements,); None if values are converted."""
        if self._is_converted:
            return None
        return self._buffers[number][: 4 * self._elements].view(np.float32)

    def grow(self, rows: int, stream: int) -> tuple[int, int]:
        """Allocate memory to list `rows` rows of a tensor, or more: its address, and how many."""
        runtime.streamSynchronize(stream)  # it may still use the old one
        rows = 1 << (rows - 1).bit_length()
        self._lists = cupy.zeros(12 * rows + 4, np.uint8)  # native/ps_cuda.h
        cupy.cuda.get_current_stream().synchronize()
        return int(self._lists.data.ptr), rows
