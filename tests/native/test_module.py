"""gadei_ps._native: wrong use raises, and gradients are any sequences."""

from __future__ import annotations

from array import array
from collections import UserList

import numpy as np
import pytest
import support.frames
from clients.ring import Ring

from gadei_ps import _native
from gadei_ps.memory import layout, weights
from gadei_ps.memory.layout import FrameKind, WireType
from gadei_ps.memory.weights import Model, Tensor

MODEL: Model = weights.place([Tensor("w", (2, 3), layout.Role.PARAMETER, 0)])


@pytest.mark.parametrize("wrong", [(0, 0), (2**32, 0), (layout.MAX_SHARDS + 1, 0), (2, 2)])
def test_shards_that_no_job_has(wrong: tuple[int, int]) -> None:
    shards, index = wrong
    with pytest.raises(ValueError, match=f"no shard {index} of {shards}"):
        _native.shard_range(1000, shards, index)


def test_a_learner_has_its_segments() -> None:
    """There is none without, and none whose segments change."""
    with pytest.raises(TypeError, match="takes exactly 5 arguments"):
        _native.Learner.__new__(_native.Learner)
    control, table = np.zeros(1, layout.CONTROL), support.frames.Loose(MODEL)
    given = 0, _native.address(control), table.address, int(WireType.FLOAT32), 0
    learner = _native.Learner(*given)
    learner.empty(1)
    learner.__init__(*given)
    assert learner.kind == FrameKind.EMPTY
    with pytest.raises(TypeError, match="takes a Cuda, not 7"):
        learner.land(7, ())


def test_gradients_are_any_sequence() -> None:
    values = np.arange(6, dtype=np.float32)
    room = np.zeros(weights.payload_bytes(MODEL) + 64, np.uint8)
    for kind in (list, tuple, UserList, lambda given: array("Q", given)):
        for where in ([values.ctypes.data], [values.ctypes.data, 0, 0, 0]):
            room[:] = 0
            support.frames.written(MODEL, kind(where), room, WireType.FLOAT32, skip_zeros=False)
            np.testing.assert_array_equal(room[:24].view(np.float32), values)
    with pytest.raises(TypeError, match="a sequence of addresses"):
        support.frames.written(MODEL, 7, room, WireType.FLOAT32, skip_zeros=False)


def test_a_consistent_copy_goes_by_the_job_not_by_the_ring() -> None:
    """The learner itself can write its ring."""
    ring = Ring(2, 1)
    ring.control["shards"] = 2
    model = weights.place([Tensor("w", (100,), layout.Role.PARAMETER, 0)])
    segment = np.zeros(weights.segment_bytes(model), np.uint8)
    loose = support.frames.Loose(model)
    segment[: len(loose.bytes)] = loose.bytes
    live = segment[weights.data_at(1) :][: 4 * model.elements].view(np.float32)
    live[:] = np.arange(model.elements)
    learner = _native.Learner(ring.at, ring.control_at, segment.ctypes.data, 1, 0)
    for shards in (0, 1, 2, 3):
        ring.ring["shards"] = shards
        copy = np.full(model.elements, -1, np.float32)
        learner.copy_begin(_native.address(copy))
        assert learner.copy_on(0) == 0
        learner.copy_end()
        np.testing.assert_array_equal(copy, live)


def test_a_word_and_half_a_word() -> None:
    words = np.full(3, 2**64 - 1, np.uint64)
    at = words.ctypes.data + 8
    _native.store32(at, 5)
    assert words.tolist() == [2**64 - 1, (2**32 - 1) << 32 | 5, 2**64 - 1]
    _native.store(at, 6)
    assert words.tolist() == [2**64 - 1, 6, 2**64 - 1]
    assert (_native.load(at), _native.load32(at)) == (6, 6)
