"""Servers killed while they apply: the next server finishes each gradient exactly once."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from support import Child, Rig, eventually, rows_payload, same
from support import kernel_reference as reference

from gadei_ps import _native
from gadei_ps.kernels.optimizers import WireType
from gadei_ps.memory.layout import IDLE, Action, FrameKind, Role
from gadei_ps.memory.weights import Model, Tensor

# So large that applying one gradient takes longer than killing a process.
TENSORS = [
    Tensor("w", (500_000,)),
    Tensor("table", (5000, 100)),
    Tensor("b", (100_000,), Role.BUFFER),
]
# The same with groups: `w` is cut, and each part is in another group.
PARTS = [Tensor("w", (123_456,)), Tensor("v", (376_500,)), *TENSORS[1:]]
GROUPS = [
    {"match": "v", "lr": 0.02, "weight_decay": 0.1},
    {"match": "table", "lr": 0.005, "beta1": 0.8},
]
KINDS = 5  # of payloads
LEAST, MOST = 15, 300  # steps
ENOUGH = 4
WIRES = list(WireType)


@functools.cache
def payload(model: Model, number: int, row: int) -> tuple[np.ndarray, dict[str, Any]]:
    """A few payloads of each kind, which all runs use in the same order, and their frames."""
    draw = np.random.default_rng([number, row])
    wire = WIRES[number % len(WIRES)]
    if number < len(WIRES):
        noise = draw.standard_normal(model.elements).astype(np.float32)
        return reference.encode(wire, noise), {"wire": wire}
    indices = draw.integers(0, 5000, 4000)
    rows = indices, draw.standard_normal((indices.size, 100)).astype(np.float32)
    number_of = {one.name: number for number, one in enumerate(model.tensors)}
    given = {number_of["table"]: rows, number_of["w"]: np.ones(model.tensors[number_of["w"]].count)}
    raw, blocks = rows_payload(model, given, wire)
    return raw, {"wire": wire, "kind": FrameKind.ROWS, "blocks": blocks}


def _serve(pipe: Connection, rig: Rig) -> None:
    """A server: recovers what the previous one left, then serves until it is killed."""
    pipe.send(rig.recover())
    with rig.serving():
        pipe.recv()


class Servers:
    """One server after another; each is killed at a random instant of its work."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.chance = random.Random(seed)
        self.in_hand = self.deaths = 0
        self._start()

    def _start(self) -> None:
        self.child = Child(_serve, self.rig)
        self.in_hand += sum(self.child.receive())

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.child.kill()

    def maybe_kill(self) -> None:
        """Kill the server perhaps, mostly in the middle of a gradient, and start the next one."""
        if self.chance.random() < 0.3:
            return
        cursors = self.rig.state["record"]["cursor"]
        shard = self.chance.randrange(self.rig.shards)
        for _ in range(1000):
            if int(cursors[shard]) != IDLE:
                break
        for _ in range(self.chance.randrange(200)):
            _native.load(self.rig.control_at)
        self.child.kill()
        self.deaths += 1
        self._start()


def _runs(
    name: str,
    actions: dict[int, Action] | None,
    seed: int,
    tensors: Sequence[Tensor] = TENSORS,
    **how: Any,
) -> None:
    """A run in which ENOUGH servers die in the middle of a gradient, and the same undisturbed."""
    rows = list(actions or [0])

    def step(rig: Rig, number: int) -> None:
        for row in rows:
            data, says = payload(rig.model, number % KINDS, row)
            rig.publish(row, data, version=max(0, number - 2), **says)
        if actions:
            rig.superstep(actions)

    def done(rig: Rig, number: int) -> None:
        if actions:
            eventually(rig.superstep_done)
        for row in rows:
            rig.wait_tail(row, number + 1)

    with Rig(name, tensors, **how) as rig, Servers(rig, seed) as servers:
        steps = 0
        while steps < LEAST or (servers.in_hand < ENOUGH and steps < MOST):
            step(rig, steps)
            servers.maybe_kill()
            if actions:
                done(rig, steps)
            steps += 1
        done(rig, steps - 1)
        # Tails move last, so now no gradient is in flight.
        applied = (len(rows) - sum(act != Action.APPLY for act in (actions or {}).values())) * steps
        assert int(rig.control["version"]) == applied
        assert (rig.state["record"]["steps"][: rig.shards] == steps).all()
        disturbed = rig.kept()
        assert servers.in_hand >= ENOUGH, f"of {servers.deaths} deaths"

    with Rig(name, tensors, **how) as rig, rig.serving():
        for number in range(steps):
            step(rig, number)
            if actions:
                done(rig, number)
        done(rig, steps - 1)
        same(rig.kept(), disturbed)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_killed_at_random_instants(kind: str, shards: int, job_name: str) -> None:
    optimizer = {"kind": kind, "lr": 0.01}
    _runs(job_name, None, 7 * shards + len(kind), optimizer=optimizer, shards=shards, slots=3)


def test_killed_in_supersteps(job_name: str) -> None:
    """The mean of several learners' gradients, one of them refused."""
    actions = {0: Action.APPLY, 1: Action.REFUSE, 2: Action.APPLY}
    _runs(job_name, actions, 5, optimizer={"kind": "adam"}, shards=2, collect=True, learners=3)


@pytest.mark.parametrize("actions", [None, {0: Action.APPLY, 1: Action.APPLY}])
def test_killed_with_groups(actions: dict[int, Action] | None, job_name: str) -> None:
    optimizer = {"kind": "adam", "lr": 0.01, "groups": GROUPS}
    how: dict[str, Any] = {"collect": True, "learners": 2} if actions else {}
    _runs(job_name, actions, 11, PARTS, optimizer=optimizer, shards=2, slots=3, **how)


def test_integers_from_several_learners(job_name: str) -> None:
    """Each gradient counts once, in any order in which shards apply them."""
    learners, rounds = 3, 40
    how: dict[str, Any] = {"learners": learners, "shards": 2, "slots": 4}
    with Rig(job_name, [Tensor("w", (30_000,))], **how) as rig:
        ones = np.ones(rig.model.elements, np.float32)
        with Servers(rig, 3) as servers:
            for _ in range(rounds):
                for row in range(learners):
                    rig.publish(row, ones)
                servers.maybe_kill()
            for row in range(learners):
                rig.wait_applied(row, rounds - 1)
        np.testing.assert_array_equal(rig.weights, -learners * rounds)
        assert int(rig.control["version"]) == learners * rounds
