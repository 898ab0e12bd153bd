"""Virtual workers: a pipeline of stages against the sequential program with delayed weights."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import daemon, status
from support.torch_models import one_thread as one_thread
from torch import nn
from torch.func import functional_call

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import LocalOptimizer
from gadei_ps.learners.virtual import VirtualWorker

CRITERION = nn.functional.cross_entropy
COUNT = 11  # mini-batches


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    layers = [nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)]
    cuts = {1: [0, 5], 2: [0, 2, 5], 3: [0, 1, 3, 5]}[count]
    return [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(cuts)]


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.5)


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(11)
    for _ in range(COUNT):
        inputs = torch.randn(8, 10, generator=source)
        yield inputs, (inputs.sum(1) > 0).long()


def delayed(modules: list[nn.Module], wave: int) -> tuple[list[torch.Tensor], list[float]]:
    """One after another in one thread, each from the weights of `wave` mini-batches before.

    With the arithmetic of a job: what is pulled, what is pushed, and what is made again.
    """
    model = nn.Sequential(*modules)
    own = list(model.parameters())
    optimizer = momentum(own)
    server = [one.detach().clone() for one in own]
    base = [one.clone() for one in server]
    flying: deque[tuple[torch.Tensor, ...]] = deque()
    losses, ended = [], 0

    def end() -> None:
        nonlocal base, ended
        for parameter, gradient in zip(own, flying.popleft(), strict=True):
            parameter.grad = gradient
        optimizer.step()
        ended += 1
        if ended % wave == 0 or ended == COUNT:
            for held, mine, was in zip(server, own, base, strict=True):
                held += mine.detach() - was
            base = [one.detach().clone() for one in own]

    for number, (inputs, targets) in enumerate(data()):
        if len(flying) == wave:
            end()
        if number == 0 or number % wave == wave - 1:
            with torch.no_grad():
                for mine, held, was in zip(own, server, base, strict=True):
                    mine.copy_(held + (mine - was))
            base = [one.clone() for one in server]
        leaves = {
            name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()
        }
        loss = CRITERION(functional_call(model, leaves, (inputs,)), targets)
        flying.append(torch.autograd.grad(loss, list(leaves.values())))
        losses.append(float(loss.detach()))
    while flying:
        end()
    return server, losses


@pytest.mark.parametrize(("s_local", "count"), [(s, n) for s in range(4) for n in (2, 3)])
def test_it_is_the_sequential_program_with_delayed_weights(
    s_local: int, count: int, job_name: str
) -> None:
    expected, losses = delayed(stages(count), s_local + 1)
    with daemon(job_name, sync=f"wsp:D=1,s_local={s_local}", optimizer={"kind": "add"}):
        made = stages(count)
        worker = VirtualWorker(made, momentum, job_name, threads=[1] * count)
        seen = [worker.train(inputs, targets, CRITERION) for inputs, targets in data()]
        assert seen[: s_local + 1] == [None] * (s_local + 1)
        assert seen[s_local + 1 :] == losses[: COUNT - s_local - 1]
        assert worker.drain() == pytest.approx(np.mean(losses[COUNT - s_local - 1 :]))
        client = worker.client
        worker.close()
        assert client.published == -(-COUNT // (s_local + 1))
        late = VirtualWorker(stages(count), momentum, job_name)
        mine = [one.detach().clone() for one in nn.ModuleList(late.stages).parameters()]
        late.close()
        for got, wanted in zip(mine, expected, strict=True):
            assert torch.equal(got, wanted)


def test_without_a_pipeline_it_is_the_plain_learner(job_name: str) -> None:
    with daemon(job_name, optimizer={"kind": "add"}):
        plain, made = nn.Sequential(*stages(2)), stages(2)
        optimizer = LocalOptimizer(plain, momentum, job_name)
        for inputs, targets in data():
            optimizer.zero_grad()
            CRITERION(plain(inputs), targets).backward()
            optimizer.step()
        optimizer.close()
    with daemon(f"{job_name}-v", optimizer={"kind": "add"}):
        worker = VirtualWorker(made, momentum, f"{job_name}-v", threads=[1, 1])
        for inputs, targets in data():
            worker.train(inputs, targets, CRITERION)
        worker.close()
    for mine, theirs in zip(nn.Sequential(*made).parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("ahead", [1, 4])
def test_batches_of_the_server(ahead: int, job_name: str) -> None:
    """Two epochs of 7 mini-batches in waves of three: the last wave is shorter."""
    inputs = torch.randn(13, 10, generator=torch.Generator().manual_seed(5))
    targets = (inputs.sum(1) > 0).long()
    sync = "wsp:D=0,s_local=2"
    with daemon(job_name, sync=sync, optimizer={"kind": "add"}, ahead=ahead):
        worker = VirtualWorker(stages(2), momentum, job_name)
        taken: dict[int, list[int]] = {0: [], 1: []}
        for batch, _ in worker.train_on(inputs, targets, CRITERION, batch_size=2, epochs=2):
            taken[batch.epoch] += batch.indices.tolist()
        assert [sorted(one) for one in taken.values()] == [list(range(13))] * 2
        worker.client.wait_applied()
        told = status(job_name)
        assert (told["gradients_applied"], told["learners"][0]["samples"]) == (6, 26)
        assert told["work"]["state"] == "done"
        worker.close()


def test_what_a_stage_raises_reaches_the_caller(job_name: str) -> None:
    with daemon(job_name, sync="wsp:D=0,s_local=1", optimizer={"kind": "add"}):
        worker = VirtualWorker(stages(2), momentum, job_name)
        worker.train(torch.ones(2, 9), torch.zeros(2, dtype=torch.int64), CRITERION)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            worker.drain()
        worker.close()
        assert not status(job_name)["gradients_applied"]


def test_stages_that_cannot_be_a_pipeline() -> None:
    shared = nn.Linear(3, 3)
    wrong: dict[str, tuple[list[nn.Module], dict[str, Any]]] = {
        "share the parameter 'weight'": ([shared, shared], {}),
        "is a buffer that training changes": ([nn.Linear(3, 3), nn.BatchNorm1d(3)], {}),
        "at least one stage": ([], {}),
        "for each of 2 stages": ([nn.Linear(3, 3), nn.Linear(3, 3)], {"threads": [1]}),
    }
    for why, (modules, how) in wrong.items():
        with pytest.raises(UsageError, match=why):
            VirtualWorker(modules, momentum, "no-such-job", **how)
