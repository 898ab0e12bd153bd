"""Gradients of some rows: learners write them, shards refuse bad ones and apply the others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Rig, decoded_frame, payload_of, rows_payload
from support import kernel_reference as reference

from gadei_ps.job.config import OptimizerConfig
from gadei_ps.job.parameter_groups import grouped
from gadei_ps.kernels.optimizers import Kind, WireType, slots
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Action, FrameKind, Reason, Role
from gadei_ps.memory.weights import Model, Tensor, payload_bytes, place

pytestmark = pytest.mark.usefixtures("compiled")

KINDS = [kind.name.lower() for kind in Kind]
TABLE = Tensor("table", (50, 7))


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- written by the learner -----------------------------------------------------------------------


def read_block(payload: np.ndarray, number: int = 0) -> tuple[np.void, np.ndarray]:
    block = np.frombuffer(payload[number * 32 :][:32], layout.BLOCK)[0]
    at = int(block["indices_at"])
    return block, np.frombuffer(payload[at : at + 8 * int(block["rows"])], np.int64)


@given(
    rows=st.integers(1, 2000),
    width=st.integers(0, 9),
    count=st.integers(0, 600),
    span=st.floats(0.001, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_rows_are_put_in_order_and_added_up(
    rows: int, width: int, count: int, span: float, seed: int
) -> None:
    model = place([Tensor("t", (rows, width))])
    draw = np.random.default_rng(seed)
    indices = draw.integers(0, max(1, int(rows * span)), count)
    values = draw.integers(-9, 9, (count, width)).astype(np.float32)  # sums are exact
    payload, _ = rows_payload(model, {0: (indices, values)})
    block, listed = read_block(payload)
    wanted = np.zeros((rows, width), np.float32)
    np.add.at(wanted, indices, values)
    at = int(block["values_at"])
    if int(block["form"]) == FrameKind.ROWS:
        np.testing.assert_array_equal(listed, np.unique(indices))
        got = np.zeros_like(wanted)
        size = listed.size * width * 4
        got[listed] = np.frombuffer(payload[at : at + size], np.float32).reshape(listed.size, width)
    else:
        got = np.frombuffer(payload[at : at + rows * width * 4], np.float32).reshape(rows, width)
    np.testing.assert_array_equal(got, wanted)
    assert payload.size <= payload_bytes(model)


def test_rows_without_values_fit_into_a_slot() -> None:
    model = place([Tensor("t", (100, 0))])
    payload, _ = rows_payload(model, {0: (np.arange(17), noise(1, 17, 0))})
    assert payload.size <= payload_bytes(model)


@pytest.mark.parametrize("bad", [-1, 50, 2**62])
def test_a_row_that_is_none(bad: int) -> None:
    model = place([TABLE])
    with pytest.raises(IndexError) as caught:
        rows_payload(model, {0: (np.array([3, bad]), noise(1, 2, 7))})
    assert caught.value.args == (0, bad)  # tensor, row


def test_values_that_are_not_finite_are_found() -> None:
    model = place([Tensor("t", (9000, 1))])
    for values, wanted in [([1.0, 2.0], False), ([1.0, np.inf], True), ([3e38, 3e38], True)]:
        given_ = np.array([[value] for value in values], np.float32)
        indices = np.zeros(2, np.int64)  # the same row twice: its sum counts
        squares = payload_of(model, {0: (indices, given_)})[3]
        assert math.isinf(squares) is wanted


@given(data=st.data(), wire=st.sampled_from(list(WireType)))
@settings(max_examples=100, deadline=None)
def test_rows_of_zeros_need_not_travel(data: st.DataObject, wire: WireType) -> None:
    """Leave out rows that are zero; the others are unchanged."""
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1))
    model = place([Tensor(f"t{i}", shape) for i, shape in enumerate(shapes)])
    gradients = {}
    for number, shape in enumerate(shapes):
        zero = data.draw(st.floats(0, 1))
        draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        values = draw.integers(-9, 9, shape).astype(np.float32)
        values[draw.random(shape[0]) < zero] = data.draw(st.sampled_from([0.0, -0.0]))
        gradients[number] = values
    payload, kind, blocks, squares = payload_of(model, gradients, wire, skip_zeros=True)
    assert squares == sum(float(np.square(values).sum()) for values in gradients.values())
    assert payload.size <= payload_bytes(model)
    got = decoded_frame(model, payload, kind, blocks, wire)
    for number, values in gradients.items():
        np.testing.assert_array_equal(got[number], values)
    if kind is FrameKind.ROWS:
        table = layout.rounded(len(shapes) * layout.BLOCK.itemsize, 64)
        most = table + model.elements * layout.WIRE_BYTES[wire] + 64 * len(shapes)
        assert payload.size <= most


# -- applied --------------------------------------------------------------------------------------


@st.composite
def frames(draw: st.DrawFn, model: Model) -> dict[int, Any] | None:
    """Return frames by number of the tensor: its rows, or all of it. None: a dense frame."""
    if draw(st.integers(0, 4)) == 0:
        return None
    made: dict[int, Any] = {}
    for number, tensor in enumerate(model.trained):
        form = draw(st.sampled_from(["absent", "rows", "rows", "all"]))
        rows = tensor.shape[0]
        if form == "rows":
            most = rows if tensor.count > rows else rows // 3
            count = draw(st.integers(0, min(most, 12)))
            made[number] = draw(
                st.lists(st.integers(0, rows - 1), min_size=count, max_size=count, unique=True)
            )
        elif form == "all":
            made[number] = None
    return made


def gradients(model: Model, frame: dict[int, Any], seed: int) -> dict[int, Any]:
    """Return values for the rows and tensors that a frame names."""
    made = {}
    for number, rows in frame.items():
        shape = model.tensors[number].shape
        if rows is None:
            made[number] = noise(seed + number, *shape)
        else:
            made[number] = np.array(rows, np.int64), noise(seed + number, len(rows), *shape[1:])
    return made


def touched(model: Model, named: dict[int, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of all values, and a mask of those that the frame names."""
    flat, mask = np.zeros(model.elements, np.float32), np.zeros(model.elements, bool)
    values, masks = model.views(flat), model.views(mask)
    for number, given_ in named.items():
        name = model.tensors[number].name
        if isinstance(given_, np.ndarray):
            values[name][...] = given_
            masks[name][...] = True
        else:
            values[name][given_[0]] = given_[1]
            masks[name][given_[0]] = True
    return flat, mask


