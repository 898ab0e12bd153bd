"""Parameters without a gradient on a GPU stay as they are, as on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from support import daemon, status
from support.torch_models import same_state
from torch import nn
from torch_devices import Words
from torch_devices import gpu as gpu

from gadei_ps.learners.torch import Optimizer

STEPS = 30


class Heads(nn.Module):
    """Each mini-batch uses one head; batch norm has buffers that change all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20))
        self.heads = nn.ModuleList(nn.Linear(20, 3) for _ in range(2))

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        out: torch.Tensor = self.heads[head](self.trunk(inputs))
        return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    source = torch.Generator().manual_seed(11)
    for number in range(STEPS):
        if number in (10, 20):  # frozen for a while
            model.trunk.requires_grad_(number == 20)
        inputs = torch.randn(16, 10, generator=source)
        targets = (inputs.sum(1) > 0).long()
        optimizer.zero_grad()
        outputs = model(inputs.to(device), number // 3 % 2)
        nn.functional.cross_entropy(outputs, targets.to(device)).backward()
        optimizer.step()


def test_equal_to_torch(gpu: str, job_name: str) -> None:
    torch.manual_seed(3)
    model = Heads()
    twin = copy.deepcopy(model)
    model.to(gpu)
    settings = {"kind": "momentum", "lr": 0.05, "momentum": 0.8, "weight_decay": 0.01}
    with daemon(job_name, sync="bsp", optimizer=settings, shards=2):
        optimizer = Optimizer(model, job_name)
        train(model, optimizer, gpu)
        local = torch.optim.SGD(twin.parameters(), 0.05, momentum=0.8, weight_decay=0.01)
        train(twin, local, "cpu")
        optimizer.close()
        same_state(model, twin)


def test_groups_whose_tensors_end_early(gpu: str, job_name: str) -> None:
    """A group begins at a chunk; in a frame of rows no gap before it is left."""
    torch.manual_seed(3)
    model = Heads()
    twin = copy.deepcopy(model)
    model.to(gpu)

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        return [{"params": of.trunk.parameters()}, {"params": of.heads.parameters()}]

    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.05}):
        optimizer = Optimizer(model, job_name, groups=groups(model))
        train(model, optimizer, gpu)
        train(twin, torch.optim.SGD(groups(twin), 0.05), "cpu")
        optimizer.close()
        same_state(model, twin)


def test_counted_as_zero(gpu: str, job_name: str) -> None:
    torch.manual_seed(3)
    model = Words().to(gpu)
    with daemon(job_name, sync="bsp", optimizer={"kind": "momentum", "lr": 1.0, "momentum": 0.5}):
        for skips, moved in ((True, 1.0), (False, 1.75)):
            optimizer = Optimizer(model, job_name, skip_unused=skips)
            weight = model.out.weight
            before = weight.detach().clone()
            for number in range(3):
                optimizer.zero_grad()
                if not number:
                    weight.grad = torch.ones_like(weight)
                optimizer.step()
            torch.testing.assert_close(before - weight, torch.full_like(weight, moved))
            assert not status(job_name)["gradients_refused"]
            optimizer.assign({"out.weight": before}, reset=True)
            optimizer.close()
