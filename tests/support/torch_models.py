"""Models for tests with PyTorch, and their comparison."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gadei_ps.job.faults import Processes
from gadei_ps.learners.torch import Optimizer
from support.jobs import status
from support.processes import Stopped
from support.waiting import eventually

STEPS = 50


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Fix the threads for test files that import it: results do not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Only what is drawn inside, so that learners do not warn that they draw alike."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def plain_model() -> nn.Module:
    with seeded(3):
        return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 3))


def batch_norm_model() -> nn.Module:
    with seeded(3):
        return nn.Sequential(nn.Linear(10, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))


def data(steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Mini-batches of these models: inputs (16, 10) and one of three labels each."""
    source = torch.Generator().manual_seed(11)
    for _ in range(steps):
        inputs = torch.randn(16, 10, generator=source)
        yield inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long()


def close_late(optimizer: Optimizer, model: nn.Module, job: str) -> None:
    """A step with a gradient of ones, which the server applies once close() waits for it."""
    row = Processes(job).control["roster"][optimizer.client.row]
    eventually(lambda: int(row["grant"]), what="its turn, for which step() waits")
    with Stopped(status(job)["server_pid"]):
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()
        closing = threading.Thread(target=optimizer.close)
        closing.start()
        closing.join(0.5)
        assert closing.is_alive()
    closing.join()


def same_state(model: nn.Module, other: nn.Module) -> None:
    """Wherever the first one is; the other is on the CPU."""
    for (name, mine), theirs in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5, msg=name)


# Of a job, and of torch. Under BSP a lone learner continues when its gradient is in the weights, so
# that both come to the same weights.
LOCAL: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"kind": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (
        {"kind": "momentum", "lr": 0.05, "momentum": 0.8},
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.8),
    ),
    "adam": ({"kind": "adam", "lr": 0.01}, lambda p: torch.optim.Adam(p, 0.01)),
}


def pipeline_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)]


def with_momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.5)
