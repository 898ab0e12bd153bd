"""Kernels and reference against `torch.optim`, whose semantics they promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import kernel_reference as reference

from gadei_ps.kernels import cpu
from gadei_ps.kernels.optimizers import (
    COEFFICIENTS,
    Kind,
    OptimizerSpec,
    Schedule,
    WireType,
    slots,
)

pytestmark = pytest.mark.usefixtures("compiled")

SIZE = 1500
STEPS = 20

# Twenty steps of some ten roundings each, of weights and slots near 1.
ROUNDING = STEPS * 10 * 2.0**-24


def torch_optimizer(spec: OptimizerSpec, parameter: torch.Tensor) -> torch.optim.Optimizer:
    """Return torch's optimizer of that specification."""
    if spec.kind is Kind.ADD:
        return torch.optim.SGD([parameter], lr=spec.lr, maximize=True)
    shared: dict[str, Any] = {"lr": spec.lr, "weight_decay": spec.weight_decay}
    if spec.kind is Kind.SGD:
        return torch.optim.SGD([parameter], **shared)
    if spec.kind in (Kind.MOMENTUM, Kind.NESTEROV):
        nesterov = spec.kind is Kind.NESTEROV
        return torch.optim.SGD([parameter], momentum=spec.momentum, nesterov=nesterov, **shared)
    if spec.kind is Kind.ADAGRAD:
        return torch.optim.Adagrad([parameter], **shared)
    if spec.kind is Kind.RMSPROP:
        own = {"alpha": spec.alpha, "momentum": spec.momentum}
        return torch.optim.RMSprop([parameter], **own, **shared)
    adam = torch.optim.Adam if spec.kind is Kind.ADAM else torch.optim.AdamW
    return adam([parameter], betas=(spec.beta1, spec.beta2), **shared)


def torch_slots(kind: Kind, state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return what torch keeps, in the order of our slots."""
    names = {
        Kind.SGD: [],
        Kind.MOMENTUM: ["momentum_buffer"],
        Kind.NESTEROV: ["momentum_buffer"],
        Kind.ADAGRAD: ["sum"],
        Kind.ADD: [],
        Kind.RMSPROP: ["square_avg", "momentum_buffer"],
    }
    return [state[name] for name in names.get(kind, ["exp_avg", "exp_avg_sq"])]


def compiled_step(
    spec: OptimizerSpec,
    weights: NDArray[np.float32],
    state: list[NDArray[np.float32]],
    gradient: NDArray[np.float32],
    t: int,
    lr: float,
) -> None:
    """Do what `reference.step` does, with the compiled kernels."""
    coef = np.zeros(COEFFICIENTS)
    cpu.coefficients(int(spec.kind), spec.pack(), lr, t, 0, math.nan, coef)
    nothing = np.empty(0, np.float32)
    s0, s1 = [*state, nothing, nothing][:2]
    cpu.KERNELS[spec.kind](cpu.scalars(coef), weights, s0, s1, gradient)


@pytest.mark.parametrize("step", [reference.step, compiled_step])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("kind", Kind)
def test_twenty_steps_are_those_of_torch(kind: Kind, decay: float, step: Any) -> None:
    """Use gradients from 1e-10, where eps decides, to 10."""
    random = np.random.default_rng(int(kind))
    spec = OptimizerSpec(
        kind, lr=0.03, momentum=0.8, beta1=0.85, beta2=0.99, alpha=0.97, weight_decay=decay
    )
    weights = random.standard_normal(SIZE, np.float32)
    state = [np.zeros(SIZE, np.float32) for _ in range(slots(kind))]
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = torch_optimizer(spec, parameter)
    scale = 10 ** random.uniform(-10, 1, SIZE)
    for t in range(1, STEPS + 1):
        gradient = (random.standard_normal(SIZE) * scale).astype(np.float32)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        step(spec, weights, state, gradient, t, spec.lr)
    assert not np.array_equal(weights, np.zeros(SIZE))
    np.testing.assert_allclose(weights, parameter.detach().numpy(), ROUNDING, ROUNDING)
    for ours, theirs in zip(state, torch_slots(kind, optimizer.state[parameter]), strict=True):
        # Relative to the magnitudes added, for a moment may nearly cancel. Weights reach 4.
        added = scale + 4 * decay
        if kind is Kind.RMSPROP and ours is state[1]:
            added = 10 + 0 * scale  # of gradients over their root, at most 1 / sqrt(1 - alpha)
        squared = kind is Kind.ADAGRAD or ours is state[0 if kind is Kind.RMSPROP else -1]
        squared &= kind not in (Kind.MOMENTUM, Kind.NESTEROV)
        atol = ROUNDING * (added**2 if squared else added)
        assert np.all(np.abs(ours - theirs.numpy()) <= ROUNDING * np.abs(ours) + atol)


def rates_of_torch(make: Any, steps: int, lr: float, **parameters: Any) -> list[float]:
    """Return the learning rates that a scheduler of torch gives in the first steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer, **parameters)
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("rate", [reference.learning_rate, cpu.learning_rate])
class TestSchedules:
    """torch multiplies from step to step, ours are closed forms: float64 rounding adds up."""

    def test_step(self, rate: Any) -> None:
        hyper = OptimizerSpec(
            Kind.SGD, lr=0.7, schedule=Schedule.STEP, step_size=7, step_gamma=0.3
        ).pack()
        wanted = rates_of_torch(torch.optim.lr_scheduler.StepLR, 50, 0.7, step_size=7, gamma=0.3)
        assert [rate(hyper, t) for t in range(50)] == pytest.approx(wanted, rel=1e-12)

    def test_cosine(self, rate: Any) -> None:
        hyper = OptimizerSpec(
            Kind.SGD, lr=0.7, schedule=Schedule.COSINE, total_steps=40, min_lr=0.01
        ).pack()
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR
        wanted = rates_of_torch(cosine, 41, 0.7, T_max=40, eta_min=0.01)
        assert [rate(hyper, t) for t in range(41)] == pytest.approx(wanted, rel=1e-11)

    def test_warm_up(self, rate: Any) -> None:
        hyper = OptimizerSpec(Kind.SGD, lr=0.7, warmup_steps=10).pack()
        linear = torch.optim.lr_scheduler.LinearLR
        wanted = rates_of_torch(linear, 15, 0.7, start_factor=0.1, total_iters=9)
        assert [rate(hyper, t) for t in range(15)] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("wire_type", [WireType.BFLOAT16, WireType.FLOAT16])
@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_encoding_is_that_of_torch(wire_type: WireType, seed: int) -> None:
    """Encode any bits of a float32; a NaN stays one."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2**32, 4000, dtype=np.uint32)
    # Ties, which random bits hardly ever are.
    bits[:1000] = (bits[:1000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    bits[1000:2000] = (bits[1000:2000] & np.uint32(0x87FFE000)) | np.uint32(0x38001000)
    values = bits.view(np.float32)
    half = torch.bfloat16 if wire_type is WireType.BFLOAT16 else torch.float16
    wanted = torch.from_numpy(values.copy()).to(half).view(torch.int16).numpy().view(np.uint16)
    got = reference.encode(wire_type, values)
    number = ~np.isnan(values)
    assert np.array_equal(got[number], wanted[number])
    assert np.all(np.isnan(reference.decode(wire_type, got)[~number]))
