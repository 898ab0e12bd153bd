"""Compiled kernels against the NumPy reference, and conversions bit by bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import kernel_reference as reference

from gadei_ps.kernels import cpu
from gadei_ps.kernels.optimizers import (
    COEFFICIENTS,
    Kind,
    OptimizerSpec,
    WireType,
    slots,
)

pytestmark = pytest.mark.usefixtures("compiled")

CHUNK = 1024
Floats = NDArray[np.float32]

# Half a unit in the last place of float32: what rounding one operation may change, relatively.
U = 2.0**-24

ALL_BITS = np.arange(65536, dtype=np.uint16)


def update_in_chunks(
    spec: OptimizerSpec,
    weights: Floats,
    state: list[Floats],
    gradient: Floats,
    t: int,
    lr: float,
    staleness: int = 0,
    momentum: float = math.nan,
) -> None:
    """Do what `reference.step` does, with the compiled kernels, chunk by chunk."""
    kind = int(spec.kind)
    coef = np.full(COEFFICIENTS, np.nan)
    cpu.coefficients(kind, spec.pack(), lr, t, staleness, momentum, coef)
    scalars = cpu.scalars(coef)
    nothing = np.empty(0, np.float32)
    s0, s1 = [*state, nothing, nothing][:2]
    for start in range(0, weights.size, CHUNK):
        part = slice(start, min(start + CHUNK, weights.size))
        cpu.KERNELS[kind](scalars, weights[part], s0[part], s1[part], gradient[part])


def allowed(
    spec: OptimizerSpec,
    weights: Floats,
    old: list[Floats],
    new: list[Floats],
    g: Floats,
    lr: float,
    staleness: int,
) -> list[NDArray[np.float64]]:
    """Return by how much one step of the weights and of each slot may differ from the reference.

    Both round each operation once, and the kernel may leave out the rounding of a product that is
    then added (a fused operation). So they differ by at most U for each rounding on either side,
    relative to the magnitudes that are added, which are larger than their sum where it cancels. No
    value goes through more than eight roundings on a side; a root halves what reaches it.
    """
    w, g64 = np.abs(weights.astype(np.float64)), np.abs(g.astype(np.float64))
    before = [slot.astype(np.float64) for slot in old]
    after = [slot.astype(np.float64) for slot in new]
    if spec.kind is not Kind.ADAMW:
        g64 = g64 + spec.weight_decay * w
    if spec.kind in (Kind.SGD, Kind.ADD):
        slot_scales, moved = [], g64
    elif spec.kind in (Kind.MOMENTUM, Kind.NESTEROV):
        slot_scales = [spec.momentum * np.abs(before[0]) + g64]
        moved = slot_scales[0] + g64 / (1 - spec.momentum)
    elif spec.kind is Kind.ADAGRAD:
        slot_scales = [before[0] + g64**2]
        moved = g64 / (np.sqrt(after[0]) + spec.eps)
    elif spec.kind is Kind.RMSPROP:
        scaled = g64 / (np.sqrt(after[0]) + spec.eps)
        slot_scales = [before[0] + g64**2, np.abs(before[1]) + scaled]
        moved = slot_scales[1] + scaled / (1 - spec.momentum)
    else:
        slot_scales = [np.abs(before[0]) + (1 - spec.beta1) * g64, before[1] + g64**2]
        # (1 - beta) of t = 1, the largest correction.
        direction = slot_scales[0] + g64
        moved = direction / (np.sqrt(after[1]) + spec.eps) / (1 - spec.beta1)
    # Below the smallest normal number rounding is absolute.
    tiny = 2.0**-149
    return [16 * U * scale + tiny for scale in [w + lr * moved, *slot_scales]]


@settings(deadline=None, max_examples=200)
@given(
    kind=st.sampled_from(Kind),
    length=st.integers(0, 3000),
    decay=st.sampled_from([0.0, 0.01, 0.3]),
    lr=st.sampled_from([1.0, 0.1, 1e-4]),
    magnitude=st.floats(-6, 6),
    staleness=st.sampled_from([0, 1, 2, 7, 300, 2**40]),
    compensated=st.booleans(),
    momentum=st.sampled_from([math.nan, 0.0, 0.5, 0.95]),
    seed=st.integers(0, 2**32),
)
def test_update_is_the_reference_to_rounding(
    kind: Kind,
    length: int,
    decay: float,
    lr: float,
    magnitude: float,
    staleness: int,
    compensated: bool,
    momentum: float,
    seed: int,
) -> None:
    """Every kind, with and without decay, over five steps of gradients of any magnitude."""
    random = np.random.default_rng(seed)
    spec = OptimizerSpec(kind, lr=lr, weight_decay=decay, spike_compensation=compensated)
    weights = random.standard_normal(length, np.float32)
    state = [np.zeros(length, np.float32) for _ in range(slots(kind))]
    for t in range(1, 6):
        gradient = random.standard_normal(length, np.float32) * np.float32(10**magnitude)
        gradient[random.random(length) < 0.1] = 0
        expected, expected_state = weights.copy(), [slot.copy() for slot in state]
        own = spec
        if not math.isnan(momentum) and (kind is not Kind.NESTEROV or momentum):
            own = dataclasses.replace(spec, momentum=momentum, beta1=momentum)
        reference.step(own, expected, expected_state, gradient, t, lr, staleness)
        bounds = allowed(own, weights, state, expected_state, gradient, lr, staleness)
        untouched = gradient.copy()
        pushed = math.nan if own is spec else momentum
        update_in_chunks(spec, weights, state, gradient, t, lr, staleness, pushed)
        assert np.array_equal(gradient, untouched)
        for got, wanted, bound in zip(
            [weights, *state], [expected, *expected_state], bounds, strict=True
        ):
            assert np.all(np.abs(got.astype(np.float64) - wanted) <= bound)
        # Each step is judged on its own: differences must not add up to hide a larger one.
        weights, state = expected, expected_state


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_stays_so(kind: Kind, decay: float) -> None:
    """A gradient or weight that is infinite or NaN comes out as it does of the reference."""
    special = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-45, 0.0, -0.0, 1.0], np.float32)
    gradient = np.tile(np.repeat(special, special.size), 20)
    weights = np.tile(special, special.size * 20)
    state = [np.zeros_like(weights) for _ in range(slots(kind))]
    expected, expected_state = weights.copy(), [slot.copy() for slot in state]
    spec = OptimizerSpec(kind, weight_decay=decay)
    update_in_chunks(spec, weights, state, gradient, 1, 0.07)  # no weight becomes nearly zero
    reference.step(spec, expected, expected_state, gradient, 1, 0.07)
    for got, wanted in zip([weights, *state], [expected, *expected_state], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=16 * U, atol=1e-9)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 3000), count=st.integers(1, 50))
def test_whole_gradients_add_exactly(seed: int, length: int, count: int) -> None:
    """SGD with rate 1 on whole numbers is exact, so that a lost or doubled gradient shows."""
    random = np.random.default_rng(seed)
    gradients = random.integers(-1000, 1000, (count, length))
    weights = np.zeros(length, np.float32)
    for gradient in gradients:
        update_in_chunks(
            OptimizerSpec(Kind.SGD, lr=1.0), weights, [], gradient.astype(np.float32), 1, 1.0
        )
    assert np.array_equal(weights, -gradients.sum(axis=0))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 3000))
def test_mean_of_gradients(seed: int, length: int) -> None:
    """`accumulate` and `scale` round as NumPy does: no product is added."""
    random = np.random.default_rng(seed)
    first, second, third = random.standard_normal((3, length)).astype(np.float32)
    acc = first.copy()
    cpu.accumulate(acc, second, 1.0)
    cpu.accumulate(acc, third, 1.0)
    assert np.array_equal(acc, first + second + third)
    cpu.scale(acc, 1 / 3)
    assert np.array_equal(acc, (first + second + third) * np.float32(1 / 3))
    before = acc.copy()
    cpu.accumulate(acc, second, 0.5)  # exact: the sum alone is rounded
    assert np.array_equal(acc, before + second * np.float32(0.5))


@pytest.mark.parametrize("squares", [0.0, 1e-300, 3.9, 4.0, 4.1, 1e30])
@pytest.mark.parametrize("clip_norm", [0.0, 2.0])
def test_clip_scale(squares: float, clip_norm: float) -> None:
    hyper = OptimizerSpec(Kind.SGD, clip_norm=clip_norm).pack()
    wanted = reference.clip_scale(hyper, squares)
    assert cpu.clip_scale(hyper, squares) == pytest.approx(wanted, rel=1e-15)
    if clip_norm and squares:
        assert wanted * math.sqrt(squares) == pytest.approx(
            min(clip_norm, math.sqrt(squares)), rel=1e-5
        )


def same_floats(got: Floats, wanted: Floats) -> None:
    """Assert equal bits, or NaN in both."""
    nan = np.isnan(wanted)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


def test_float16_is_decoded_exactly() -> None:
    wanted = ALL_BITS.view(np.float16).astype(np.float32)
    got = np.empty(65536, np.float32)
    cpu.decode_float16(ALL_BITS, got)
    same_floats(got, wanted)
    same_floats(reference.decode(WireType.FLOAT16, ALL_BITS), wanted)


def test_bfloat16_is_decoded_exactly() -> None:
    """Decode by the definition: sign, eight bits of exponent, seven of mantissa."""
    sign = np.where(ALL_BITS >> 15, -1.0, 1.0)
    exponent = (ALL_BITS.astype(np.int64) >> 7) & 0xFF
    mantissa = (ALL_BITS & 0x7F).astype(np.float64)
    normal = np.ldexp(1 + mantissa / 128, exponent - 127)
    value = np.where(exponent == 0, np.ldexp(mantissa / 128, -126), normal)
    value = np.where(exponent == 255, np.where(mantissa == 0, np.inf, np.nan), value)
    wanted = (sign * value).astype(np.float32)
    got = np.empty(65536, np.float32)
    cpu.decode_bfloat16(ALL_BITS, got)
    same_floats(got, wanted)
    same_floats(reference.decode(WireType.BFLOAT16, ALL_BITS), wanted)


@pytest.mark.parametrize("length", [0, 1, 15, 17, 63, 1000, 1024])
def test_decoders_of_any_length(length: int) -> None:
    bits = np.random.default_rng(length).integers(0, 0x7C00, length).astype(np.uint16)
    # One value longer than the chunk: what lies behind it must stay.
    out = np.full(length + 1, 7, np.float32)
    cpu.decode_float16(bits, out[:length])
    same_floats(out[:length], bits.view(np.float16).astype(np.float32))
    cpu.decode_bfloat16(bits, out[:length])
    same_floats(out[:length], reference.decode(WireType.BFLOAT16, bits))
    assert out[length] == 7


@pytest.mark.parametrize("wire_type", WireType)
def test_encoding_undoes_decoding(wire_type: WireType) -> None:
    if wire_type is WireType.FLOAT32:
        raw: Any = np.arange(1000, dtype=np.float32)
    else:
        raw = ALL_BITS
    values = reference.decode(wire_type, raw)
    again = reference.encode(wire_type, values)
    assert again.dtype == raw.dtype
    number = ~np.isnan(values)
    assert np.array_equal(again[number], raw[number])
    assert np.all(np.isnan(reference.decode(wire_type, again)[~number]))
    assert not np.shares_memory(again, values)


def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = np.array(
        [0x3F800000, 0x3F808000, 0x3F808001, 0x3F818000, 0x3F817FFF, 0x7F7FFFFF, 0x7F800000,
         0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x80000000, 0x00008000, 0x00018000],
        np.uint32,
    )  # fmt: skip
    wanted = np.array(
        [0x3F80, 0x3F80, 0x3F81, 0x3F82, 0x3F81, 0x7F80, 0x7F80,
         0xFF80, 0x7FFF, 0xFFFF, 0x7FC0, 0x8000, 0x0000, 0x0002],
        np.uint16,
    )  # fmt: skip
    assert np.array_equal(reference.encode(WireType.BFLOAT16, bits.view(np.float32)), wanted)


def replayed(spec: OptimizerSpec, gradients: list[Floats]) -> Floats:
    """Return the weights that gradients which arrive in time make of zeros."""
    weights = np.zeros_like(gradients[0])
    state = [np.zeros_like(weights) for _ in range(slots(spec.kind))]
    for t, gradient in enumerate(gradients):
        reference.step(spec, weights, state, gradient, t + 1, spec.lr)
    return weights


@pytest.mark.parametrize("step", [reference.step, update_in_chunks])
@pytest.mark.parametrize("kind", [Kind.MOMENTUM, Kind.NESTEROV])
@pytest.mark.parametrize("missed", [0, 1, 2, 5])
def test_a_stale_gradient_is_carried_as_far_as_one_in_time(
    step: Any, kind: Kind, missed: int
) -> None:
    """Compensate by what momentum would have moved, had it come before the missed ones."""
    gradient = np.linspace(-3, 3, 100, dtype=np.float32)
    spec = OptimizerSpec(kind, lr=0.1, momentum=0.8)
    weights, state = np.zeros_like(gradient), [np.zeros_like(gradient)]
    step(spec, weights, state, gradient, missed + 1, spec.lr, missed)
    in_time = replayed(spec, [gradient, *[np.zeros_like(gradient)] * missed])
    np.testing.assert_allclose(weights, in_time, rtol=1e-6)


@pytest.mark.parametrize("kind", Kind)
def test_without_compensation_staleness_changes_nothing(kind: Kind) -> None:
    gradient = np.linspace(-3, 3, 100, dtype=np.float32)
    spec = OptimizerSpec(kind, spike_compensation=False)
    for staleness in (0, 7):
        weights = np.zeros_like(gradient)
        state = [np.zeros_like(gradient) for _ in range(slots(kind))]
        update_in_chunks(spec, weights, state, gradient, 3, 0.1, staleness)
        if not staleness:
            expected = weights
        np.testing.assert_array_equal(weights, expected)
