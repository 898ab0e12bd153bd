"""The one pass that copies a gradient, converts it, and looks for what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from gadei_ps import _native
from gadei_ps.memory.layout import WireType

Floats = npt.NDArray[np.float32]
WIRES = list(WireType)
STORED = {WireType.FLOAT32: np.uint32, WireType.BFLOAT16: np.uint16, WireType.FLOAT16: np.uint16}


def copy(wire: WireType, source: Floats) -> tuple[np.ndarray, bool]:
    """The stored bits, and whether a value was found that is not finite."""
    to = np.zeros(source.size, STORED[wire])
    squares = _native.copy(wire, to.ctypes.data, source.ctypes.data, source.size, 0)
    return to, not math.isfinite(squares)


def decoded(wire: WireType, stored: np.ndarray) -> np.ndarray:
    if wire is WireType.FLOAT32:
        return stored.view(np.float32)
    if wire is WireType.FLOAT16:
        return stored.view(np.float16)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def nearest_bfloat16(source: Floats) -> np.ndarray:
    """Round to nearest even by looking at both neighbours; bits of float32, NaN left out."""
    bits = source.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    low = magnitude & np.uint32(0xFFFF0000)
    high = np.minimum(low + np.uint32(0x10000), np.uint32(0x7F800000))

    def real(value: np.ndarray) -> np.ndarray:
        # Infinity stands where the next value would be, as IEEE 754 rounds.
        return np.where(value == 0x7F800000, 2.0**128, value.view(np.float32).astype(np.float64))

    above, below = real(high) - real(magnitude), real(magnitude) - real(low)
    even = (low >> np.uint32(16)) & np.uint32(1) == 0
    down = (below < above) | ((below == above) & even) | (magnitude == 0x7F800000)
    rounded = np.where(down, low, high) | (bits & np.uint32(0x80000000))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def nearest_float16(source: Floats) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return source.astype(np.float16).view(np.uint16)


def identity(source: Floats) -> np.ndarray:
    return source.view(np.uint32)


REFERENCE: dict[WireType, Callable[[Floats], np.ndarray]] = {
    WireType.FLOAT32: identity,
    WireType.BFLOAT16: nearest_bfloat16,
    WireType.FLOAT16: nearest_float16,
}


def edges() -> Floats:
    """Every sign and exponent with the mantissas around every place where a format may round."""
    mantissas = {0, 2**23 - 1}
    for bit in range(23):
        for base in (1 << bit, 3 << bit, 5 << bit, (1 << 23) - (1 << bit)):
            mantissas |= {(base + step) % 2**23 for step in (-1, 0, 1)}
    low13 = (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)
    low16 = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    mantissas |= {(high << 13) | low for high in range(0, 1024, 31) for low in low13}
    mantissas |= {(high << 16) | low for high in range(128) for low in low16}
    exponents = np.arange(512, dtype=np.uint32) << np.uint32(23)
    return (exponents[:, None] | np.array(sorted(mantissas), np.uint32)).ravel().view(np.float32)


def random_bits() -> Floats:
    random = np.random.default_rng(20240229)
    anything = random.integers(0, 2**32, 1_500_000, np.uint32)
    # As many again where float16 is normal, subnormal, or overflows.
    exponents = random.integers(100, 146, 1_500_000, np.uint32) << np.uint32(23)
    near = (anything & np.uint32(0x807FFFFF)) | exponents
    return np.concatenate([anything, near]).view(np.float32)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("values", [edges, random_bits])
def test_every_value_is_the_nearest(wire: WireType, values: Callable[[], Floats]) -> None:
    source = values()
    stored, found = copy(wire, source)
    assert found
    nan = np.isnan(source)
    if wire is WireType.FLOAT32:
        np.testing.assert_array_equal(stored, source.view(np.uint32))
        return
    sign = np.dtype(stored.dtype).itemsize * 8 - 1
    assert np.isnan(decoded(wire, stored[nan])).all()
    np.testing.assert_array_equal(stored[nan] >> sign, source.view(np.uint32)[nan] >> 31)
    np.testing.assert_array_equal(stored[~nan], REFERENCE[wire](source[~nan]))


LARGEST = {
    # The largest value that stays finite, and the next above it.
    WireType.FLOAT32: (0x7F7FFFFF, 0x7F800000),
    WireType.BFLOAT16: (0x7F7F7FFF, 0x7F7F8000),
    WireType.FLOAT16: (0x477FEFFF, 0x477FF000),
}


@pytest.mark.parametrize("wire", WIRES)
def test_what_overflows_is_not_finite(wire: WireType) -> None:
    for sign in (0, 0x80000000):
        for bits, wanted in zip(LARGEST[wire], (False, True), strict=True):
            source = np.array([bits | sign], np.uint32).view(np.float32)
            stored, found = copy(wire, source)
            assert (found, np.isinf(decoded(wire, stored)[0])) == (wanted, wanted), hex(bits | sign)


@pytest.mark.parametrize("wire", WIRES)
def test_finite_values_are_not_suspected(wire: WireType) -> None:
    source = edges()
    with np.errstate(invalid="ignore"):
        finite = np.abs(source) <= np.array([LARGEST[wire][0]], np.uint32).view(np.float32)
    assert not copy(wire, source[finite])[1]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_found_wherever_it_stands(wire: WireType, bad: float) -> None:
    for length in range(1, 101):
        source = np.ones(length, np.float32)
        for place in {0, length // 2, length - 1, length * 7 % 97 % length}:
            source[place] = bad
            assert copy(wire, source)[1], (length, place)
            source[place] = 1.0
        assert not copy(wire, source)[1]


@pytest.mark.parametrize("wire", WIRES)
def test_lengths_and_places(wire: WireType) -> None:
    """Any length from 0 on, at any multiple of the value's size, and not a byte beside it."""
    values = np.linspace(-3, 3, 128, dtype=np.float32)
    kind = STORED[wire]
    for length in range(101):
        for from_, to_ in ((0, 0), (1, 0), (0, 1), (3, 7), (5, 13)):
            source = values[from_ : from_ + length]
            room = np.full(length + 32, 0xA5A5, kind)
            target = room[to_ : to_ + length]
            squares = _native.copy(wire, target.ctypes.data, source.ctypes.data, length, 0)
            assert squares == pytest.approx(float(np.square(source, dtype=np.float64).sum()))
            expected = np.full(length + 32, 0xA5A5, kind)
            expected[to_ : to_ + length] = REFERENCE[wire](np.ascontiguousarray(source))
            np.testing.assert_array_equal(room, expected)


