"""Scripts with two optimizers: two jobs in one process, or two parts of one model in one job."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support import daemon, status
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import ModelMismatch
from gadei_ps.learners.torch import Optimizer

STEPS = 60
SETTINGS: dict[str, Any] = {"lr": 0.01, "momentum": 0.5}


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        yield torch.randn(16, 2, generator=source) + 3, torch.randn(16, 4, generator=source)


def judged(outputs: torch.Tensor, real: bool) -> torch.Tensor:
    wanted = torch.full_like(outputs, float(real))
    return nn.functional.binary_cross_entropy_with_logits(outputs, wanted)


def train(model: Gan, of_generator: Any, of_critic: Any) -> None:
    """Train as in torch's tutorial: the generator's loss leaves gradients in the critic, too."""
    for real, noise in batches():
        of_critic.zero_grad()
        made = model.generator(noise)
        judged(model.critic(real), True).backward()
        judged(model.critic(made.detach()), False).backward()
        of_critic.step()
        of_generator.zero_grad()
        judged(model.critic(made), True).backward()
        of_generator.step()


def train_as_one(model: Gan, optimizer: Optimizer) -> None:
    """One optimizer: what is not to move has no gradient."""
    for real, noise in batches():
        optimizer.zero_grad()
        made = model.generator(noise)
        judged(model.critic(real), True).backward()
        judged(model.critic(made.detach()), False).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.critic.requires_grad_(False)
        judged(model.critic(model.generator(noise)), True).backward()
        model.critic.requires_grad_(True)
        optimizer.step()


def plain(model: Gan) -> Gan:
    twin = copy.deepcopy(model)
    parts = (twin.generator, twin.critic)
    train(twin, *(torch.optim.SGD(one.parameters(), **SETTINGS) for one in parts))
    return twin


def same(model: nn.Module, twin: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("view", [True, False])
def test_two_jobs(view: bool, job_name: str) -> None:
    model = Gan()
    twin = plain(model)
    names = job_name, f"{job_name}-critic"
    with ExitStack() as jobs:
        for name in names:
            jobs.enter_context(daemon(name, optimizer={}))
        optimizers = [
            Optimizer(part, name, like=torch.optim.SGD, wait=True, view=view, **SETTINGS)
            for part, name in zip((model.generator, model.critic), names, strict=True)
        ]
        train(model, *optimizers)
        same(model, twin)
        for optimizer, name in zip(optimizers, names, strict=True):
            assert status(name)["gradients_applied"] == STEPS
            optimizer.close()


def test_one_job_with_two_parts(job_name: str) -> None:
    model = Gan()
    twin = plain(model)
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, like=torch.optim.SGD, wait=True, **SETTINGS)
        train_as_one(model, optimizer)
        same(model, twin)
        optimizer.close()


def test_two_models_are_not_one_job(job_name: str) -> None:
    model = Gan()
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model.generator, job_name, like=torch.optim.SGD, **SETTINGS)
        with pytest.raises(ModelMismatch, match=r"a job of its own, or put both into one module"):
            Optimizer(model.critic, job_name, like=torch.optim.SGD, **SETTINGS)
        optimizer.close()
