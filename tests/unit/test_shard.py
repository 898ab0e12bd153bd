"""Shards on a job's real segments: applying, refusing, counting, leaving."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Rig, eventually
from support import kernel_reference as reference

from gadei_ps import _native
from gadei_ps.errors import GadeiError
from gadei_ps.job import sync_change
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec, WireType, slots
from gadei_ps.memory import layout, totals
from gadei_ps.memory.layout import (
    IDLE,
    Action,
    FrameKind,
    Mode,
    Reason,
    Role,
)
from gadei_ps.memory.weights import Tensor
from gadei_ps.server.statistics import staleness_bin

pytestmark = pytest.mark.usefixtures("compiled")

KINDS = [kind.name.lower() for kind in Kind]
W = [Tensor("w", (10,))]


def noise(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


# -- applying -------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> list[Tensor]:
    sizes = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=3))
    buffers = draw(st.lists(st.integers(1, 2000), max_size=2))
    return [Tensor(f"p{at}", (size,)) for at, size in enumerate(sizes)] + [
        Tensor(f"b{at}", (size,), Role.BUFFER) for at, size in enumerate(buffers)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_as_the_reference(kind: str, job_name: str) -> None:
    @settings(max_examples=12, deadline=None)
    @given(
        tensors=models(),
        wires=st.lists(st.sampled_from(WireType), min_size=1, max_size=4),
        shards=st.integers(1, 4),
        depth=st.integers(1, 3),
        decay=st.sampled_from([0.0, 0.01]),
        warmup=st.integers(0, 3),
        clip=st.sampled_from([0.0, 5.0]),
        seed=st.integers(0, 2**32),
    )
    def holds(
        tensors: list[Tensor],
        wires: list[WireType],
        shards: int,
        depth: int,
        decay: float,
        warmup: int,
        clip: float,
        seed: int,
    ) -> None:
        optimizer = {
            "kind": kind,
            "lr": 0.05,
            "momentum": 0.8,
            "weight_decay": decay,
            "clip_norm": clip,
            "schedule": {"warmup_steps": warmup},
        }
        spec = OptimizerSpec(
            Kind[kind.upper()],
            lr=0.05,
            momentum=0.8,
            weight_decay=decay,
            warmup_steps=warmup,
            clip_norm=clip,
        )
        values = {one.name: noise(seed + at, one.count) for at, one in enumerate(tensors)}
        with Rig(
            job_name, tensors, values, shards=shards, slots=depth, optimizer=optimizer, learners=2
        ) as rig:
            moved = slice(0, rig.model.parameters)
            added = slice(rig.model.parameters, None)
            expected = rig.weights.copy()
            state = [np.zeros(rig.model.parameters, np.float32) for _ in range(slots(spec.kind))]
            with rig.serving():
                for t, wire in enumerate(wires):
                    raw = reference.encode(wire, noise(seed + 100 + t, rig.model.elements))
                    scale = np.float32(1.0 - 0.25 * t)
                    g = reference.decode(wire, raw)
                    squares = float(np.square(g[moved], dtype=np.float64).sum())
                    rig.apply(t % 2, raw, wire=wire, rate_scale=scale, squares=squares)
                    g[moved] *= np.float32(reference.clip_scale(spec.pack(), squares))
                    rate = reference.learning_rate(spec.pack(), t) * float(scale)
                    reference.step(spec, expected[moved], state, g[moved], t + 1, rate)
            # Gradients over the root of their squares: of small ones the roundings show.
            rooted = kind == "rmsprop"
            close = {"rtol": 1e-3, "atol": 1e-3} if rooted else {"rtol": 2e-5, "atol": 2e-6}
            np.testing.assert_allclose(rig.weights, expected, **close)
            for mine, wanted in zip(rig.slots, state, strict=True):
                np.testing.assert_allclose(mine[moved], wanted, **close)
                assert not mine[added].any(), "buffers have no optimizer state"
            assert int(rig.control["version"]) == len(wires)
            records = rig.state["record"][: rig.shards]
            assert (records["steps"] == len(wires)).all()
            assert (records["cursor"] == IDLE).all()
            assert not (rig.control["shard"]["sequence"][: rig.shards] % 2).any()

    holds()


def test_staleness_aware_rate(job_name: str) -> None:
    optimizer = {"kind": "sgd", "lr": 12.0, "staleness_aware": True}
    with Rig(job_name, W, optimizer=optimizer) as rig, rig.serving():
        for version, sum_of_rates in [(0, 12), (0, 24), (0, 30), (0, 34), (4, 46), (9, 58)]:
            rig.apply(0, rig.ones(), version=version)
            np.testing.assert_array_equal(rig.weights, -sum_of_rates)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "adam", "adamw", "rmsprop"])
@pytest.mark.parametrize("compensation", [True, False])
def test_stale_gradients_are_compensated(job_name: str, kind: str, compensation: bool) -> None:
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.8, "spike_compensation": compensation}
    optimizer = {"kind": kind, **settings}
    spec = OptimizerSpec(Kind[kind.upper()], **settings)
    with Rig(job_name, W, optimizer=optimizer) as rig, rig.serving():
        expected = rig.weights.copy()
        state = [np.zeros_like(expected) for _ in range(slots(spec.kind))]
        # The last learner says that it has pulled what is not there yet.
        for t, version in enumerate([0, 0, 2, 0, 4, 1, 2**64 - 1]):
            gradient = noise(t, expected.size)
            rig.apply(0, gradient, version=version)
            stale = max(0, t - version)
            reference.step(spec, expected, state, gradient, t + 1, 0.05, stale)
            np.testing.assert_allclose(rig.weights, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "adam", "adamw", "rmsprop"])
def test_momentum_that_travels_with_a_gradient(job_name: str, kind: str) -> None:
    """It counts for this gradient; one that says none has the job's."""
    spec = OptimizerSpec(Kind[kind.upper()], lr=0.05)
    optimizer = {"kind": kind, "lr": 0.05, "momentum": spec.momentum}
    with Rig(job_name, W, optimizer=optimizer) as rig, rig.serving():
        expected = rig.weights.copy()
        state = [np.zeros_like(expected) for _ in range(slots(spec.kind))]
        for t, momentum in enumerate([0.5, None, 0.95, 0.25, None]):
            gradient = noise(t, expected.size)
            rig.apply(0, gradient, **({} if momentum is None else {"momentum": momentum}))
            own = spec
            if momentum is not None:
                own = dataclasses.replace(spec, momentum=momentum, beta1=momentum)
            reference.step(own, expected, state, gradient, t + 1, 0.05)
            np.testing.assert_allclose(rig.weights, expected, rtol=2e-5, atol=2e-6)


