"""Code of scripts around a step: equal to plain torch, or refused."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import PATIENCE_S, daemon, status
from support.torch_models import data, plain_model
from support.torch_models import one_thread as one_thread
from torch import nn
from torch.optim import lr_scheduler

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import Optimizer

STEPS = 60
MOMENTUM = {"lr": 0.05, "momentum": 0.8}
Train = Callable[[nn.Module, Any], None]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, targets in data(STEPS):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()


def with_grad_scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The tenth gradient overflows: that step is left out, and the scale becomes smaller."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)
    for number, (inputs, targets) in enumerate(data(STEPS)):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        scaler.scale(loss * (torch.inf if number == 9 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**11


def with_autocast(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, targets in data(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()


def with_two_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two calls of backward(), and two batches for each step."""
    for inputs, targets in data(STEPS):
        for part in (slice(0, 8), slice(8, 16)):
            outputs = model(inputs[part])
            nn.functional.cross_entropy(outputs, targets[part]).backward(retain_graph=True)
            (0.01 * outputs.square().mean()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def with_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, targets in data(STEPS):

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            loss.backward()
            return loss.item()

        assert isinstance(optimizer.step(closure), float)


def keeping_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Share memory with the gradients, as some models do."""
    for inputs, targets in data(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, inputs, targets).backward()
        optimizer.step()


MOVING: dict[str, Callable[[Any], Any]] = {
    "one cycle, as usual": lambda one: lr_scheduler.OneCycleLR(one, 0.02, total_steps=STEPS),
    "cycles, as usual": lambda one: lr_scheduler.CyclicLR(one, 0.001, 0.01, 8),
}
"""They move the momentum, too."""
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda one: lr_scheduler.LinearLR(one, 0.1, total_iters=20),
    "sequence": lambda one: lr_scheduler.SequentialLR(
        one,
        [lr_scheduler.ConstantLR(one, 0.1, 10), lr_scheduler.ExponentialLR(one, 0.95)],
        milestones=[10],
    ),
    "chained": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(one, 0.1, total_iters=20), lr_scheduler.ExponentialLR(one, 0.97)]
    ),
    "restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 7, 2),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, STEPS),
    "polynomial": lambda one: lr_scheduler.PolynomialLR(one, STEPS, 2.0),
    "one cycle": lambda one: lr_scheduler.OneCycleLR(
        one, 0.2, total_steps=STEPS, cycle_momentum=False
    ),
    "cycles": lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.1, 8, cycle_momentum=False),
    **MOVING,
}


def by_schedule(name: str) -> Train:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scheduler = SCHEDULES[name](optimizer)
        for inputs, targets in data(STEPS):
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
            scheduler.step()

    return train


def on_plateau(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    for number, (inputs, targets) in enumerate(data(STEPS)):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        scheduler.step(number // 20)  # no better for a long time
    assert optimizer.param_groups[0]["lr"] < MOMENTUM["lr"] / 8


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, (inputs, targets) in enumerate(data(STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number / 10)
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()


WAYS: dict[str, Train] = {
    "grad scaler": with_grad_scaler,
    "autocast": with_autocast,
    "two losses": with_two_losses,
    "closure": with_closure,
    "gradients of zero": keeping_gradients,
    "plateau": on_plateau,
    "rate by hand": by_hand,
    **{f"schedule: {name}": by_schedule(name) for name in SCHEDULES},
}


def same(model: nn.Module, twin: nn.Module, tolerance: float = 1e-4) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance / 10, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_as_torch(way: str, job_name: str) -> None:
    model, twin = plain_model(), plain_model()
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, like=torch.optim.SGD, wait=True, **MOMENTUM)
        WAYS[way](model, optimizer)
        WAYS[way](twin, torch.optim.SGD(twin.parameters(), **MOMENTUM))
        # Products in bfloat16 round one way or the other where float32 differs in the last bit.
        same(model, twin, 0.05 if way == "autocast" else 1e-4)
        assert not status(job_name)["gradients_refused"]
        optimizer.close()


@pytest.mark.parametrize("kind", ["SGD", "Nesterov", "Adam", "AdamW", "RMSprop"])
@pytest.mark.parametrize("schedule", MOVING)
def test_schedulers_that_move_the_momentum(schedule: str, kind: str, job_name: str) -> None:
    """Move the momentum of two equal groups."""
    made: Any = torch.optim.SGD if kind == "Nesterov" else getattr(torch.optim, kind)
    rest: dict[str, Any] = {"lr": 0.01}
    if kind in ("SGD", "Nesterov", "RMSprop"):
        rest["momentum"] = 0.8
    if kind == "Nesterov":
        rest["nesterov"] = True

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        weights, biases = [], []
        for name, one in model.named_parameters():
            (biases if name.endswith("bias") else weights).append(one)
        optimizer: torch.optim.Optimizer = made(
            [{"params": weights, "weight_decay": 0.01}, {"params": biases}], **rest
        )
        return optimizer

    model, twin = plain_model(), plain_model()
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, like=optimizer_of(model), wait=True)
        by_schedule(schedule)(model, optimizer)
        theirs = optimizer_of(twin)
        by_schedule(schedule)(twin, theirs)
        # Torch's own RMSprop makes 2e-4 of a difference of 1e-7 here.
        same(model, twin, 2e-3 if kind == "RMSprop" else 1e-4)
        for mine, other in zip(optimizer.param_groups, theirs.param_groups, strict=True):
            name = "momentum" if "momentum" in rest else "betas"
            assert mine[name] == other[name]
        optimizer.close()


def test_one_momentum_for_all_groups(job_name: str) -> None:
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(
            plain_model(), job_name, kind="adam", groups=[{"params": "*.bias", "lr": 0.1}]
        )
        optimizer.param_groups[0]["betas"] = (0.5, 0.999)
        with pytest.raises(UsageError, match="one value for all groups"):
            optimizer.step()
        optimizer.param_groups[1]["betas"] = (0.5, 0.9)
        with pytest.raises(UsageError, match=r"\['betas'\] was set to \(0\.5, 0\.9\), and the job"):
            optimizer.step()
        optimizer.param_groups[1]["betas"] = (1.5, 0.999)
        with pytest.raises(UsageError, match="set a number from 0 on, below 1"):
            optimizer.step()
        optimizer.param_groups[1]["betas"] = [0.5, 0.999]
        optimizer.step()
        optimizer.close()


class Pictures(nn.Module):
    """Channels last, and a weight that is a transposed view of other memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 6, 3)
        self.conv = self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.out = nn.Parameter(torch.randn(3, 24).t())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pictures = inputs[:, :1, None, None].expand(-1, 3, 4, 4) * inputs[:, 1:5, None].unsqueeze(1)
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        inner: torch.Tensor = self.conv(pictures).relu()
        return inner.flatten(1) @ self.out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "how", [{"view": False}, {"wait": True}, {"free_gradients": True}], ids=str
)
def test_memory_formats(how: dict[str, bool], dtype: torch.dtype, job_name: str) -> None:
    model = Pictures().to(dtype)
    twin = copy.deepcopy(model)
    assert not model.conv.weight.is_contiguous()
    assert not model.out.is_contiguous()
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(
            model, job_name, like=torch.optim.SGD, **{"wait": True, **how}, **MOMENTUM
        )
        for inputs, targets in data(STEPS):
            for one, by in ((model, optimizer), (twin, None)):
                one.zero_grad()
                loss_of(one, inputs.to(dtype), targets).backward()
                if by is not None:
                    by.step()
            step(twin)
        same(model, twin)
        optimizer.assign(twin.state_dict())
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, theirs.float().to(dtype))
        optimizer.close()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, theirs.float().to(dtype))


