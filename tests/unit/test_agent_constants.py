"""Buffers that no sum has room for are no part of what a group exchanges."""

from __future__ import annotations

import numpy as np
import pytest

from gadei_ps.agents.constants import buffers, checksum, found, in_words, take_out
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import FloatArray, Tensor, place

MODEL = place(
    [Tensor("w", (3,)), Tensor("mask", (2, 2), Role.BUFFER), Tensor("mean", (5,), Role.BUFFER)]
)
BUFFERS = buffers(MODEL)
FLOOR = float(np.finfo(np.float32).min)


def weights(**values: float) -> FloatArray:
    """Ones; of some tensors the first value is another one."""
    made = np.ones(MODEL.elements, np.float32)
    for name, value in values.items():
        MODEL.views(made)[name].flat[0] = value
    return made


@pytest.mark.parametrize("great", [np.inf, -np.inf, FLOOR, -FLOOR])
def test_a_mask_is_a_constant_and_taken_out_whole(great: float) -> None:
    first = weights(w=great, mask=great, mean=-1e30)
    assert found(first, BUFFERS) == ("mask",)
    take_out(first, ("mask",), BUFFERS)
    views = MODEL.views(first)
    assert not views["mask"].any()
    assert views["w"][0] == np.float32(great) and views["mean"][0] == np.float32(-1e30)


def test_a_buffer_with_a_nan_is_none() -> None:
    both = weights(mask=np.inf)
    MODEL.views(both)["mask"].flat[3] = np.nan
    assert not found(both, BUFFERS)
    assert not found(weights(mask=np.nan), BUFFERS)


def test_a_line_names_some_of_them() -> None:
    assert in_words(["mask"]) == "buffer 'mask'"
    assert in_words("abcdef") == "buffers 'a', 'b', 'c', 'd' and 2 more"
    assert checksum(["a", "b"]) != checksum(["ab"]) != checksum([])