# -- refusing -------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], Reason]] = [
    ({"kind": 0}, Reason.BAD_KIND),
    ({"kind": 2**32 - 1}, Reason.BAD_KIND),
    ({"dtype": 0}, Reason.BAD_DTYPE),
    ({"dtype": 4}, Reason.BAD_DTYPE),
    ({"momentum": -0.1}, Reason.BAD_SCALE),
    ({"momentum": 1.0}, Reason.BAD_SCALE),
    ({"momentum": np.inf}, Reason.BAD_SCALE),
    ({"payload_bytes": 0}, Reason.BAD_SIZE),
    ({"payload_bytes": 2**64 - 1}, Reason.BAD_SIZE),
    ({"dtype": WireType.FLOAT16}, Reason.BAD_SIZE),
    ({"generation": 0}, Reason.BAD_GENERATION),
    ({"generation": 2}, Reason.BAD_GENERATION),
    ({"sequence": 2**63}, Reason.BAD_SEQUENCE),
    ({"flags": 0}, Reason.UNCHECKED),
    ({"flags": layout.CHECKED | layout.NONFINITE}, Reason.NOT_FINITE),
    ({"rate_scale": -1.0}, Reason.BAD_SCALE),
    ({"rate_scale": math.nan}, Reason.BAD_SCALE),
    ({"rate_scale": math.inf}, Reason.BAD_SCALE),
    ({"kind": FrameKind.ASSIGN, "stream": 1}, Reason.BAD_ASSIGN),
    ({"kind": FrameKind.ASSIGN, "stream": 3}, Reason.BAD_ASSIGN),
    ({"kind": FrameKind.ASSIGN, "steps": 2**63}, Reason.BAD_ASSIGN),
]


