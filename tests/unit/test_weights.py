"""Positions of tensors: properties of the placement, and the table in a segment."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.memory import layout, segment, weights
from gadei_ps.memory.layout import Role, SegmentKind
from gadei_ps.memory.weights import Model, Tensor, check_same, place

names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=weights.NAME_BYTES
).filter(lambda name: len(name.encode()) <= weights.NAME_BYTES)
shapes = st.lists(st.integers(0, 9), max_size=layout.MAX_DIMS).filter(
    lambda shape: math.prod(shape) <= 5000
)
tensor = st.builds(
    lambda name, shape, role, dtype: Tensor(
        name, tuple(shape), role, dtype="F32" if role is Role.PARAMETER else dtype
    ),
    names,
    shapes | st.lists(st.integers(0, 5000), min_size=1, max_size=1),
    st.sampled_from(Role),
    st.sampled_from([*weights.DTYPES]),
)
tensor_lists = st.lists(tensor, min_size=1, max_size=12, unique_by=lambda one: one.name)


@given(tensor_lists)
def test_placement(given_tensors: list[Tensor]) -> None:
    model = place(given_tensors)
    assert [one.role for one in model.every] == sorted(one.role for one in given_tensors)
    for role in Role:
        order = [one.name for one in given_tensors if one.role is role]
        assert [one.name for one in model.every if one.role is role] == order
    end = 0
    for one in model.every:
        assert one.start % weights.LINE == 0, "64-byte aligned"
        assert one.start >= end, "overlap"
        end = one.start + max(one.count, 1)
        if one.role is Role.PARAMETER:
            assert end <= model.parameters
        else:
            assert one.start >= model.parameters
        assert (one.start >= model.elements) == (one.role is Role.FROZEN)
        assert 4 * one.count - one.bytes in range(4)
    assert end <= model.words < end + weights.LINE
    assert model.values == sum(math.prod(one.shape) for one in given_tensors)
    buffers = [one for one in model.tensors if one.role is Role.BUFFER]
    if buffers:
        assert buffers[0].start == model.parameters
        assert model.parameters % layout.CHUNK == 0, "a chunk holds one role only"
    else:
        assert model.parameters == model.elements


@given(tensor_lists)
def test_flatten_and_views(given_tensors: list[Tensor]) -> None:
    model = place(given_tensors)
    arrays = {
        one.name: (np.arange(one.values).reshape(one.shape) + index).astype(
            weights.DTYPES[one.dtype]
        )
        for index, one in enumerate(model.every)
    }
    flat = model.flatten(arrays)
    assert flat.shape == (model.words,)
    frames = model.views(flat[: model.elements])
    assert frames.keys() == {one.name for one in model.tensors}
    views = model.views(flat)
    assert views.keys() == arrays.keys()
    for name, view in views.items():
        assert np.shares_memory(view, flat) or not view.size
        np.testing.assert_array_equal(view, arrays[name])
        view[...] = 0
    assert not flat.any(), "padding is zero and views cover the rest"


def _round_trip(job: str, model: Model) -> Model:
    made = segment.create(
        job, "weights", SegmentKind.WEIGHTS, weights.segment_bytes(model), job_id=bytes(16)
    )
    try:
        weights.write_table(made, model)
        weights.data(made)[:] = np.arange(model.elements)
        made.publish()
        other = segment.attach(made.name, SegmentKind.WEIGHTS, writable=False)
    finally:
        segment.unlink(made.name)
    data = weights.data(other)
    assert data.ctypes.data % layout.PAGE == 0, "devices register whole pages"
    np.testing.assert_array_equal(data, np.arange(model.elements, dtype=np.float32))
    assert int(other.view(layout.WEIGHTS)["values"]) == model.values
    return weights.read_table(other)


def test_table_through_a_segment(job_name: str) -> None:
    @settings(max_examples=50, deadline=None)
    @given(tensor_lists)
    def holds(given_tensors: list[Tensor]) -> None:
        model = place(given_tensors)
        assert _round_trip(job_name, model) == model

    holds()


def test_longest_name_and_most_dimensions(job_name: str) -> None:
    model = place([Tensor("ü" * 187 + "x", (1,) * layout.MAX_DIMS), Tensor("s", ())])
    assert _round_trip(job_name, model) == model


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([], "no tensors"),
        ([Tensor("", (1,))], "1 to 375 bytes"),
        ([Tensor("ü" * 188, (1,))], "1 to 375 bytes"),
        ([Tensor("a\0", (1,))], "NUL"),
        ([Tensor("\ud800", (1,))], "UTF-8"),
        ([Tensor("a", (1,)), Tensor("a", (2,), Role.BUFFER)], "given twice"),
        ([Tensor("a", (1,) * 9)], "more than 8"),
        ([Tensor("a", (0, 1 << 40))], "a dimension has 0 to"),
        ([Tensor("a", (1,), aliases=tuple(map(str, range(1 << 16))))], "65,537 names"),
    ],
)
def test_what_cannot_be_kept(bad: list[Tensor], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        place(bad)


@pytest.mark.parametrize(
    ("offered", "named"),
    [
        ([Tensor("a", (2, 3)), Tensor("c", (1,))], "no tensor 'c'"),
        ([Tensor("a", (3, 2))], "'a' has shape [3, 2], the job's has [2, 3]"),
        ([Tensor("a", (2, 3), Role.BUFFER)], "'a' is a buffer, the job's a parameter"),
        ([Tensor("a", (2, 3))], "lacks the job's tensor 'b'"),
        ([Tensor("a", (2, 3)), Tensor("a", (2, 3))], "no tensor 'a'"),
    ],
)
def test_another_model_is_named(offered: list[Tensor], named: str) -> None:
    job = place([Tensor("a", (2, 3)), Tensor("b", (4,))])
    with pytest.raises(ModelMismatch) as info:
        check_same(job, offered)
    assert named in str(info.value)


def test_the_same_model_in_another_order() -> None:
    job = place([Tensor("a", (2, 3)), Tensor("b", (4,), Role.BUFFER)])
    check_same(job, [Tensor("b", (4,), Role.BUFFER), Tensor("a", (2, 3))])
