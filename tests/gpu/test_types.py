"""Models of other types than float32 on a GPU: cast there, and kept in float32 by the job."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support import daemon
from support.torch_models import batch_norm_model
from torch import nn
from torch_devices import gpu as gpu

from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer

STEPS = 30


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    source = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        inputs = torch.randn(16, 10, generator=source, dtype=torch.float64)
        targets = (inputs.sum(1) > 0).long()
        optimizer.zero_grad()
        inputs = inputs.to(device, next(model.parameters()).dtype)
        nn.functional.cross_entropy(model(inputs).float(), targets.to(device)).backward()
        optimizer.step()


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_float64_as_on_the_cpu(gpu: str, sync: str, job_name: str) -> None:
    model = batch_norm_model().double()
    model.register_buffer("table", torch.full((3,), 1 / 3, dtype=torch.float64))
    twin = copy.deepcopy(model)
    model.to(gpu)
    with daemon(job_name, sync=sync, optimizer={"kind": "sgd", "lr": 0.1}, shards=2):
        optimizer = Optimizer(model, job_name, wait=sync == "asp")
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        train(model, optimizer, gpu)
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        optimizer.assign({"0.bias": model[0].bias * 2, "table": torch.full((3,), 0.7)})
        train(model, optimizer, gpu)
        assert (optimizer.client.weights["table"] == np.float64(np.float32(0.7))).all()
        with Client(job_name) as other:
            other.assign({"3.bias": np.ones(3), "table": np.full(3, 1 / 3)})
        optimizer.close()
        train(twin, torch.optim.SGD(twin.parameters(), 0.1), "cpu")
        with torch.no_grad():
            twin[0].bias.mul_(2)
        train(twin, torch.optim.SGD(twin.parameters(), 0.1), "cpu")
        with torch.no_grad():
            twin[3].bias.fill_(1)
            twin.table.copy_(torch.full((3,), 0.7))
        for (name, mine), theirs in zip(
            model.state_dict().items(), twin.state_dict().values(), strict=True
        ):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5, msg=name)
        train(model, torch.optim.SGD(model.parameters(), 0.1), gpu)  # the memory is its own now


def test_parameters_of_all_types_change_at_once(gpu: str, job_name: str) -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False).double()])
    model.to(gpu)
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.1}):
        optimizer = Optimizer(model, job_name)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        changes = 0
        for _ in optimizer.batches(64, 1, epochs=1):
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            now = [parameter.detach().clone() for parameter in model.parameters()]
            changed = [not torch.equal(*one) for one in zip(before, now, strict=True)]
            assert all(changed) or not any(changed)
            before, changes = now, changes + all(changed)
        assert changes
        optimizer.close()


# Torch's flatten_parameters() does nothing in bfloat16, so cuDNN copies the weights.
@pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning")
def test_recurrent_layers_and_tables_in_bfloat16(gpu: str, job_name: str) -> None:
    torch.manual_seed(3)
    layers = nn.ModuleDict({"table": nn.Embedding(9, 4, sparse=True), "rnn": nn.GRU(4, 5)})
    model = layers.bfloat16().to(gpu)
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 2.0**-6}):
        optimizer = Optimizer(model, job_name)
        for _ in range(3):
            optimizer.zero_grad()
            outputs, _ = model["rnn"](model["table"](torch.tensor([[1], [3]]).to(gpu)))
            outputs.sum().backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            shared = torch.from_numpy(optimizer.client.weights[name].copy())
            assert torch.equal(parameter.cpu(), shared.bfloat16()), name
        optimizer.close()