@pytest.mark.parametrize("shards", [1, 3])
def test_bad_frames_never_reach_the_weights(shards: int, job_name: str) -> None:
    with Rig(job_name, [Tensor("w", (5000,))], shards=shards, learners=2) as rig, rig.serving():
        for count, (fields, reason) in enumerate(BAD, 1):
            rig.apply(0, np.full(rig.model.elements, np.nan, np.float32), **fields)
            assert int(rig.roster[0]["reason"]) == reason, fields
            assert int(rig.roster[0]["refused"]) == count
            assert not rig.weights.any()
        rig.apply(0, rig.ones())
        rig.apply(1, rig.ones())
        np.testing.assert_array_equal(rig.weights, -2.0)
        assert int(rig.control["version"]) == 2
        assert int(rig.roster[0]["applied"]) == int(rig.roster[1]["applied"]) == 1
        assert int(rig.roster[1]["refused"]) == 0


def test_every_reason_is_tested() -> None:
    # Rows in test_rows.py, torn frames in crash/test_damaged_rings.py.
    others = {Reason.OK, Reason.ABANDONED, Reason.BAD_ROWS, Reason.TORN}
    assert {reason for _, reason in BAD} == set(Reason) - others


def test_what_is_given_up_is_dropped(job_name: str) -> None:
    with Rig(job_name, W, shards=2) as rig, rig.serving():
        rig.apply(0, rig.ones(), kind=FrameKind.EMPTY, payload_bytes=0)
        entry = rig.roster[0]
        assert (int(entry["dropped"]), int(entry["refused"]), int(entry["applied"])) == (1, 0, 0)
        assert not rig.weights.any()
        rig.apply(0, rig.ones(), kind=FrameKind.EMPTY, payload_bytes=0, blocks=1)  # it was computed
        runs = rig.state["runs"][0]
        assert [(int(one["action"]), int(one["censored"])) for one in runs[:2]] == [
            (Action.DROP, 1),
            (Action.DROP, 0),
        ]


def test_times_of_the_last_iterations_are_kept(job_name: str) -> None:
    with Rig(job_name, W) as rig, rig.serving():
        for number in range(layout.RUNS + 3):
            rig.apply(0, rig.ones(), started=float(number), finished=number + 0.5)
        runs = rig.state["runs"][0]
        first = layout.RUNS + 3 - layout.RUNS
        for number in range(first, layout.RUNS + 3):
            run = runs[number % layout.RUNS]
            assert int(run["sequence"]) == number + 1
            assert (float(run["started"]), float(run["finished"])) == (number, number + 0.5)
            assert int(run["action"]) == Action.APPLY


def test_nonfinite_where_the_job_allows_it(job_name: str) -> None:
    with Rig(job_name, W, nonfinite="allow") as rig, rig.serving():
        rig.apply(0, rig.ones() * np.inf, flags=layout.CHECKED | layout.NONFINITE)
        np.testing.assert_array_equal(rig.weights, -np.inf)


# -- counting -------------------------------------------------------------------------------------


