"""Servers killed while they apply: whoever takes over finishes each gradient exactly once."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from support import Child, Rig, eventually

from gadei_ps import _native, layout
from gadei_ps.kernels import reference
from gadei_ps.kernels.optimizers import WireType
from gadei_ps.layout import IDLE, Action, Role
from gadei_ps.weights import Tensor

TENSORS = [Tensor("w", (40_000,)), Tensor("b", (3_000,), Role.BUFFER)]
FRAMES = 60
WIRES = list(WireType)


def payload(elements: int, number: int, row: int) -> tuple[np.ndarray, WireType]:
    noise = np.random.default_rng([number, row]).standard_normal(elements).astype(np.float32)
    wire = WIRES[number % len(WIRES)]
    return reference.encode(wire, noise), wire


def _serve(pipe: Connection, rig: Rig) -> None:
    """A server: recovers what the one before it left, then serves until it is killed."""
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

    def maybe_kill(self) -> None:
        """Kills at some point of a gradient, mostly; starts the next."""
        if self.chance.random() < 0.4:
            return
        cursors = self.rig.state["record"]["cursor"][: self.rig.shards]
        shard = self.chance.randrange(self.rig.shards)
        for _ in range(self.chance.randrange(3000)):
            if cursors[shard] != IDLE and self.chance.random() < 0.05:
                break
        self.child.kill()
        self.deaths += 1
        self._start()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_killed_at_random_instants(kind: str, shards: int, job_name: str) -> None:
    how: dict[str, Any] = {"optimizer": {"kind": kind, "lr": 0.01}, "shards": shards, "slots": 2}
    with Rig(f"{job_name}a", TENSORS, **how) as undisturbed, undisturbed.serving():
        for number in range(FRAMES):
            data, wire = payload(undisturbed.model.elements, number, 0)
            last = undisturbed.publish(0, data, wire=wire)
        undisturbed.wait_applied(0, last)
        weights = undisturbed.weights.copy()
        slots = [slot.copy() for slot in undisturbed.slots]

    with Rig(job_name, TENSORS, **how) as rig:
        servers = Servers(rig, 7 * shards + len(kind))
        try:
            for number in range(FRAMES):
                data, wire = payload(rig.model.elements, number, 0)
                last = rig.publish(0, data, wire=wire)
                servers.maybe_kill()
            rig.wait_applied(0, last)
            # The tail moves last of all, so now nothing is in hand.
            np.testing.assert_array_equal(rig.weights, weights)
            for mine, wanted in zip(rig.slots, slots, strict=True):
                np.testing.assert_array_equal(mine, wanted)
            assert int(rig.control["version"]) == FRAMES
            assert (rig.state["record"]["steps"][:shards] == FRAMES).all()
        finally:
            servers.child.kill()
        assert servers.deaths > FRAMES // 3
        assert servers.in_hand > 3, "kills in the middle of a gradient"


def test_killed_in_supersteps(job_name: str) -> None:
    """The mean of several learners' gradients, one of them refused."""
    how: dict[str, Any] = {"optimizer": {"kind": "adam"}, "shards": 2, "collect": True}
    actions = {0: Action.APPLY, 1: Action.REFUSE, 2: Action.APPLY}
    rounds = 30

    def step(rig: Rig, number: int) -> None:
        for row in actions:
            data, wire = payload(rig.model.elements, number, row)
            rig.publish(row, data, wire=wire)
        rig.superstep(actions)

    with Rig(f"{job_name}a", TENSORS, learners=3, **how) as undisturbed, undisturbed.serving():
        for number in range(rounds):
            step(undisturbed, number)
            eventually(undisturbed.superstep_done)
            undisturbed.wait_tail(2, number + 1)
        weights = undisturbed.weights.copy()

    with Rig(job_name, TENSORS, learners=3, **how) as rig:
        servers = Servers(rig, 5)
        try:
            for number in range(rounds):
                step(rig, number)
                servers.maybe_kill()
                eventually(rig.superstep_done)
                for row in actions:
                    rig.wait_tail(row, number + 1)
            np.testing.assert_array_equal(rig.weights, weights)
            assert int(rig.control["version"]) == 2 * rounds
        finally:
            servers.child.kill()
        assert servers.in_hand > 3


def test_integers_from_several_learners(job_name: str) -> None:
    """Each gradient counts once, in whatever order the shards take them."""
    learners, rounds = 3, 40
    how: dict[str, Any] = {"learners": learners, "shards": 2, "slots": 4}
    with Rig(job_name, [Tensor("w", (30_000,))], **how) as rig:
        ones = np.ones(rig.model.elements, np.float32)
        servers = Servers(rig, 3)
        try:
            for _ in range(rounds):
                for row in range(learners):
                    rig.publish(row, ones)
                servers.maybe_kill()
            for row in range(learners):
                rig.wait_applied(row, rounds - 1)
        finally:
            servers.child.kill()
        np.testing.assert_array_equal(rig.weights, -learners * rounds)
        assert int(rig.control["version"]) == learners * rounds
        head = layout.offset(layout.RING, "head")
        assert _native.load(rig.memory.rings[0].address + head) == rounds