def step(model: nn.Module) -> None:
    """SGD with momentum, its state kept on the model."""
    if not hasattr(model, "by"):
        model.by = torch.optim.SGD(model.parameters(), **MOMENTUM)
    model.by.step()


def test_a_scaler_where_every_batch_needs_a_step(job_name: str) -> None:
    with daemon(job_name, optimizer={}):
        model = plain_model()
        optimizer = Optimizer(model, job_name, like=torch.optim.SGD, **MOMENTUM)
        scaler = torch.amp.GradScaler("cpu")
        batches = optimizer.batches(12, 4, 1)
        next(batches)
        scaler.scale(model(torch.ones(4, 10)).sum() * torch.inf).backward()
        scaler.step(optimizer)  # leaves it out
        with pytest.raises(UsageError, match=r"step\(\) was not called for a batch"):
            next(batches)
        optimizer.close()


def test_a_scaler_where_gradients_leave_at_once(job_name: str) -> None:
    """Torch itself refuses: it finds no gradient to scale back."""
    with daemon(job_name, optimizer={}):
        model = plain_model()
        before = copy.deepcopy(model)
        optimizer = Optimizer(model, job_name, kind="sgd", lr=0.1, free_gradients=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(4, 10)).sum()).backward()
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(optimizer)
        optimizer.close()
        same(model, before)


COMPILED = """
import copy, sys, torch
from torch import nn
from gadei_ps.learners.torch import Optimizer

torch.set_num_threads(1)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 3))
twin = copy.deepcopy(model)
compiled = torch.compile(model, backend="aot_eager")  # the default one takes a minute
given = compiled if sys.argv[2] == "compiled" else model
how = {"view": sys.argv[1] == "view", "wait": True}
optimizer = Optimizer(given, like=torch.optim.SGD, lr=0.05, momentum=0.8, **how)
reference = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.8)
for _ in range(60):
    inputs = torch.randn(16, 10)
    for one, by in ((compiled, optimizer), (twin, reference)):
        by.zero_grad()
        nn.functional.cross_entropy(one(inputs), (inputs.sum(1) > 0).long()).backward()
        by.step()
for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
optimizer.close()
"""


@pytest.mark.parametrize(("view", "given"), [("view", "model"), ("copy", "compiled")])
def test_compiled(view: str, given: str, job_name: str) -> None:
    """A compiled model reads the job's weights at each step; Optimizer takes it, too."""
    with daemon(job_name, optimizer={}):
        environment = os.environ | {"GADEI_PS_JOB": job_name}
        command = [sys.executable, "-c", COMPILED, view, given]
        subprocess.run(command, env=environment, check=True, timeout=PATIENCE_S)
        assert status(job_name)["gradients_applied"] == 60
