"""Parameters without a gradient: left alone, as torch's optimizers do; frozen layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import daemon, status
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.learners.torch import Optimizer

STEPS = 200
CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, 0.8, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.02, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.001, momentum=0.5, weight_decay=0.01),
}
ADAMS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, 0.002, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.002, weight_decay=0.1),
}


class Heads(nn.Module):
    """A trunk and three heads, of which each mini-batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Sequential(nn.Linear(10, 20), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(20, 3) for _ in range(3))

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        out: torch.Tensor = self.heads[head](self.trunk(inputs))
        return out


def batches(steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    source = torch.Generator().manual_seed(11)
    for number in range(steps):
        inputs = torch.randn(16, 10, generator=source)
        yield inputs, (inputs.sum(1) > 0).long(), number // 3 % 3


def freeze(model: Heads, number: int) -> None:
    """The trunk is frozen for a while in the middle."""
    if number in (60, 120):
        model.trunk.requires_grad_(number == 120)


def train(
    model: Heads,
    optimizer: torch.optim.Optimizer,
    before_step: Callable[[int], None] = lambda number: None,
) -> None:
    for number, (inputs, targets, head) in enumerate(batches()):
        freeze(model, number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs, head), targets).backward()
        before_step(number)
        optimizer.step()


def same(model: nn.Module, twin: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "how", [{"wait": True}, {"view": False}, {"free_gradients": True}], ids=str
)
@pytest.mark.parametrize("kind", CLASSES)
def test_equal_to_torch(kind: str, how: dict[str, Any], job_name: str) -> None:
    model, twin = Heads(), Heads()
    with daemon(job_name, optimizer={}, shards=2):
        like = CLASSES[kind](model.parameters())
        optimizer = Optimizer(model, job_name, like=like, **{"wait": True, **how})
        train(model, optimizer)
        train(twin, CLASSES[kind](twin.parameters()))
        optimizer.client.wait_applied()
        same(model, twin)
        report = status(job_name)
        assert (report["gradients_applied"], report["gradients_refused"]) == (STEPS, 0)
        optimizer.close()


@pytest.mark.parametrize("kind", ADAMS)
def test_adam_counts_the_jobs_steps(kind: str, job_name: str) -> None:
    """The same as torch's, if that counts all steps for each parameter as the job does."""
    model, twin = Heads(), Heads()
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, like=ADAMS[kind](model.parameters()), wait=True)
        reference = ADAMS[kind](twin.parameters())

        def count(number: int) -> None:
            for one in twin.parameters():
                if number and one not in reference.state:
                    zeros = torch.zeros_like(one)
                    moments = {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}
                    reference.state[one] = {"step": torch.tensor(0.0), **moments}
                if number:
                    reference.state[one]["step"].fill_(number)

        train(model, optimizer)
        train(twin, reference, count)
        same(model, twin)
        optimizer.close()


def push_together(optimizers: list[Optimizer]) -> None:
    """Push at the same time: under BSP each waits for the other."""
    other = threading.Thread(target=optimizers[1].step)
    other.start()
    optimizers[0].step()
    other.join()


def test_two_learners_under_bsp(job_name: str) -> None:
    """Count a parameter that one learner leaves out as zero; one that all leave out stays."""
    with daemon(job_name, sync="bsp", optimizer={"kind": "momentum", "lr": 1.0}):
        models = [Heads(), Heads()]
        optimizers = [Optimizer(model, job_name) for model in models]
        before = [one.detach().clone() for one in models[0].heads.parameters()]
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for one in model.heads[number].parameters():
                one.grad = torch.ones_like(one)
            optimizer.client.wait_turn()
        push_together(optimizers)
        for model in models:  # in the second superstep, the heads of the first have a momentum
            model.zero_grad()
            for one in model.heads[2].parameters():
                one.grad = torch.ones_like(one)
        push_together(optimizers)
        moved = [old - new for old, new in zip(before, models[0].heads.parameters(), strict=True)]
        for one, by in zip(moved, (0.5, 0.5, 0.5, 0.5, 1.0, 1.0), strict=True):
            torch.testing.assert_close(one, torch.full_like(one, by), rtol=0, atol=1e-6)
        for optimizer in optimizers:
            optimizer.close()


def test_counted_as_zero(job_name: str) -> None:
    """Check that a momentum continues without gradients with skip_unused=False."""
    model = Heads()
    with daemon(job_name, optimizer={"kind": "momentum", "lr": 1.0, "momentum": 0.5}):
        optimizer = Optimizer(model, job_name, skip_unused=False, wait=True)
        weight = model.heads[0].weight
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        torch.testing.assert_close(before - weight, torch.full_like(weight, 1.5))
        optimizer.close()


def test_no_gradient_at_all(job_name: str) -> None:
    """Nothing moves, and the step counts."""
    model = Heads()
    with daemon(job_name, optimizer={"kind": "adam", "lr": 1.0, "weight_decay": 0.1}):
        optimizer = Optimizer(model, job_name, wait=True)
        before = [one.detach().clone() for one in model.parameters()]
        optimizer.step()
        for one, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(one, old)
        report = status(job_name)
        assert (report["version"], report["gradients_refused"]) == (1, 0)
        optimizer.close()
