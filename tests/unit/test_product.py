"""Gradients that are products: worked out in the slot as NumPy works them out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from support import decoded_frame

from gadei_ps.learners.client import product_at
from gadei_ps.memory import layout
from gadei_ps.memory.layout import WIRE_BYTES, FrameKind, WireType
from gadei_ps.memory.weights import Tensor, payload_bytes, place


def written(
    factors: np.ndarray, vectors: np.ndarray, wire: WireType, *, skip_zeros: bool
) -> tuple[np.ndarray, FrameKind, float]:
    """The gradient that a frame of one product says, its kind, and its sum of squares."""
    model = place([Tensor("t", (factors.shape[1], vectors.shape[1]))])
    room = np.zeros(payload_bytes(model) + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :]
    where = product_at(factors.ctypes.data, vectors.ctypes.data, len(factors))
    learner = support.written(model, where, room, wire, skip_zeros=skip_zeros)
    size = learner.payload_bytes
    assert size <= payload_bytes(model)
    got = decoded_frame(model, room[:size], FrameKind(learner.kind), learner.blocks, wire)
    form = int(room[: layout.BLOCK.itemsize].view(layout.BLOCK)[0]["form"])
    return got[0], FrameKind(form), learner.squares


@given(
    count=st.integers(1, 9),
    rows=st.integers(1, 60),
    width=st.integers(1, 70),
    share=st.floats(0, 1),
    skip_zeros=st.booleans(),
    wire=st.sampled_from(list(WireType)),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_as_numpy(
    count: int, rows: int, width: int, share: float, skip_zeros: bool, wire: WireType, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    factors = draw.integers(-4, 5, (count, rows)).astype(np.float32)
    factors[draw.random((count, rows)) < share] = 0
    vectors = draw.integers(-4, 5, (count, width)).astype(np.float32)  # all sums are exact
    wanted = factors.T @ vectors
    got, form, squares = written(factors, vectors, wire, skip_zeros=skip_zeros)
    np.testing.assert_array_equal(got, wanted)
    assert squares == float(np.square(wanted).sum())
    named = int(factors.any(axis=0).sum())
    assert form == (
        FrameKind.ROWS
        if skip_zeros and width * WIRE_BYTES[wire] >= 32 and named <= rows - rows // 4
        else FrameKind.DENSE
    )


@pytest.mark.parametrize("where", ["factors", "vectors"])
def test_what_is_not_finite_is_seen(where: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        arrays = {"factors": np.ones((2, 5), np.float32), "vectors": np.ones((2, 40), np.float32)}
        arrays[where][1, 3] = bad
        assert not math.isfinite(written(**arrays, wire=WireType.FLOAT32, skip_zeros=True)[2])


def test_sums_are_rounded_once_a_term() -> None:
    draw = np.random.default_rng(3)
    factors = draw.standard_normal((20, 30)).astype(np.float32)
    vectors = draw.standard_normal((20, 33)).astype(np.float32)
    got, _, squares = written(factors, vectors, WireType.FLOAT32, skip_zeros=False)
    wanted = factors.T.astype(np.float64) @ vectors
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert squares == pytest.approx(float(np.square(wanted).sum()), rel=1e-5)