def test_an_unknown_format_is_an_error() -> None:
    source = np.ones(4, np.float32)
    for wire in (0, 4, 2**32 - 1):
        with pytest.raises(ValueError, match="unknown dtype code"):
            _native.copy(wire, source.ctypes.data, source.ctypes.data, 4, 0)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("length", [1, 7, 8, 2047, 2048, 2049, 10_000])
def test_sum_of_squares(wire: WireType, length: int) -> None:
    source = np.random.default_rng(length).standard_normal(length).astype(np.float32)
    for scale in (1e-12, 1.0, 100.0):
        scaled = source * np.float32(scale)
        to = np.zeros(length, STORED[wire])
        squares = _native.copy(wire, to.ctypes.data, scaled.ctypes.data, length, 0)
        wanted = np.square(scaled, dtype=np.float64).sum()
        assert squares == pytest.approx(float(wanted), rel=1e-5)


def test_squares_beyond_float32_are_added_up() -> None:
    source = np.full(5000, 1e30, np.float32)
    to = np.zeros(5000, np.uint32)
    squares = _native.copy(WireType.FLOAT32, to.ctypes.data, source.ctypes.data, 5000, 0)
    assert squares == pytest.approx(5000 * float(np.float32(1e30)) ** 2)


HALVES = [WireType.BFLOAT16, WireType.FLOAT16]


@pytest.mark.parametrize("wire", HALVES)
@pytest.mark.parametrize("length", [1, 9, 2048, 5003])
def test_error_feedback_loses_nothing(wire: WireType, length: int) -> None:
    """Check that what was sent and what is left over add up to all that was given."""
    random = np.random.default_rng(5)
    residue = np.zeros(length, np.float32)
    given, sent = np.zeros(length), np.zeros(length)
    for _ in range(30):
        gradient = random.standard_normal(length).astype(np.float32) * np.float32(1e-3)
        to = np.zeros(length, STORED[wire])
        wanted = gradient + residue
        _native.copy(wire, to.ctypes.data, gradient.ctypes.data, length, residue.ctypes.data)
        np.testing.assert_array_equal(to, REFERENCE[wire](wanted))
        np.testing.assert_array_equal(residue, wanted - decoded(wire, to).astype(np.float32))
        given += gradient
        sent += decoded(wire, to)
    np.testing.assert_allclose(sent + residue, given, atol=1e-6)
    plain = np.abs(residue).max()
    assert plain < np.abs(given).max() / 100


@pytest.mark.parametrize("wire", HALVES)
def test_what_is_not_finite_leaves_nothing_over(wire: WireType) -> None:
    gradient = np.array([1.0, np.nan, np.inf, -np.inf, 1e38, 1.0] * 3, np.float32)
    residue = np.full(gradient.size, 0.25, np.float32)
    to = np.zeros(gradient.size, STORED[wire])
    assert math.isinf(
        _native.copy(wire, to.ctypes.data, gradient.ctypes.data, gradient.size, residue.ctypes.data)
    )
    assert np.isfinite(residue).all()


def test_float32_leaves_nothing_over() -> None:
    gradient, residue = np.ones(10, np.float32), np.full(10, 0.5, np.float32)
    to = np.zeros(10, np.float32)
    _native.copy(WireType.FLOAT32, to.ctypes.data, gradient.ctypes.data, 10, residue.ctypes.data)
    np.testing.assert_array_equal(to, 1.0)
    np.testing.assert_array_equal(residue, 0.5)
