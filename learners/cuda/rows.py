"""Staging of the gradient of some rows of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from gadei_ps.learners.cuda.kernels import (
    FEW,
    FEW_BLOCKS,
    MANY_THREADS,
    THREADS,
    Kernels,
    bytes_of,
)
from gadei_ps.memory import layout
from gadei_ps.memory.layout import FrameKind, WireType
from gadei_ps.memory.weights import Tensor

LINE = 64


class Block(NamedTuple):
    """Fields of layout.BLOCK: a tensor's place in a frame, bytes from the payload's begin."""

    tensor: int
    form: FrameKind
    rows: int
    indices_at: int
    values_at: int


class Size(NamedTuple):
    """Facts of a tensor's shape, computed once because the host lays out a frame in each step."""

    start: int
    values: int
    rows: int
    row: int
    """Values of a row."""
    whole: int
    """Bytes in a frame, if it is given whole."""


def sizes(tensors: Sequence[Tensor], width: int) -> list[Size]:
    """Return the sizes of tensors. width: bytes of a value in a frame."""
    return [
        Size(one.start, one.count, one.rows, one.count // one.rows, _rounded(width * one.count))
        for one in tensors
    ]


def lay_out(
    tensors: Sequence[Size], given: Sequence[Sequence[int]], width: int, begin: int
) -> tuple[list[Block], int]:
    """Return the blocks of a frame whose values begin at `begin`, and where it ends.

    given: of each tensor four numbers as Client.push_from takes them. A block has room for as many
    rows as may turn out to be named; how many is known only on the device. width: bytes of a value.
    """
    blocks = []
    at = begin
    for number, (tensor, one) in enumerate(zip(tensors, given, strict=True)):
        if not any(one):
            continue
        if one[1]:
            rows = min(one[2], tensor.rows)
            listed, values = _rounded(8 * rows), _rounded(width * rows * tensor.row)
            # As native/ps_payload.c: a slot has no room for the numbers of rows of one value.
            if tensor.row > 1 or listed + values <= _rounded(4 * tensor.rows) + LINE:
                blocks.append(Block(number, FrameKind.ROWS, rows, at, at + listed))
                at += listed + values
                continue
        blocks.append(Block(number, FrameKind.DENSE, 0, at, at))
        at += tensor.whole
    return blocks, at


def _rounded(size: int) -> int:
    return layout.rounded(size, LINE)


class RowStaging:
    """Launches the kernels that list each row once and add up what is given for it."""

    def __init__(
        self,
        compiled: Kernels,
        tensors: Sequence[Size],
        first_chunk: Sequence[int],
        parts_at: int,
        residue: cupy.ndarray,
        wire: WireType,
    ) -> None:
        """Prepare the launches.

        first_chunk: of each tensor, and the end. parts_at: begin of the parts of the sum of squares
        among the sums, bytes. residue: of the model, or empty.
        """
        self._tensors = tensors
        self._first_chunk = first_chunk
        self._parts_at = parts_at
        self._residue = residue
        self._wire = wire
        self._list = compiled.launch("list_rows")
        self._add = compiled.launch("add_rows")
        self._lists: cupy.ndarray | None = None

    def stage(
        self, where: Sequence[int], block: Block, staging: int, sums: int, stream: int
    ) -> None:
        """Stage the rows of one tensor at the place in its block of the frame.

        where: as CudaLink.push_from takes it; staging, sums: addresses on the device.
        """
        number, count = block.tensor, where[2]
        tensor = self._tensors[number]
        whole = block.form is FrameKind.DENSE
        to = staging + block.values_at
        if whole:
            runtime.memsetAsync(to, 0, bytes_of(self._wire) * tensor.values, stream)
        if not count:
            return
        many = count > FEW
        keys, heads = self._room_for(count, stream) if many else (0, 0)
        listed = 0 if whole else staging + block.indices_at
        chunk, end = self._first_chunk[number : number + 2]
        parts = sums + self._parts_at + 8 * chunk
        residue = self._residue.data.ptr + 4 * tensor.start if self._residue.size else 0
        argument = (
            *(where[1], where[0], count, tensor.rows, tensor.row, where[3]),
            *(keys, heads, listed),
            *(sums, parts, to, residue, number, self._wire, whole),
        )
        if many:
            self._list.set(*argument)
            self._list(stream, 1, MANY_THREADS)
        # add_rows writes a sum of squares for each of its blocks; there is room for the chunks'.
        pieces = min(count * -(-tensor.row // THREADS), end - chunk)
        self._add.set(*argument)
        self._add(stream, max(1, pieces if many else min(pieces, FEW_BLOCKS)))

    def _room_for(self, count: int, stream: int) -> tuple[int, int]:
        """Return addresses of the keys and heads of so many places, which all tensors use."""
        keys = 1 << (count - 1).bit_length()
        if self._lists is None or self._lists.size < 8 * keys + 4 * count + 4:
            runtime.streamSynchronize(stream)  # it may still use the old arrays
            self._lists = cupy.zeros(12 * keys + 4, np.uint8)
            cupy.cuda.get_current_stream().synchronize()
        at = self._lists.data.ptr
        return at, at + 8 * keys