def test_statistics(job_name: str) -> None:
    with Rig(job_name, W, learners=2) as rig, rig.serving():
        times = {"started": 1.0, "finished": 2.0}
        rig.apply(0, rig.ones(), samples=3, loss=2.5, clock=7, version=5, squares=6.25, **times)
        for _ in range(40):
            rig.apply(1, rig.ones(), version=0, samples=2)
        first, second = rig.roster[0], rig.roster[1]
        assert (first["samples"], first["loss"], first["clock"]) == (3, 2.5, 7)
        assert first["version"] == 5  # it is from the future: not stale
        assert (first["started"], first["finished"], first["norm"]) == (1.0, 2.0, 2.5)
        assert (first["applied"], first["staleness_max"]) == (1, 0)
        assert (second["applied"], second["samples"]) == (40, 80)
        assert second["staleness_max"] == 40
        assert second["staleness_sum"] == sum(range(1, 41))
        bins = np.bincount([staleness_bin(s) for s in range(1, 41)], minlength=layout.HISTOGRAM)
        np.testing.assert_array_equal(second["histogram"], bins)
        assert first["histogram"][0] == 1


def test_losses_are_added_up(job_name: str) -> None:
    """Leave out those that are not finite, or so large that a sum of them would not be."""
    losses = [2.5, -0.25, np.nan, np.inf, 1e200, 0.1]
    with Rig(job_name, W, learners=2) as rig, rig.serving():
        for loss in losses:
            rig.apply(0, rig.ones(), loss=loss)
        rig.apply(1, rig.ones(), loss=math.nan)
        rows = rig.roster
        assert (rows[0]["loss_count"], rows[0]["loss_sum"]) == (3, 2.5 - 0.25 + 0.1)
        assert (rows[1]["loss_count"], rows[1]["loss_sum"]) == (0, 0.0)
        rows[0]["wanted"] = 0
        rig.bell()
        eventually(lambda: rows[0]["drained"])
        assert (rows[0]["loss_count"], rows[0]["loss_sum"]) == (0, 0.0)
        control = rig.control
        assert (control["past_loss_count"], control["past_loss_sum"]) == (3, 2.5 - 0.25 + 0.1)
        assert rig.memory.state
        state = rig.memory.state.view(layout.STATE)
        assert totals.losses(control, state) == (3, 2.5 - 0.25 + 0.1)


def test_histogram_bins() -> None:
    assert [staleness_bin(s) for s in range(16)] == list(range(16))
    assert staleness_bin(16) == staleness_bin(31) == 16
    assert staleness_bin(32) == staleness_bin(63) == 17
    assert staleness_bin(np.uint64(2**63)) == layout.HISTOGRAM - 1


# -- leaving, pausing, holding --------------------------------------------------------------------


def test_what_a_dead_learner_has_published_is_applied(job_name: str) -> None:
    with Rig(job_name, W, learners=1, slots=4) as rig:
        for _ in range(4):
            rig.publish(0, rig.ones(), samples=1)
        counts = ("applied", "dropped", "refused", "samples")
        rig.roster[0]["dropped"], rig.roster[0]["refused"] = 2, 3
        rig.roster[0]["wanted"] = 0
        with rig.serving():
            eventually(lambda: rig.roster[0]["drained"])
        np.testing.assert_array_equal(rig.weights, -4.0)
        assert [int(rig.control[f"past_{what}"]) for what in counts] == [4, 2, 3, 4]
        assert [int(rig.roster[0][what]) for what in counts] == [0, 0, 0, 0]


def test_a_ring_that_is_not_served_yet_is_not_read(job_name: str) -> None:
    """Check `applied` of its row, which holds another learner's."""
    with Rig(job_name, W) as rig:
        rig.publish(0, rig.ones())
        rig.roster[0]["served"] = 9
        with rig.serving():
            rig.let_look()
            np.testing.assert_array_equal(rig.weights, 0.0)
            rig.roster[0]["served"] = 1
            rig.board["table_version"] += 1
            rig.bell()
            rig.wait_applied(0, 0)
        np.testing.assert_array_equal(rig.weights, -1.0)


