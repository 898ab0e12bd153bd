"""What else ordinary scripts do: models of odd tensors, and what they do to model and optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import daemon
from support.torch_models import data
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.learners.torch import Optimizer

STEPS = 10


class Odd(nn.Module):
    """More than 8,192 tensors, tensors without values, a long name, a layer of 300 names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.register_buffer("nothing", torch.empty(0))
        self.add_module("long_" * 60, nn.Linear(10, 3))
        self.layers = nn.ModuleList([nn.Linear(10, 10)] * 150)
        self.many = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(8200))
        self.end = nn.Parameter(torch.empty(4, 0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            inputs = layer(inputs).tanh()
        outputs: torch.Tensor = self.get_submodule("long_" * 60)(inputs)
        return outputs + self.many[0] + self.many[8199] + self.empty.sum() + self.end.sum()


@pytest.mark.parametrize(
    "how", [{"view": False}, {"wait": True}, {"free_gradients": True}], ids=str
)
def test_odd_tensors(how: dict[str, bool], job_name: str) -> None:
    model = Odd()
    twin = copy.deepcopy(model)
    theirs = torch.optim.Adam(twin.parameters())
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, kind="adam", **({"wait": True} | how))
        by: Any
        for inputs, targets in data(STEPS):
            for one, by in ((model, optimizer), (twin, theirs)):
                by.zero_grad()
                nn.functional.cross_entropy(one(inputs), targets).backward()
                by.step()
        saved = optimizer.state_dict()["state"]
        assert len(saved) == len(list(model.parameters()))
        optimizer.load_state_dict(theirs.state_dict())
        optimizer.close()
    for (name, mine), other in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)
