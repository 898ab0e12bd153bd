"""Supersteps on a job's real segments: the mean of the chosen gradients, on several shards."""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest
from support import Rig, eventually

from gadei_ps.memory import layout
from gadei_ps.memory.layout import Action, Role
from gadei_ps.memory.weights import Tensor
from gadei_ps.server.symbols import get, put

W = [Tensor("w", (10,))]


def noise(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def test_superstep_applies_the_mean(job_name: str) -> None:
    with Rig(job_name, [Tensor("w", (5000,))], learners=4, shards=3, collect=True) as rig:
        gradients = [noise(row, rig.model.elements) for row in range(4)]
        with rig.serving():
            for row, gradient in enumerate(gradients):
                rig.publish(row, gradient, rate_scale=1.0 + row, samples=1)
            rig.superstep({0: Action.APPLY, 1: Action.APPLY, 3: Action.APPLY, 2: Action.REFUSE})
            eventually(rig.superstep_done)
            total = gradients[0] + gradients[1] + gradients[3]
            mean = total * np.float32(1 / 3)
            rate = np.float32((1.0 + 2.0 + 4.0) / 3)
            np.testing.assert_allclose(rig.weights, -rate * mean, rtol=1e-6)
            assert rig.control["version"] == 3
            assert [int(rig.roster[row]["applied"]) for row in range(4)] == [1, 1, 0, 1]
            assert rig.roster[2]["refused"] == 1
            before = rig.weights.copy()
            # Nothing is applied: consumed only, and no optimizer step is counted.
            rig.publish(1, gradients[1])
            rig.superstep({1: Action.DROP})
            eventually(rig.superstep_done)
            assert rig.roster[1]["dropped"] == 1
            np.testing.assert_array_equal(rig.weights, before)
        assert (rig.state["record"]["steps"][:3] == 1).all()
        assert (rig.state["record"]["supersteps"][:3] == 2).all()
        for row, tail in enumerate([1, 2, 1, 1]):
            assert (rig.ring(row)["tail"]["value"][:3] == tail).all()


def test_a_superstep_is_not_stale(job_name: str) -> None:
    """Not after gradients that were, before the model of synchronization changed."""
    optimizer = {"kind": "momentum", "lr": 1.0}
    with Rig(job_name, W, learners=2, collect=True, optimizer=optimizer) as rig:
        rig.state["record"]["staleness"] = 3
        with rig.serving():
            for row in range(2):
                rig.publish(row, rig.ones())
            rig.superstep({0: Action.APPLY, 1: Action.APPLY})
            eventually(rig.superstep_done)
        np.testing.assert_array_equal(rig.weights, -1)


@pytest.mark.parametrize(("momenta", "counts"), [((0.5, 0.75), 0.625), ((0.5, np.nan), 0.9)])
def test_the_momentum_of_a_superstep(
    momenta: tuple[float, float], counts: float, job_name: str
) -> None:
    """The mean of those that travel with its gradients; the job's if one of them says none."""
    optimizer = {"kind": "momentum", "lr": 1.0, "momentum": 0.9}
    with Rig(job_name, W, learners=2, collect=True, optimizer=optimizer) as rig:
        with rig.serving():
            for _ in range(2):
                for row in range(2):
                    rig.publish(row, rig.ones(), momentum=momenta[row])
                rig.superstep({0: Action.APPLY, 1: Action.APPLY})
                eventually(rig.superstep_done)
        np.testing.assert_allclose(rig.weights, -1 - (1 + counts), rtol=1e-6)


def test_superstep_clips_each_gradient(job_name: str) -> None:
    optimizer = {"kind": "sgd", "lr": 1.0, "clip_norm": 2.0}
    tensors = [Tensor("w", (4,)), Tensor("s", (4,), Role.BUFFER)]
    with Rig(job_name, tensors, learners=3, collect=True, optimizer=optimizer) as rig:
        with rig.serving():
            for row, size in enumerate([0.5, 4.0, 16.0]):  # norms 1, 8, 32
                rig.publish(row, rig.ones() * np.float32(size), squares=4 * size * size)
            rig.superstep(dict.fromkeys(range(3), Action.APPLY))
            eventually(rig.superstep_done)
        views = rig.model.views(rig.weights)
        np.testing.assert_allclose(views["w"], -(0.5 + 1.0 + 1.0) / 3, rtol=1e-5)
        np.testing.assert_array_equal(views["s"], 0)  # gradients change parameters only


@pytest.mark.parametrize("squares", [-1.0, math.nan, 0.0])
def test_squares_that_cannot_be_clip_nothing(squares: float, job_name: str) -> None:
    optimizer = {"kind": "sgd", "lr": 1.0, "clip_norm": 0.5}
    with Rig(job_name, W, optimizer=optimizer) as rig, rig.serving():
        rig.apply(0, rig.ones(), squares=squares)
        np.testing.assert_array_equal(rig.weights, -1.0)


def test_a_dropped_gradients_batch_is_handed_out_again(job_name: str) -> None:
    with Rig(job_name, W, learners=2, ahead=1, collect=True) as rig, rig.serving():
        rig.set_work(2, 1)
        eventually(lambda: rig.handed(0) and rig.handed(1))
        (batch,) = rig.handed(0)
        rig.publish(0, rig.ones(), batch=batch)
        rig.publish(1, rig.ones())  # it names no batch
        rig.superstep({0: Action.DROP, 1: Action.DROP})
        eventually(rig.superstep_done)
        eventually(lambda: rig.handed(0) == [batch])
        assert rig.control["requeued_total"] == 1
        assert rig.control["requeued"] == 0


def test_a_refused_gradients_batch_is_answered(job_name: str) -> None:
    """Not one whose header is lost: what that says of a batch is not believed."""
    with Rig(job_name, W, learners=2, ahead=1, collect=True) as rig, rig.serving():
        rig.set_work(3, 1)
        eventually(lambda: rig.handed(0) and rig.handed(1))
        both = [*rig.handed(0), *rig.handed(1)]
        assert sorted(both) == [0, 1]
        lost, refused = both.index(0), both.index(1)
        rig.publish(lost, rig.ones(), batch=0, generation=0)
        rig.publish(refused, rig.ones(), batch=1, flags=layout.CHECKED | layout.NONFINITE)
        rig.superstep({lost: Action.REFUSE, refused: Action.REFUSE})
        eventually(rig.superstep_done)
        eventually(lambda: rig.handed(refused) == [2])
        assert rig.handed(lost) == [0]
        assert rig.control["requeued_total"] == rig.roster[lost]["unasked"] == 0


def test_a_superstep_awaits_the_ring_of_a_newcomer(job_name: str) -> None:
    """A row may have another learner than the one whose ring is known here."""
    with Rig(job_name, W, learners=2, collect=True) as rig, rig.serving():
        rig.publish(0, rig.ones())
        rig.publish(1, rig.ones())
        rig.roster[1]["generation"] = 9
        rig.superstep({0: Action.APPLY, 1: Action.APPLY})
        rig.let_look()
        assert not rig.superstep_done()
        rig.roster[1]["generation"] = 2
        rig.bell()
        eventually(rig.superstep_done)
        np.testing.assert_array_equal(rig.weights, -1.0)


@numba.njit(nogil=True)
def _as_soon_as_counted(
    record: int, number: int, actions: np.ndarray, then: np.ndarray, word: int
) -> None:
    """Publish the next superstep at the first moment at which the manager may."""
    while get(record) != number:
        pass
    actions[:] = then
    put(word, number + 1)


def test_supersteps_in_quick_succession(job_name: str) -> None:
    """The manager may publish the next superstep as soon as all shards have counted the last."""
    many, rounds = 64, 40
    with Rig(job_name, W, learners=many, slots=2, collect=True, spin_us=1e5) as rig, rig.serving():
        assert rig.memory.state
        record = rig.memory.state.word(layout.STATE, "record")
        record += layout.offset(layout.RECORD, "supersteps")
        actions = rig.control["superstep_action"]
        then = np.full(layout.MAX_LEARNERS, Action.SKIP, np.uint32)
        then[0] = Action.APPLY
        rig.control["superstep_upto"][0] = 1
        bad = dict.fromkeys(range(1, many), Action.REFUSE)
        for number in range(1, rounds + 1):
            for row in bad:
                rig.publish(row, rig.ones() * 1000, flags=layout.CHECKED | layout.NONFINITE)
            rig.publish(0, rig.ones())
            rig.control["superstep_upto"][0] = number
            rig.superstep(bad)
            first = int(rig.control["superstep"])
            _as_soon_as_counted(record, first, actions, then, rig.word("superstep"))
            eventually(rig.superstep_done)
            for row in range(many):
                rig.wait_tail(row, number)
        np.testing.assert_array_equal(rig.weights, -rounds)
