"""A gradient on the device, laid out and converted as the slot will hold it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cupy
import numpy as np

from gadei_ps import _native
from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.cuda import kernels
from gadei_ps.learners.cuda.kernels import ITEMS, LISTED, SKIPPED, Kernels, Launch, bytes_of
from gadei_ps.learners.cuda.rows import RowStaging, lay_out, sizes
from gadei_ps.memory import layout, weights
from gadei_ps.memory.layout import FrameKind, WireType

NO_BLOCKS = np.zeros(0, layout.BLOCK)


class Staged(NamedTuple):
    """A frame in a staging buffer."""

    kind: FrameKind
    blocks: np.ndarray
    """The payload's table of contents, layout.BLOCK; the host writes it into the slot."""
    begin: int
    """Begin of the transfer, from the payload's begin (bytes)."""
    size: int
    """Bytes of the payload."""


class _Part(NamedTuple):
    """A launch of `stage` for some of the tensors."""

    launch: Launch
    tensors: slice
    blocks: int
    items: memoryview
    """Source address and target offset of each tensor, two u64 for each."""


@dataclass
class Outgoing:
    """Memory of one gradient in flight; two of them are used alternately."""

    buffer: cupy.ndarray
    """The payload, bytes on the device."""
    sums: cupy.ndarray
    """Sums that are transferred beside the payload, u64: see kernels.LISTED."""
    landed: int
    """Address of pinned memory that the sums are transferred to."""
    landing: int
    """Address of pinned memory from which the driver publishes: _native.LANDING_BYTES."""
    parts: list[_Part]


class Staging:
    """The staging buffers of one client, on the current device."""

    def __init__(self, client: Client, compiled: Kernels) -> None:
        model = client.model
        self._tensors = model.tensors
        self._trained = len(model.trained)
        self._elements = model.elements
        self._parameters = model.parameters
        self._wire = client.wire
        self._width = bytes_of(self._wire)
        self._sizes = sizes(model.trained, self._width)
        self._first_block = _native.first_block(client.place.weights.address)
        self._offsets = [self._width * tensor.start for tensor in self._tensors]
        chunks = kernels.pieces(model)
        self.squares = len(chunks)
        """Parts of the sum of squares among the sums: one for each chunk."""
        self._chunks = cupy.asarray(chunks.view(np.uint8))
        counts = np.bincount(chunks["tensor"], minlength=len(self._tensors))
        self._first_chunk = np.concatenate([[0], np.cumsum(counts)]).tolist()
        rounds = client.error_feedback and self._wire is not WireType.FLOAT32
        self._residue = cupy.zeros(model.elements if rounds else 0, np.float32)
        self._parts_at = 8 * (LISTED + len(self._tensors))
        words = LISTED + len(self._tensors) + self.squares
        # Pinned: a transfer into other memory would make the host wait.
        each = 8 * words + _native.LANDING_BYTES
        self._pinned = cupy.cuda.alloc_pinned_memory(2 * each)
        self._buffers = [
            self._make_outgoing(
                compiled, words, weights.payload_bytes(model), self._pinned.ptr + at
            )
            for at in (0, each)
        ]
        self._now = 0
        self._rows = RowStaging(
            compiled, self._sizes, self._first_chunk, self._parts_at, self._residue, self._wire
        )

    def _make_outgoing(self, compiled: Kernels, words: int, size: int, pinned: int) -> Outgoing:
        buffer, sums = cupy.zeros(size, np.uint8), cupy.zeros(words, np.uint64)
        ctypes.memset(pinned, 0, 8 * words)
        parts = []
        for first in range(0, self._trained, ITEMS):
            end = min(first + ITEMS, self._trained)
            begin = self._first_chunk[first]
            launch = compiled.launch("stage")
            argument = launch.argument
            argument["residue"] = self._residue.data.ptr if self._residue.size else 0
            argument["staging"] = buffer.data.ptr
            argument["wire"] = int(self._wire)
            argument["first"] = first
            argument["chunks"] = self._chunks.data.ptr + begin * kernels.CHUNK.itemsize
            argument["parts"] = sums.data.ptr + self._parts_at + 8 * begin
            argument["sums"] = 0 if first else sums.data.ptr
            argument["tensors"] = len(self._tensors)
            items = memoryview(argument["items"][0].view(np.uint64))
            blocks = self._first_chunk[end] - begin
            parts.append(_Part(launch, slice(first, end), blocks, items))
        return Outgoing(buffer, sums, pinned, pinned + 8 * words, parts)

    @property
    def next(self) -> Outgoing:
        """Memory of the gradient that is staged next, or is staged and not yet in flight."""
        return self._buffers[self._now]

    @property
    def last(self) -> Outgoing:
        """Memory of the gradient before."""
        return self._buffers[1 - self._now]

    def swap(self) -> None:
        self._now = 1 - self._now

    def room(self) -> cupy.ndarray | None:
        """Return the staging buffer as float32, (model.elements,); None if values are converted."""
        if self._wire is not WireType.FLOAT32:
            return None
        return self.next.buffer[: 4 * self._elements].view(np.float32)

    def stage(self, where: Sequence[int], stream: int, loss_at: int = 0) -> Staged:
        """Launch the kernels that put a gradient into the staging buffer.

        where: as Client.push_from takes it, addresses on the device. loss_at: that of the loss,
        float32, or 0.
        """
        if not any(where[1::4]):  # no rows
            self._stage_whole(where[::4], self._offsets, stream, loss_at)
            return Staged(FrameKind.DENSE, NO_BLOCKS, 0, self._width * self._parameters)
        outgoing = self.next
        given = [where[at : at + 4] for at in range(0, 4 * self._trained, 4)]
        buffer, sums = outgoing.buffer.data.ptr, outgoing.sums.data.ptr
        end = buffer + outgoing.buffer.nbytes
        if any(buffer <= one < end for one in where[::4]):
            # In a frame of rows no tensor lies where room() has it.
            raise UsageError("rows cannot be pushed together with arrays of gradients()")
        blocks, size = lay_out(self._sizes, given, self._width, self._first_block)
        offsets = [SKIPPED] * len(given)
        for block in blocks:
            if not given[block.tensor][1]:
                offsets[block.tensor] = block.values_at
        self._stage_whole(where[::4], offsets, stream, loss_at)
        for block in blocks:
            one = given[block.tensor]
            if one[1]:
                self._rows.stage(one, block, buffer, sums, stream)
        return Staged(FrameKind.ROWS, np.array(blocks, layout.BLOCK), self._first_block, size)

    def _stage_whole(
        self, sources: Sequence[int], offsets: Sequence[int], stream: int, loss_at: int
    ) -> None:
        """Stage whole tensors; in a dense frame those that are not given are zero."""
        for part in self.next.parts:
            pairs = zip(sources[part.tensors], offsets[part.tensors], strict=True)
            for at, word in enumerate(itertools.chain.from_iterable(pairs)):
                part.items[at] = word
            part.launch.argument["loss"] = loss_at
            part.launch.argument["dense"] = offsets is self._offsets
            part.launch(stream, part.blocks)
