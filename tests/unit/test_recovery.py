"""A server died at some chunk of a gradient; the next one finishes the gradient exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support import Rig, eventually
from support import kernel_reference as reference

from gadei_ps.kernels.optimizers import WireType
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CHUNK, Action, Reason, Role
from gadei_ps.memory.weights import Tensor

W = [Tensor("w", (10,))]
GROUPS = [{"match": "y", "lr": 0.5, "weight_decay": 0.1}, {"match": ["w", "z"], "lr": 0.02}]


def noise(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def _stopped_inside(
    rig: Rig, done: Rig, shard: int, chunk: int, *, is_open: bool, scratch: float
) -> None:
    """Bring a shard of `rig` to where SIGKILL could leave it on the way to the state of `done`."""
    low, high = rig.range(shard)
    high = min(high, rig.model.parameters)
    record = rig.state["record"][shard]
    fields = (
        "ring",
        "generation",
        "sequence",
        "step",
        "staleness",
        "momentum",
        "rate",
        "version",
        "applies",
        "next_step",
    )
    for field in fields:
        record[field] = done.state["record"][shard][field]
    record["span"] = (layout.IDLE, 0, 0)
    record["span"][0] = (0, low, high)
    rig.control["shard"][shard]["sequence"] += 1
    at = low + chunk * CHUNK
    streams = [(rig.weights, done.weights), *zip(rig.slots, done.slots, strict=True)]
    for stream, (mine, finished) in enumerate(streams):
        mine[low:at] = finished[low:at]
        if is_open:
            end = min(at + CHUNK, high)
            rig.undo(shard, stream, chunk)[: end - at] = mine[at:end]
            mine[at : at + (end - at) // 2] = scratch
    record["cursor"] = chunk << 1 | is_open


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("collect", [False, True])
@pytest.mark.parametrize("groups", [(), GROUPS])
def test_recover_at_every_chunk(
    groups: Sequence[dict[str, Any]], kind: str, shards: int, collect: bool, job_name: str
) -> None:
    """The groups end within chunks, so that the next one begins after padding."""
    sizes = {"w": 1000, "x": 700, "y": 37, "z": 1263} if groups else {"w": 3000}
    tensors = [Tensor(name, (size,)) for name, size in sizes.items()]
    tensors += [Tensor("b", (1500,), Role.BUFFER)]
    optimizer = {"kind": kind, "lr": 0.1, "groups": groups}
    how = {"shards": shards, "optimizer": optimizer, "slots": 4}
    how |= {"collect": collect, "learners": 3}
    values = {one.name: noise(at, one.count) for at, one in enumerate(tensors)}
    wires = [WireType.FLOAT32, WireType.BFLOAT16, WireType.FLOAT16]

    def step(rig: Rig, number: int) -> None:
        rows = (0, 1, 2) if collect else (number % 3,)
        for row in rows:
            wire = wires[row]
            gradient = noise(10 * number + row, rig.model.elements)
            rig.publish(row, reference.encode(wire, gradient), wire=wire)

    def act(rig: Rig) -> None:
        rig.superstep({0: Action.APPLY, 1: Action.REFUSE, 2: Action.APPLY})

    def run(rig: Rig, numbers: range) -> None:
        with rig.serving():
            for number in numbers:
                step(rig, number)
                if collect:
                    act(rig)
                    eventually(rig.superstep_done)
                else:
                    rig.wait_applied(number % 3, int(rig.ring(number % 3)["head"]) - 1)

    with Rig(f"{job_name}b", tensors, values, **how) as after:
        run(after, range(3))
        with Rig(f"{job_name}c", tensors, values, **how) as last:
            run(last, range(4))
            final = last.weights.copy()
        low, high = after.range(shards - 1)
        high = min(high, after.model.parameters)
        for chunk in range(-(-(high - low) // CHUNK) + 1):
            for is_open in (False, True):
                if is_open and low + chunk * CHUNK >= high:
                    continue
                with Rig(job_name, tensors, values, **how) as rig:
                    run(rig, range(2))
                    step(rig, 2)
                    if collect:
                        act(rig)
                    for shard in range(shards - 1):  # done already, or not begun
                        _stopped_inside(rig, after, shard, 0, is_open=False, scratch=0)
                    _stopped_inside(
                        rig, after, shards - 1, chunk, is_open=is_open, scratch=math.nan
                    )
                    assert rig.recover() == [1] * shards
                    for mine, wanted in [
                        (rig.weights, after.weights),
                        *zip(rig.slots, after.slots, strict=True),
                    ]:
                        np.testing.assert_array_equal(mine, wanted)
                    for field in ("cursor", "steps", "supersteps"):
                        assert (rig.state["record"][field] == after.state["record"][field]).all()
                    assert (rig.state["applied"] == after.state["applied"]).all()
                    assert rig.control["version"] == after.control["version"]
                    assert not (rig.control["shard"]["sequence"] % 2).any()
                    assert rig.recover() == [0] * shards
                    np.testing.assert_array_equal(rig.weights, after.weights)
                    run(rig, range(3, 4))
                    for row in range(3):
                        tails = rig.ring(row)["tail"]["value"]
                        assert (tails[:shards] == int(rig.ring(row)["head"])).all()
                    np.testing.assert_array_equal(rig.weights, final)


def test_recovery_awaits_the_ring_of_its_gradient(job_name: str) -> None:
    """Not another one, which has its row by now; and none if it needs none."""
    with Rig(job_name, W) as rig:
        record, ring = rig.state["record"][0], rig.board["ring"][0]
        assert rig.can_recover(0)
        record["ring"], record["generation"], record["cursor"] = 0, 1, 0
        assert rig.can_recover(0)
        ring["generation"] = 2
        assert not rig.can_recover(0)
        record["generation"] = 2
        assert rig.can_recover(0)
        ring["address"] = 0
        assert not rig.can_recover(0)
        record["accounted"], record["cursor"] = 1, layout.IDLE
        assert rig.can_recover(0)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("is_open", [False, True])
def test_recover_without_the_ring(is_open: bool, kind: str, job_name: str) -> None:
    """The gradient is torn: what is changed stays so, the rest is left alone, and it counts."""
    tensors = [Tensor("w", (3000,)), Tensor("b", (1500,), Role.BUFFER)]
    how = {"optimizer": {"kind": kind, "lr": 0.1}}
    with (
        Rig(f"{job_name}b", tensors, **how) as after,
        Rig(job_name, tensors, **how) as rig,
    ):
        gradient = noise(1, rig.model.elements)
        with after.serving():
            after.apply(0, gradient)
        before = rig.kept()
        chunk = 20
        rig.publish(0, gradient)
        _stopped_inside(rig, after, 0, chunk, is_open=is_open, scratch=math.nan)
        ring = rig.memory.rings[0]
        ring.array(np.uint8, ring.size, 0)[:] = 0
        assert rig.recover() == [1]
        at = chunk * CHUNK
        for mine, first, rest in zip(rig.kept(), after.kept(), before, strict=True):
            np.testing.assert_array_equal(mine[:at], first[:at])
            np.testing.assert_array_equal(mine[at:], rest[at:])
        record, entry = rig.state["record"][0], rig.roster[0]
        assert (int(record["torn"]), int(record["steps"])) == (1, 1)
        assert int(rig.state["applied"][0, 0]) == int(rig.control["version"]) == 1
        assert (int(entry["applied"]), int(entry["refused"])) == (0, 1)
        assert int(entry["reason"]) == Reason.TORN
        assert rig.recover() == [0]
        assert int(record["torn"]) == 1


def test_an_open_row_is_restored_without_its_frame(job_name: str) -> None:
    """Write other rows over the frame before the recovery: the place is the record's."""
    tensors = [Tensor("table", (50, 10)), Tensor("w", (100,))]
    with Rig(job_name, tensors, {"table": noise(1, 500), "w": noise(2, 100)}) as rig:
        before = rig.weights.copy()
        low = 30 * 10
        record = rig.state["record"][0]
        for field, value in (("ring", 0), ("generation", 1), ("sequence", 0), ("applies", 1)):
            record[field] = value
        record["next_step"] = 1
        record["span"] = (layout.IDLE, 0, 0)
        record["span"][1] = (4, low, low + 10)
        rig.undo(0, 0, 4)[:10] = before[low : low + 10]
        rig.weights[low : low + 10] = math.nan
        rig.publish_rows(0, {0: (np.array([2]), np.zeros((1, 10), np.float32))})
        record["cursor"] = 4 << 1 | 1
        assert rig.recover() == [1]
        np.testing.assert_array_equal(rig.weights, before)


def test_recover_when_all_but_the_tail_was_done(job_name: str) -> None:
    with Rig(job_name, W, slots=1) as rig:
        with rig.serving():
            rig.apply(0, rig.ones())
        rig.ring(0)["tail"]["value"][0] = 0
        assert rig.recover() == [0]
        with rig.serving():
            rig.wait_tail(0, 1)
            rig.apply(0, rig.ones())
        np.testing.assert_array_equal(rig.weights, -2.0)
