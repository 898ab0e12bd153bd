"""Buffers that hold infinities are no part of what a group exchanges."""

from __future__ import annotations

import numpy as np

from gadei_ps.agents.constants import Constants
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import FloatArray, Tensor, place

MODEL = place(
    [Tensor("w", (3,)), Tensor("mask", (2, 2), Role.BUFFER), Tensor("mean", (5,), Role.BUFFER)]
)


def weights(**values: float) -> FloatArray:
    """Ones; of some tensors the first value is another one."""
    made = np.ones(MODEL.elements, np.float32)
    for name, value in values.items():
        MODEL.views(made)[name].flat[0] = value
    return made


def test_what_is_infinite_at_first_is_taken_out() -> None:
    constants, copied = Constants(MODEL), weights(w=np.inf, mask=-np.inf, mean=np.nan)
    constants.take_out(copied)
    views = MODEL.views(copied)
    assert not views["mask"].any()
    assert np.isinf(views["w"][0]) and np.isnan(views["mean"][0])
    assert constants.keep(copied)
    assert list(constants.rest(copied)) == ["w", "mean"]
    later = weights(mean=np.inf)  # it has diverged since
    constants.take_out(later)
    assert np.isinf(MODEL.views(later)["mean"][0])


def test_what_the_group_has_a_value_for_is_no_constant() -> None:
    constants, group = Constants(MODEL), weights()
    MODEL.views(group)["mask"][:] = 0
    constants.take_out(weights(mask=np.inf, mean=np.inf))
    assert not constants.keep(group)
    assert list(constants.rest(group)) == ["w", "mean"]
    assert constants.keep(group)
