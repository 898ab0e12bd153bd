"""Settings of an optimizer: checks, packing, learning rates."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import kernel_reference as reference

from gadei_ps.kernels import cpu
from gadei_ps.kernels.optimizers import (
    COEFFICIENTS,
    KIND,
    LR,
    PACKED,
    STALENESS_AWARE,
    WARMUP_STEPS,
    Kind,
    OptimizerSpec,
    Schedule,
    slots,
)

pytestmark = pytest.mark.usefixtures("compiled")


@st.composite
def specs(draw: st.DrawFn) -> OptimizerSpec:
    """Any specification that is accepted."""
    lr = draw(st.just(0.0) | st.floats(1e-44, 10))
    kind = draw(st.sampled_from(Kind))
    # Where the one is kept, the other has its default.
    squares = "alpha" if kind is Kind.RMSPROP else "beta2"
    warmup = draw(st.integers(0, 1000))
    return OptimizerSpec(
        kind,
        lr=lr,
        momentum=draw(st.floats(0.01, 0.99)),
        beta1=draw(st.floats(0, 0.99)),
        **{squares: draw(st.floats(0, 0.9999))},
        eps=draw(st.none() | st.floats(1e-20, 1)),
        weight_decay=draw(st.floats(0, 1)),
        schedule=draw(st.sampled_from(Schedule)),
        warmup_steps=warmup,
        step_size=draw(st.integers(1, 1000)),
        step_gamma=draw(st.floats(0.01, 2)),
        total_steps=warmup + draw(st.integers(1, 1000)),
        min_lr=lr * draw(st.floats(0, 1)),
        staleness_aware=draw(st.booleans()),
        spike_compensation=draw(st.booleans()),
    )


MANY_STEPS = OptimizerSpec(
    Kind.SGD, lr=1.53125, schedule=Schedule.STEP, step_size=1, step_gamma=0.8082354574566509
)
ENDLESS = OptimizerSpec(Kind.SGD, lr=0.0, schedule=Schedule.STEP, step_size=1, step_gamma=2.0)


@settings(deadline=None)
@given(spec=specs(), t=st.integers(0, 3000))
@example(spec=MANY_STEPS, t=1939)
@example(spec=ENDLESS, t=1024)
def test_compiled_learning_rate_is_the_reference(spec: OptimizerSpec, t: int) -> None:
    """Compare to the rounding of a few float64 operations and of two mathematical libraries."""
    hyper = spec.pack()
    wanted = reference.learning_rate(hyper, t)
    assert cpu.learning_rate(hyper, t) == pytest.approx(wanted, rel=1e-13, abs=1e-300)
    if math.isfinite(wanted):
        assert spec.rate(t) == pytest.approx(wanted, rel=1e-13, abs=1e-300)
    else:
        with pytest.raises(OverflowError):
            spec.rate(t)


@pytest.mark.parametrize("rate", [reference.learning_rate, cpu.learning_rate])
def test_warm_up_then_schedule(rate: Any) -> None:
    constant = OptimizerSpec(Kind.SGD, lr=1.0, warmup_steps=4).pack()
    assert [rate(constant, t) for t in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    step = OptimizerSpec(
        Kind.SGD, lr=1.0, warmup_steps=2, schedule=Schedule.STEP, step_size=3, step_gamma=0.5
    ).pack()
    assert [rate(step, t) for t in range(9)] == [0.5, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25]
    cosine = OptimizerSpec(
        Kind.SGD, lr=1.0, warmup_steps=2, schedule=Schedule.COSINE, total_steps=6, min_lr=0.5
    ).pack()
    assert [rate(cosine, t) for t in (0, 1, 2, 4, 6, 7, 1000)] == [0.5, 1, 1, 0.75, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("rate", [reference.stale_rate, cpu.stale_rate])
def test_stale_gradients_count_less_where_asked_for(rate: Any) -> None:
    aware = OptimizerSpec(Kind.SGD, staleness_aware=True).pack()
    assert [rate(aware, 1.0, s) for s in (0, 1, 2, 10)] == [1, 1, 0.5, 0.1]
    unaware = OptimizerSpec(Kind.SGD).pack()
    assert [rate(unaware, 1.0, s) for s in (0, 1, 2, 10)] == [1, 1, 1, 1]


@given(spec=specs())
def test_packing_keeps_every_field(spec: OptimizerSpec) -> None:
    hyper = spec.pack()
    assert hyper.shape == (PACKED,)
    assert hyper.dtype == np.float64
    again = OptimizerSpec.unpack(hyper)
    assert again == spec
    assert isinstance(again.kind, Kind)
    assert isinstance(again.warmup_steps, int)
    assert isinstance(again.staleness_aware, bool)
    assert isinstance(again.spike_compensation, bool)


@pytest.mark.parametrize(
    ("index", "value", "field"),
    [
        (KIND, 0, "kind"),
        (KIND, 1.5, "kind"),
        (KIND, np.nan, "kind"),
        (LR, np.nan, "lr"),
        (WARMUP_STEPS, 0.5, "warmup_steps"),
        (STALENESS_AWARE, 2, "staleness_aware"),
    ],
)
def test_unpacking_refuses_what_no_specification_has(index: int, value: float, field: str) -> None:
    hyper = OptimizerSpec(Kind.SGD).pack()
    hyper[index] = value
    with pytest.raises(ValueError, match=rf"^{field} "):
        OptimizerSpec.unpack(hyper)


def test_unpacking_refuses_another_shape_or_type() -> None:
    with pytest.raises(ValueError, match="hyper"):
        OptimizerSpec.unpack(np.zeros(PACKED - 1))
    with pytest.raises(ValueError, match="hyper"):
        OptimizerSpec.unpack(np.zeros(PACKED, np.float32))


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("kind", 0, {}),
        ("kind", "SGD", {}),
        ("lr", -0.1, {}),
        ("lr", float("inf"), {}),
        ("lr", "0.1", {}),
        ("lr", True, {}),
        ("momentum", 1.0, {}),
        ("momentum", -0.1, {}),
        ("momentum", 0.0, {"kind": Kind.NESTEROV}),
        ("beta1", 1.0, {}),
        ("beta2", float("nan"), {}),
        ("alpha", 1.0, {"kind": Kind.RMSPROP}),
        ("eps", 0.0, {}),
        ("eps", 1e-40, {}),
        ("weight_decay", -1e-9, {}),
        ("schedule", 4, {}),
        ("warmup_steps", -1, {}),
        ("warmup_steps", 1.0, {}),
        ("warmup_steps", 2**53 + 1, {}),
        ("step_size", 0, {"schedule": Schedule.STEP}),
        ("step_gamma", 0.0, {}),
        ("total_steps", 5, {"schedule": Schedule.COSINE, "warmup_steps": 5}),
        ("min_lr", 0.2, {"lr": 0.1}),
        ("min_lr", -0.2, {}),
        ("staleness_aware", 1, {}),
        ("spike_compensation", 1, {}),
        # What float32 does not hold.
        *((name, 1e39, {}) for name in ("lr", "eps", "weight_decay", "step_gamma", "clip_norm")),
        ("lr", 10**400, {}),
        ("lr", 1e-50, {}),
        ("min_lr", 1e39, {"lr": 1.0}),
        *((name, 1 - 1e-9, {}) for name in ("momentum", "beta1", "beta2", "alpha")),
        ("lr", 1e38, {"kind": Kind.ADAM}),
        ("lr", 1e20, {"kind": Kind.ADAMW, "weight_decay": 1e20}),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object, others: dict[str, Any]) -> None:
    values: dict[str, Any] = {"kind": Kind.SGD, **others, field: value}
    with pytest.raises(ValueError, match=rf"^{field} must be"):
        OptimizerSpec(**values)


def test_the_largest_rate_keeps_all_factors_finite() -> None:
    for kind in Kind:
        spec = OptimizerSpec(kind, weight_decay=10.0)
        hyper = replace(spec, lr=spec.most_lr).pack()
        out = np.empty(COEFFICIENTS)
        cpu.coefficients(kind, hyper, hyper[LR], 1, 0, math.nan, out)
        with np.errstate(over="raise"):
            assert np.isfinite(out.astype(np.float32)).all()


def test_defaults_of_eps_are_those_of_torch() -> None:
    assert OptimizerSpec(Kind.ADAGRAD).eps == 1e-10
    assert OptimizerSpec(Kind.ADAM).eps == 1e-8
    assert OptimizerSpec(Kind.ADAMW).eps == 1e-8
    assert OptimizerSpec(Kind.RMSPROP).eps == 1e-8
    assert OptimizerSpec(Kind.ADAM, eps=1e-3).eps == 1e-3


def test_slots_of_each_kind() -> None:
    assert [slots(kind) for kind in Kind] == [0, 1, 1, 1, 2, 2, 0, 2]
    with pytest.raises(ValueError, match="99"):
        slots(99)


def test_naming_an_optimizer_loads_no_compiler() -> None:
    program = "import sys, gadei_ps.kernels.optimizers; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