def squares_of(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


@st.composite
def models(draw: st.DrawFn) -> list[Tensor]:
    shapes = st.tuples(st.integers(1, 60), st.sampled_from([1, 3, 64, 65, 300]))
    made = [Tensor(f"t{at}", draw(shapes)) for at in range(draw(st.integers(1, 3)))]
    made += [Tensor("plain", (draw(st.integers(1, 200)),))]
    if draw(st.booleans()):
        made += [Tensor("buffer", (draw(st.integers(1, 100)),), Role.BUFFER)]
    return made


@st.composite
def groups(draw: st.DrawFn, tensors: list[Tensor], kind: str) -> list[dict[str, Any]]:
    """Return settings of some tensors; mostly not of neighbours."""
    names = draw(st.permutations([one.name for one in tensors if one.role is Role.PARAMETER]))
    made: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(0, len(names)))):
        count = draw(st.integers(1, 2))
        match, names = names[:count], names[count:]
        one: dict[str, Any] = {"match": match or ["none"], "lr": draw(st.sampled_from([0.01, 0.2]))}
        if kind != "add":
            one["weight_decay"] = draw(st.sampled_from([0.0, 0.1]))
        if kind in ("momentum", "nesterov"):
            one["momentum"] = 0.5
        made.append(one)
    return made


