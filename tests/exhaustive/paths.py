"""Paths through a shard: each way of a frame, for every optimizer and number format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from support import Rig, eventually
from support import kernel_reference as reference

from gadei_ps import _native
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec, WireType
from gadei_ps.memory import layout
from gadei_ps.memory.layout import NO_BATCH, Action, FrameKind, Role, Work
from gadei_ps.memory.weights import Tensor

# With padding 128 parameters, which are whole chunks, and a buffer that is shorter than one.
TENSORS = [Tensor("table", (4, 24)), Tensor("w", (30,)), Tensor("running", (24,), Role.BUFFER)]
LISTED = np.array([0, 2, 3])  # rows: one alone, and two that are cut as one
RATE = 0.05
DECAY = 0.01
MOMENTUM = 0.9
# What becomes of the learners' frames in a superstep; the second one is a frame of rows.
ACTIONS = {0: Action.APPLY, 1: Action.APPLY, 2: Action.DROP, 3: Action.REFUSE}
WAYS = ("dense", "rows", "superstep", "refused", "dropped", "assign")
# Of assignments, which slot they are for: 0 is the weights. "alone" is one that a superstep is of.
STREAM = {"assign": 0, "add": 0, "reset": 0, "slot": 1, "last slot": 2, "alone": 0}
STEPS = 77  # that an assignment of a slot sets

SAID_MOMENTUM = 0.75  # by the gradients; the job has another one
MISSED = 1  # updates that the first gradient has missed
COLLECTED = ("superstep", "alone")
Gradient = tuple[np.ndarray, np.ndarray]
"""float32 of each element, and whether the gradient names it."""


@dataclass(frozen=True)
class Path:
    """One way through the code of a shard."""

    way: str
    optimizer: str
    wire: WireType
    shards: int = 1
    index: int = 0

    def __str__(self) -> str:
        part = f"-shard{self.index}" if self.shards > 1 else ""
        return f"{self.way}-{self.optimizer}-{self.wire.name.lower()}{part}"


EVERY = [Path(way, kind.name.lower(), wire) for way in WAYS for kind in Kind for wire in WireType]
EVERY += [
    # Its learner is gone, and has a batch that it has not answered.
    Path("leaves", "adam", WireType.FLOAT32),
    # Two frames, and the second one answers the last batch of all.
    Path("last", "nesterov", WireType.BFLOAT16),
    # A dense frame after one of a row or of two, so that the pieces of one lie elsewhere.
    Path("after1", "momentum", WireType.FLOAT16),
    Path("after2", "sgd", WireType.FLOAT32),
    # Assignments.
    Path("add", "sgd", WireType.BFLOAT16),
    Path("add", "adam", WireType.FLOAT32),
    Path("reset", "adam", WireType.FLOAT32),
    Path("reset", "momentum", WireType.BFLOAT16),
    Path("slot", "adagrad", WireType.FLOAT32),
    Path("slot", "adamw", WireType.FLOAT16),
    Path("last slot", "adamw", WireType.FLOAT32),
    Path("alone", "nesterov", WireType.FLOAT32),
]
# The thread of another shard does no accounting.
SECOND = [
    Path(way, kind.name.lower(), list(WireType)[(at + kind) % 3], 2, 1)
    for at, way in enumerate(WAYS)
    for kind in Kind
]


def noise(*seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def rig_of(name: str, path: Path) -> Rig:
    """A rig for the path, before any gradient."""
    collect = path.way in COLLECTED
    optimizer = {"kind": path.optimizer, "lr": RATE, "weight_decay": DECAY, "momentum": MOMENTUM}
    values = {
        one.name: noise(at, count=one.count).reshape(one.shape) for at, one in enumerate(TENSORS)
    }
    learners = len(ACTIONS) if path.way == "superstep" else 1 if path.way == "last" else 2
    how: dict[str, Any] = {"collect": collect, "learners": learners}
    how |= {"shards": path.shards, "slots": 2, "ahead": 2, "spin_us": 0.0}
    return Rig(name, TENSORS, values, optimizer=optimizer, **how)


def batch_of(rig: Rig, row: int, number: int = 0) -> int:
    """One that the learner has to answer."""
    return int(rig.roster[row]["outstanding"][number])


def set_out(rig: Rig, path: Path) -> list[list[Gradient]]:
    """Bring a rig to rest with a history behind it, and publish the path's frames.

    Returns the gradients that are to be applied, step by step; of each, their mean.
    """
    rows = range(len(rig.memory.rings))
    rig.control["batches"], rig.control["epochs"] = (4, 1) if path.way == "last" else (1000, 2)
    _native.store32(rig.word("work"), Work.WORKING)

    def handed() -> bool:
        return bool(((rig.roster["outstanding"] != NO_BATCH).sum(axis=1)[: len(rows)] == 2).all())

    with rig.serving():
        for number in range(2):
            eventually(handed)
            for row in rows:
                gradient = noise(9, number, row, count=rig.model.elements)
                rig.publish(row, gradient, batch=batch_of(rig, row))
            if path.way in COLLECTED:
                rig.superstep(dict.fromkeys(rows, Action.APPLY))
                eventually(rig.superstep_done)
            for row in rows:
                rig.wait_tail(row, number + 1)
        eventually(handed)
    given = _publish(rig, path)
    for row in rows:
        rig.ring(row)["waits_slot"] = 1  # its learner sleeps until a slot is free
    return given


def _publish(rig: Rig, path: Path) -> list[list[Gradient]]:
    raw = reference.encode(path.wire, noise(5, count=rig.model.elements))
    whole = reference.decode(path.wire, raw), np.ones(rig.model.elements, bool)
    says: dict[str, Any] = {"wire": path.wire, "loss": 1.5, "started": 1.0, "finished": 2.0}
    says |= {"version": int(rig.control["version"]) - MISSED, "momentum": SAID_MOMENTUM}
    if path.way.startswith("after"):
        listed = {"after1": [1], "after2": [1, 3]}[path.way]
        values = noise(6, count=len(listed) * 24).reshape(-1, 24)
        rig.publish_rows(0, {0: (np.array(listed), values)}, batch=batch_of(rig, 0), **says)
        rig.publish(0, raw, batch=batch_of(rig, 0, 1), **says)
        places = dict(zip([24 * one for one in listed], values, strict=True))
        return [[_spread(rig, path.wire, places)], [whole]]
    if path.way == "superstep":
        given = [whole, _publish_rows(rig, 1, says)]
        for row in set(ACTIONS) - {1}:
            rig.publish(row, raw, batch=batch_of(rig, row), **says)
        rig.superstep(ACTIONS)
        return [given]
    if path.way in STREAM:
        values = {
            0: (LISTED, noise(6, count=LISTED.size * 24).reshape(-1, 24)),
            2: noise(8, count=24),
        }
        says |= {"kind": FrameKind.ASSIGN, "stream": STREAM[path.way], "steps": layout.SAME_STEPS}
        if path.way == "reset":
            says["flags"] = layout.CHECKED | layout.RESET
        elif path.way == "add":
            says["flags"] = layout.CHECKED | layout.ADD
        elif "slot" in path.way:
            says["steps"] = STEPS
        rig.publish_rows(0, values, batch=batch_of(rig, 0), **says)
        if path.way == "alone":
            rig.superstep({0: Action.APPLY})
        places = [*(LISTED * 24).tolist(), rig.model.tensors[2].start]
        return [
            [_spread(rig, path.wire, dict(zip(places, [*values[0][1], values[2]], strict=True)))]
        ]
    if path.way == "rows":
        return [[_publish_rows(rig, 0, says)]]
    if path.way == "refused":
        says["flags"] = layout.CHECKED | layout.NONFINITE
    elif path.way == "dropped":
        says |= {"kind": FrameKind.EMPTY, "blocks": 1}
    rig.publish(0, raw, batch=batch_of(rig, 0), **says)
    if path.way == "last":
        rig.publish(0, raw, batch=batch_of(rig, 0, 1), **says)
        return [[whole], [whole]]
    if path.way == "leaves":
        rig.roster[0]["wanted"] = 0
    return [[whole]] if path.way in ("dense", "leaves") else []


def _publish_rows(rig: Rig, row: int, says: dict[str, Any]) -> Gradient:
    """A gradient of some rows, of one tensor whole and of no buffer."""
    table, w = noise(6, count=LISTED.size * 24).reshape(-1, 24), noise(7, count=30)
    rig.publish_rows(row, {0: (LISTED, table), 1: w}, batch=batch_of(rig, row), **says)
    places = [*(LISTED * 24).tolist(), rig.model.tensors[1].start]
    return _spread(rig, says["wire"], dict(zip(places, [*table, w], strict=True)))


def _spread(rig: Rig, wire: WireType, given: dict[int, np.ndarray]) -> Gradient:
    """The gradient that names these values. given: by the place of the first of them."""
    values = np.zeros(rig.model.elements, np.float32)
    named = np.zeros(rig.model.elements, bool)
    for at, some in given.items():
        values[at : at + some.size] = reference.decode(wire, reference.encode(wire, some))
        named[at : at + some.size] = True
    return values, named


def by_numpy(rig: Rig, path: Path, steps: Sequence[Sequence[Gradient]]) -> list[np.ndarray]:
    """Return weights and slots after the steps, from those of now."""
    arrays = rig.kept()
    done = int(rig.state["record"]["steps"][path.index])
    for number, given in enumerate(steps):
        stale = 0 if path.way in COLLECTED else MISSED + number
        _step(rig, path, arrays, given, done + number + 1, stale)
    return arrays


def _step(
    rig: Rig,
    path: Path,
    arrays: list[np.ndarray],
    given: Sequence[Gradient],
    number: int,
    stale: int,
) -> None:
    """Change weights and slots by the mean of the gradients, or assign."""
    kind = Kind[path.optimizer.upper()]
    moving = {"momentum": SAID_MOMENTUM, "beta1": SAID_MOMENTUM}
    spec = OptimizerSpec(kind, lr=RATE, weight_decay=DECAY, **moving)
    low, high = rig.range(path.index)
    here = np.arange(rig.model.elements)
    named = np.any([one[1] for one in given], axis=0) & (here >= low) & (here < high)
    if not all(one[1].all() for one in given):  # the padding goes with dense gradients only
        tensors = rig.model.tensors
        named &= np.any([(here >= t.start) & (here < t.start + t.count) for t in tensors], axis=0)
    if path.way in STREAM:
        _assign(rig, path, arrays, given[0][0], named)
        return
    mean = np.sum([one[0] for one in given], axis=0) * np.float32(1 / len(given))
    moved = named & (here < rig.model.parameters)
    parts = [array[moved] for array in arrays]
    reference.step(spec, parts[0], parts[1:], mean[moved], number, RATE, stale)
    for array, part in zip(arrays, parts, strict=True):
        array[moved] = part


def _assign(
    rig: Rig, path: Path, arrays: list[np.ndarray], values: np.ndarray, named: np.ndarray
) -> None:
    """Put the values that are named in the place of weights, or of a slot's of parameters; or add
    them to weights."""
    parameter = np.arange(rig.model.elements) < rig.model.parameters
    stream = STREAM[path.way]
    here = named & parameter if stream else named
    if path.way == "add":
        arrays[0][here] += values[here]
        return
    arrays[stream][here] = values[here]
    if path.way == "reset":
        for slot in arrays[1:]:
            slot[named & parameter] = 0
