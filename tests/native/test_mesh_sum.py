"""The sum of pieces between machines: bit for bit that of NumPy, whatever the values are."""

from __future__ import annotations

import ctypes

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps import _mesh
from gadei_ps.groups import parts
from gadei_ps.groups.parts import Floats
from gadei_ps.memory.layout import CHUNK

BLOCK = 2048
"""As in native/mesh_sum.c."""
TINY = np.float32(2**-149)
ODD = np.array([0, -0.0, np.inf, -np.inf, np.nan, TINY, -TINY, 2**-126, 3e38, -3e38], np.float32)
_sum = ctypes.CDLL(_mesh.__file__).mesh_sum
_sum.restype = None


def native(models: Floats, weights: Floats) -> Floats:
    """mesh_sum of rows of `models`."""
    out = np.full(models.shape[1], np.nan, np.float32)
    rows = (ctypes.c_void_p * len(models))(*(row.ctypes.data for row in models))
    _sum(
        *(ctypes.c_void_p(out.ctypes.data), rows, ctypes.c_void_p(weights.ctypes.data)),
        *(ctypes.c_uint32(len(models)), ctypes.c_uint64(out.size)),
    )
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.lists(st.integers(0, 2**53 - 1) | st.integers(0, 9), min_size=1, max_size=8),
    values=st.builds(
        lambda whole, more: max(0, whole + more),
        *(st.sampled_from([0, CHUNK, 2 * CHUNK, BLOCK, 2 * BLOCK]), st.integers(-3, 3)),
    ),
)
def test_sums_are_those_of_numpy(seed: int, samples: list[int], values: int) -> None:
    chance = np.random.default_rng(seed)
    shape = len(samples), values
    models = chance.standard_normal(shape, np.float32)
    for share, other in (
        (0.2, chance.choice(ODD, shape)),
        (0.2, chance.integers(0, 2**32, shape, np.uint32).view(np.float32)),
    ):
        models = np.where(chance.random(shape) < share, other, models)
    models[:, chance.random(values) < 0.1] = -0.0  # in all
    weights = parts.shares(samples)
    wanted = np.empty(values, np.float32)
    with np.errstate(all="ignore"):
        parts.aggregate(list(models), weights, wanted)
    found = native(models, weights)
    assert (np.isnan(found) == np.isnan(wanted)).all()
    # Of two NaNs, the processor keeps the one that the compiler has put first.
    numbers = ~np.isnan(wanted)
    assert found[numbers].tobytes() == wanted[numbers].tobytes()