@pytest.mark.parametrize("collect", [False, True], ids=["arrival", "superstep"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_reference(kind: str, collect: bool, job_name: str) -> None:
    """Dense gradients and such of rows, their means, over the borders of groups and shards."""

    @settings(max_examples=12, deadline=None)
    @given(data=st.data(), shards=st.integers(1, 4), seed=st.integers(0, 2**32))
    def holds(data: st.DataObject, shards: int, seed: int) -> None:
        tensors = data.draw(models())
        optimizer: dict[str, Any] = {
            "kind": kind,
            "lr": 0.05,
            "weight_decay": data.draw(st.sampled_from([0.0, 0.01])),
            "clip_norm": data.draw(st.sampled_from([0.0, 3.0])),
        }
        if kind.startswith(("ada", "rms")):
            # With less, a gradient that the decay of a weight cancels shows how it was rounded.
            optimizer["eps"] = 1e-2
        optimizer["groups"] = data.draw(groups(tensors, kind))
        config = OptimizerConfig.model_validate(optimizer)
        specs = config.specs()
        model = place(grouped(tensors, config.groups))
        group = np.searchsorted(model.group_ends(len(specs)), np.arange(model.elements), "right")
        values = {one.name: noise(seed + at, *one.shape) for at, one in enumerate(tensors)}
        learners = data.draw(st.integers(1, 3)) if collect else 1
        how: dict[str, Any] = {"shards": shards, "optimizer": optimizer, "learners": learners}
        with Rig(job_name, tensors, values, collect=collect, **how) as rig, rig.serving():
            moves = np.arange(model.elements) < model.parameters
            expected = rig.weights.copy()
            state = [np.zeros(model.elements, np.float32) for _ in range(slots(specs[0].kind))]
            for t in range(3):
                scales = np.ones((learners, layout.MAX_GROUPS), np.float32)
                scales += np.random.default_rng(seed + t).random(scales.shape, np.float32)
                total = np.zeros(model.elements, np.float32)
                named = np.zeros(model.elements, bool)
                for row in range(learners):
                    frame = data.draw(frames(model))
                    wire = data.draw(st.sampled_from(WireType))
                    if frame is None:
                        raw = reference.encode(wire, noise(seed + t, model.elements))
                        flat = reference.decode(wire, raw)
                        squares = squares_of(flat[moves])
                        rig.publish(row, raw, wire, squares=squares, rate_scale=scales[row])
                        named[:] = True
                    else:
                        given_ = gradients(model, frame, seed + 10 * t + row)
                        flat, mask = touched(model, given_)
                        squares = squares_of(flat[moves])
                        scale = scales[row]
                        rig.publish_rows(row, given_, wire, squares=squares, rate_scale=scale)
                        flat = reference.decode(wire, reference.encode(wire, flat))
                        named |= mask
                    flat[moves] *= np.float32(reference.clip_scale(specs[0].pack(), squares))
                    total += flat
                if collect:
                    rig.superstep(dict.fromkeys(range(learners), Action.APPLY))
                for row in range(learners):
                    rig.wait_tail(row, t + 1)
                total /= learners
                rates = [
                    reference.learning_rate(spec.pack(), t) * float(scale)
                    for spec, scale in zip(specs, scales.mean(axis=0), strict=False)
                ]
                at = np.where(named & moves, group, -1)
                reference.step_in_groups(specs, at, expected, state, total, t + 1, rates)
            # Values between tensors belong to no tensor.
            _, inside = touched(model, gradients(model, dict.fromkeys(range(len(tensors))), 0))
            # Gradients over the root of their squares: of small ones the roundings show.
            rooted = kind.startswith(("ada", "rms"))
            close = {"rtol": 2e-4, "atol": 2e-5} if rooted else {"rtol": 2e-5, "atol": 2e-6}
            np.testing.assert_allclose(rig.weights[inside], expected[inside], **close)
            moves &= inside
            for slot, wanted in zip(rig.slots, state, strict=True):
                np.testing.assert_allclose(slot[moves], wanted[moves], **close)
            assert not rig.roster["refused"].any()
            assert not (rig.control["shard"]["sequence"][: rig.shards] % 2).any()

    holds()


# -- refused --------------------------------------------------------------------------------------

HUGE = 2**64 - 1
BAD: list[tuple[str, Any, Reason]] = [
    ("tensor", 2, Reason.BAD_ROWS),
    ("tensor", 2**32 - 1, Reason.BAD_ROWS),
    ("form", 0, Reason.BAD_SIZE),
    ("form", 3, Reason.BAD_SIZE),
    ("rows", 51, Reason.BAD_SIZE),
    ("rows", HUGE, Reason.BAD_SIZE),
    ("indices_at", HUGE, Reason.BAD_SIZE),
    ("indices_at", HUGE - 63, Reason.BAD_SIZE),
    ("indices_at", 8, Reason.BAD_SIZE),
    ("values_at", HUGE, Reason.BAD_SIZE),
    ("values_at", 2**63, Reason.BAD_SIZE),
    ("values_at", 4, Reason.BAD_SIZE),
    ("index", 50, Reason.BAD_ROWS),
    ("index", HUGE, Reason.BAD_ROWS),
    ("index", 2**63, Reason.BAD_ROWS),
    ("repeated", None, Reason.BAD_ROWS),
    ("order", None, Reason.BAD_ROWS),
    ("blocks", 2**32 - 1, Reason.BAD_SIZE),
    ("blocks", 3, Reason.BAD_SIZE),
    ("payload_bytes", 10, Reason.BAD_SIZE),
    ("payload_bytes", HUGE, Reason.BAD_SIZE),
]


@pytest.mark.parametrize("collect", [False, True], ids=["arrival", "superstep"])
def test_a_bad_frame_moves_nothing(collect: bool, job_name: str) -> None:
    """It is refused, counted and named. In a superstep the manager refuses it. If the manager
    missed it, or the learner has overwritten it since, shards pass over it without harm."""
    with Rig(job_name, [TABLE, Tensor("b", (5,))], shards=2, collect=collect) as rig, rig.serving():
        for number, (field, value, reason) in enumerate(BAD):
            given_ = {0: (np.array([4, 9, 40]), noise(1, 3, 7)), 1: noise(2, 5)}
            payload, count = rows_payload(rig.model, given_)
            blocks = payload[:64].view(layout.BLOCK)
            indices = payload[int(blocks[0]["indices_at"]) :][:24].view(np.int64)
            fields: dict[str, Any] = {"kind": FrameKind.ROWS, "blocks": count}
            if field == "index":
                indices.view(np.uint64)[2] = value
            elif field == "repeated":
                indices[1] = indices[0]
            elif field == "order":
                blocks["tensor"] = [1, 0]
            elif field in layout.BLOCK.names:
                blocks[0][field] = value
            else:
                fields[field] = value
            rig.publish(0, payload, **fields)
            if collect:
                rig.superstep({0: Action.APPLY})
            rig.wait_tail(0, number + 1)
            assert np.isfinite(rig.weights).all()
            if not collect:
                assert int(rig.roster[0]["refused"]) == number + 1, (field, value)
                assert int(rig.roster[0]["reason"]) == reason, (field, value)
                assert not rig.weights.any()
        rig.weights[:] = 0
        rig.publish_rows(0, {0: (np.array([4]), np.ones((1, 7), np.float32))})
        if collect:
            rig.superstep({0: Action.APPLY})
        rig.wait_tail(0, len(BAD) + 1)
        table = rig.model.views(rig.weights)["table"]
        assert table[4].all()
        assert np.count_nonzero(rig.weights) == 7
