"""The undo log of one piece: what is saved comes back, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from gadei_ps.kernels.compiled import compiled
from gadei_ps.memory.layout import CHUNK, UNDO_BYTES, UNDO_HALF
from gadei_ps.server import chunks
from gadei_ps.server.context import Streams
from gadei_ps.server.symbols import address

pytestmark = pytest.mark.usefixtures("compiled")
START, COUNT = 2 * CHUNK, CHUNK // 2


@compiled
def _save(w: np.ndarray, s0: np.ndarray, s1: np.ndarray, undo: np.ndarray, kept: int) -> None:
    at = Streams(address(w), address(s0), address(s1), address(undo))
    chunks.save(at, kept, np.uint64(1), START, COUNT)


@compiled
def _restore(w: np.ndarray, s0: np.ndarray, s1: np.ndarray, undo: np.ndarray, kept: int) -> None:
    at = Streams(address(w), address(s0), address(s1), address(undo))
    chunks.restore(at, kept, np.uint64(1), START, COUNT)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_piece_is_saved_and_restored(kept: int) -> None:
    """kept: slots of the optimizer."""
    streams = [np.arange(4 * CHUNK, dtype=np.float32) + 1000 * one for one in range(1, 4)]
    undo = np.zeros(UNDO_BYTES // 4, np.float32)
    _save(*streams, undo, kept)
    saved = np.zeros_like(undo)
    for place, one in enumerate(streams[: 1 + kept]):
        first = UNDO_HALF // 4 + place * CHUNK
        saved[first : first + COUNT] = one[START : START + COUNT]
    np.testing.assert_array_equal(undo, saved)
    changed = [-one for one in streams]
    wanted = [one.copy() for one in changed]
    for one, old in zip(wanted[: 1 + kept], streams, strict=False):
        one[START : START + COUNT] = old[START : START + COUNT]
    _restore(*changed, undo, kept)
    for found, one in zip(changed, wanted, strict=True):
        np.testing.assert_array_equal(found, one)
