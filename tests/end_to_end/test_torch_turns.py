"""PyTorch scripts under synchronization models: waves of mini-batches, and stragglers."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from support import daemon, fork, status
from support.torch_models import one_thread as one_thread
from support.torch_models import plain_model, same_state
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer


@pytest.mark.parametrize("own_data", [False, True])
def test_waves_are_sums_of_mini_batches(own_data: bool, job_name: str) -> None:
    """Keep the loop as it is under WSP; a wave leaves as one gradient."""
    with daemon(job_name, sync="wsp:D=0,s_local=2", optimizer={"kind": "sgd", "lr": 0.01}):
        model, twin = plain_model(), plain_model()
        optimizer = Optimizer(model, job_name)
        local = torch.optim.SGD(twin.parameters(), 0.01)
        inputs = torch.randn(20, 10, generator=torch.Generator().manual_seed(5))
        targets = (inputs.sum(1) > 0).long()
        if own_data:
            chosen = [np.arange(2 * i, 2 * i + 2) for i in range(9)]
        else:
            chosen = [batch.indices for batch in _trained(optimizer, model, inputs, targets)]
            # 20 samples in waves of 3 mini-batches of 2, the last wave of one.
            assert [len(one) for one in chosen] == [2] * 10
            assert sorted(np.concatenate(chosen).tolist()) == list(range(20))
        if own_data:
            for indices in chosen:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs[indices]), targets[indices]).backward()
                optimizer.step()
        for begin in range(0, len(chosen), 3):
            local.zero_grad()
            for indices in chosen[begin : begin + 3]:
                nn.functional.cross_entropy(twin(inputs[indices]), targets[indices]).backward()
            local.step()
        optimizer.client.wait_applied()
        same_state(model, twin)
        assert status(job_name)["version"] == -(-len(chosen) // 3)
        optimizer.close()


def _trained(
    optimizer: Optimizer, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> Iterator[Any]:
    for batch in optimizer.batches(len(inputs), batch_size=2, epochs=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch.indices]), targets[batch.indices]).backward()
        optimizer.step()
        yield batch


def test_waves_cannot_be_freed(job_name: str) -> None:
    with daemon(job_name, sync="wsp:D=0,s_local=2"):
        model = plain_model()
        optimizer = Optimizer(model, job_name, free_gradients=True)
        model(torch.ones(2, 10)).sum().backward()
        with pytest.raises(UsageError, match="use the one or the other"):
            optimizer.step()
        optimizer.close()


class _Slow(nn.Module):
    """Waits until its learner's gradient is not wanted; records what ran."""

    def __init__(self, ran: list[str]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 4), nn.Linear(4, 3)
        self.client: Client | None = None
        self.ran = ran

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.ran.append("first")
        while self.client is not None and self.client.wanted:
            pass
        x = self.second(x)
        self.ran.append("second")
        return x


def _push_some(pipe: Connection, job: str, count: int) -> None:
    with Client(job) as client:
        for _ in range(count):
            client.wait_turn()
            client.push(np.zeros(client.model.elements, np.float32))
        client.wait_applied()
        pipe.send("done")
        pipe.recv()


def test_straggler_stops_at_the_next_module(job_name: str) -> None:
    with daemon(job_name, sync="cutoff:c=1"):
        ran: list[str] = []
        model = _Slow(ran)
        optimizer = Optimizer(model, job_name)
        optimizer.client.wait_turn()
        inputs, targets = torch.ones(2, 10), torch.zeros(2, dtype=torch.int64)

        def iterate() -> None:
            with optimizer.iteration():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                ran.append("backward")
                optimizer.step()
                ran.append("step")

        model.client = optimizer.client
        with fork(1, _push_some, job_name, 1) as (other,):
            iterate()
            assert ran == ["first"]
            assert other.receive() == "done"
            model.client = None
            ran.clear()
            iterate()
            assert ran == ["first", "second", "backward", "step"]
            optimizer.client.wait_applied()
            report = status(job_name)
            assert (report["gradients_applied"], report["gradients_dropped"]) == (2, 1)
            other.send("go")
        optimizer.close()
