"""assign() of learners with weights of their own: LocalOptimizer and VirtualWorker."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support import PATIENCE_S, daemon, eventually, live_weights
from support.torch_models import one_thread as one_thread
from support.torch_models import pipeline_layers
from torch import nn

from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import LocalOptimizer
from gadei_ps.learners.virtual import VirtualWorker

WSP = "wsp:D=1,s_local=3"


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def of_job(client: Client) -> dict[str, np.ndarray]:
    weights = live_weights(client.job)
    return {name: one.copy() for name, one in client.model.views(weights).items()}


def same(values: dict[str, torch.Tensor], client: Client) -> bool:
    weights = of_job(client)
    return all((weights[name] == one.numpy()).all() for name, one in values.items())


def copied(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in state.items()}


class Held(nn.Module):
    """Holds one of the forward passes until the main thread drains the pipeline."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.holds = threading.Event()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.number -= 1
        if not self.number:
            self.holds.set()
            eventually(drains)
        return inputs


def drains() -> bool:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        if frame.f_code is VirtualWorker.drain.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@pytest.mark.parametrize("sync", ["asp", "bsp", WSP])
def test_local_optimizer(sync: str, job_name: str) -> None:
    """Back to weights of before, as the plain program does it: the momentum stays."""

    def train(model: nn.Module, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()

    with daemon(job_name, sync=sync, optimizer={"kind": "add"}):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        twin = nn.Linear(3, 2)
        twin.load_state_dict(model.state_dict())
        plain = sgd([*twin.parameters()])
        best = copied(model.state_dict())
        optimizer = LocalOptimizer(model, sgd, job_name)
        train(model, optimizer, 6)  # under WSP in the middle of a wave
        train(twin, plain, 6)
        optimizer.assign(best)
        twin.load_state_dict(best)
        assert same(best, optimizer.client)
        assert all(torch.equal(one, best[name]) for name, one in model.state_dict().items())
        train(model, optimizer, 5)
        train(twin, plain, 5)
        for name, one in twin.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], one)
        model(torch.ones(4, 3))  # a mini-batch has begun
        with pytest.raises(UsageError, match="assign: a mini-batch or a batch is not done"):
            optimizer.assign(best)
        with pytest.raises(UsageError, match="the model has no parameter or buffer 'w'"):
            optimizer.assign({"w": torch.zeros(1)})
        with pytest.raises(ModelMismatch):
            optimizer.assign({"bias": torch.zeros(1)})
        optimizer.close()


@pytest.mark.parametrize("own", [True, False], ids=["own", "of the job"])
def test_virtual_worker(own: bool, job_name: str) -> None:
    """The pipeline is drained first, while a stage computes, and continues from the assignment."""
    kind = {} if own else {"kind": "sgd", "lr": 0.1}
    torch.manual_seed(0)
    inputs, targets = torch.randn(8, 10), torch.randint(0, 3, (8,))
    with daemon(job_name, sync=WSP, optimizer=kind):
        held = Held(14)
        layers = [*pipeline_layers(), held]
        made = sgd if own else None
        with VirtualWorker(layers, ["host", "host"], made, job_name, cuts=[3]) as worker:
            best = worker.state_dict()
            for _ in range(14):
                worker.train(inputs, targets, nn.functional.cross_entropy)
            worker.client.wait_applied()
            assert not same(best, worker.client)
            assert held.holds.wait(PATIENCE_S)  # meanwhile its stage has copies of the weights
            worker.assign(best)
            assert same(best, worker.client)
            now = worker.state_dict()
            assert all(torch.equal(now[name], one) for name, one in best.items())
            with pytest.raises(UsageError, match="the model has no parameter"):
                worker.assign({"none": torch.zeros(1)})
            bad = {name: torch.full_like(one, torch.nan) for name, one in best.items()}
            with pytest.raises(UsageError, match="holds a NaN or an infinity"):
                worker.assign(bad)
            for _ in range(14):
                worker.train(inputs, targets, nn.functional.cross_entropy)
            worker.drain()
            moved = worker.state_dict()
            assert not all(torch.equal(moved[name], one) for name, one in best.items())