def test_a_retired_learner_does_not_depart_again(job_name: str) -> None:
    """Give its entry to the next learner, which the manager of this process has not read yet."""
    with Rig(job_name, W, ahead=1) as rig:
        entry = rig.roster[0]
        entry["retired"], entry["wanted"], entry["generation"] = 1, 9, 9
        entry["applied"] = 5
        with rig.serving():
            rig.let_look()
        assert (entry["drained"], entry["applied"], rig.control["past_applied"]) == (0, 5, 0)


def test_shards_say_which_mode_they_obey(job_name: str) -> None:
    """The manager changes the model of synchronization once all have said so."""
    with Rig(job_name, [Tensor("w", (1000,))], shards=2) as rig, rig.serving():
        assert rig.shards == 2
        obeyed = rig.control["shard"]["mode"][:2]
        for number, mode in enumerate((Mode.HOLD, Mode.ON_ARRIVAL, Mode.HOLD, Mode.ON_ARRIVAL)):
            before = rig.weights.copy()
            word = sync_change.set_mode(rig.memory.control, number, mode)
            rig.let_look()
            assert obeyed[0] == word
            eventually(lambda word=word: (obeyed == word).all())
            if mode == Mode.HOLD:
                sequence = rig.publish(0, rig.ones())
                rig.let_look()
                np.testing.assert_array_equal(rig.weights, before)
            else:
                rig.wait_applied(0, sequence)
        np.testing.assert_array_equal(rig.weights, -2.0)


def test_a_new_request_is_counted_once(job_name: str) -> None:
    """The manager looks for requests once the count has changed."""
    with Rig(job_name, W) as rig, rig.serving():
        rig.let_look()
        assert rig.board["requests"] == 1  # what the rig's learner wants
        for count, wants in enumerate((layout.WANTS_PAUSE, layout.WANTS_TURN), 2):
            rig.ring(0)["wants"] = wants
            rig.let_look()
            assert rig.board["requests"] == count


def test_pause(job_name: str) -> None:
    with Rig(job_name, [Tensor("w", (3000,))], shards=2) as rig, rig.serving():
        _native.store(rig.word("pause"), layout.UNBOUNDED)
        rig.let_look()
        assert rig.control["shard"]["parked"][0]
        eventually(lambda: rig.control["shard"]["parked"][:2].all())
        sequence = rig.publish(0, rig.ones())
        beats = rig.control["shard"]["heartbeat"][:2].copy()
        eventually(lambda: (rig.control["shard"]["heartbeat"][:2] > beats + 2).all())
        assert not rig.weights.any()
        _native.store(rig.word("pause"), 0)
        rig.bell()
        rig.wait_applied(0, sequence)
        np.testing.assert_array_equal(rig.weights, -1.0)
        assert not rig.control["shard"]["parked"].any()


def test_a_pull_that_never_ends_holds_nobody_up_for_ever(job_name: str) -> None:
    with Rig(job_name, W, learners=2) as rig, rig.serving():
        rig.ring(0)["hold"] = 1
        for _ in range(20):
            rig.apply(1, rig.ones())
        np.testing.assert_array_equal(rig.weights, -20.0)


def test_rows_are_taken_again(job_name: str) -> None:
    """A new generation in a row begins with frame 0, whatever the old one has left in its words."""
    with Rig(job_name, W) as rig, rig.serving():
        for generation in (2, 3, 4):
            rig.apply(0, rig.ones())
            rig.roster[0]["wanted"] = 0
            rig.bell()
            eventually(lambda: rig.roster[0]["drained"])
            rig.forget(0)
            rig.roster[0]["drained"] = 0
            rig.add(0, generation)
        rig.apply(0, rig.ones(), generation=3)
        assert rig.roster[0]["reason"] == Reason.BAD_GENERATION
        np.testing.assert_array_equal(rig.weights, -3.0)


def test_the_rig_refuses_what_a_job_would(job_name: str) -> None:
    with pytest.raises(GadeiError), Rig(job_name, []):
        pass
