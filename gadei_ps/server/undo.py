"""The undo log: old values of the chunk that is being changed.

The log has two halves, which consecutive pieces use in turn, so the values of the open piece stay
until the cursor has moved on. Compiled into the loops of chunks.py.
"""

from __future__ import annotations

import numpy as np

from gadei_ps.kernels.compiled import inlined
from gadei_ps.memory import layout
from gadei_ps.server.constants import ONE
from gadei_ps.server.context import Streams
from gadei_ps.server.symbols import floats

HALF_BYTES = np.uint64(layout.UNDO_HALF)
STREAM_BYTES = np.uint64(layout.CHUNK * 4)
SLOT0 = STREAM_BYTES  # where a half of the log has the optimizer's slots
SLOT1 = STREAM_BYTES + STREAM_BYTES


@inlined
def _copy(to: np.ndarray, source: np.ndarray) -> None:
    for i in range(source.size):
        to[i] = source[i]


@inlined
def _half(at: Streams, piece: np.uint64) -> np.uint64:
    """Address of the half of the log in which this piece is saved."""
    return at.undo + (piece & ONE) * HALF_BYTES


@inlined
def save(at: Streams, kept: int, piece: np.uint64, start: int, count: int) -> None:
    """Copy a piece's weights and slots into the log, in one loop, as `update` reads them."""
    here, undo = np.uint64(start * 4), _half(at, piece)
    old, w = floats(undo, count), floats(at.weights + here, count)
    old0, s0 = floats(undo + SLOT0, count), floats(at.slot0 + here, count)
    old1, s1 = floats(undo + SLOT1, count), floats(at.slot1 + here, count)
    if kept == 0:
        _copy(old, w)
    elif kept == 1:
        for i in range(count):
            old[i] = w[i]
            old0[i] = s0[i]
    else:
        for i in range(count):
            old[i] = w[i]
            old0[i] = s0[i]
            old1[i] = s1[i]


@inlined
def save_line(at: Streams, kept: int, piece: np.uint64, start: int, low: int, count: int) -> None:
    """Copy some values of the piece that begins at `start`, from its low-th on."""
    here, there = np.uint64((start + low) * 4), _half(at, piece) + np.uint64(low * 4)
    _copy(floats(there, count), floats(at.weights + here, count))
    if kept > 0:
        _copy(floats(there + SLOT0, count), floats(at.slot0 + here, count))
    if kept > 1:
        _copy(floats(there + SLOT1, count), floats(at.slot1 + here, count))


@inlined
def restore(at: Streams, kept: int, piece: np.uint64, start: int, count: int) -> None:
    """Copy a piece's weights and slots from the log back to where they belong."""
    here, undo = np.uint64(start * 4), _half(at, piece)
    _copy(floats(at.weights + here, count), floats(undo, count))
    if kept > 0:
        _copy(floats(at.slot0 + here, count), floats(undo + SLOT0, count))
    if kept > 1:
        _copy(floats(at.slot1 + here, count), floats(undo + SLOT1, count))
