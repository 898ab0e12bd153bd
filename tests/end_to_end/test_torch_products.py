"""Gradients that step() works out in the ring, and those that backward() gives away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import daemon, status
from support.torch_models import LOCAL, STEPS, same_state
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import Optimizer, linear


class Sentences(nn.Module):
    """A product of which only some outputs matter, as after a maximum over positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.EmbeddingBag(50, 24, mode="sum")
        self.filters = nn.Parameter(torch.randn(40, 24) * 0.2)
        self.norm = nn.BatchNorm1d(40)
        self.hidden = nn.Linear(40, 16)
        self.out = nn.Linear(16, 3, bias=False)
        self.seen: set[bool] = set()

    def forward(self, tokens: torch.Tensor, multiply: Callable[..., torch.Tensor]) -> torch.Tensor:
        embedded = torch.stack([self.words((tokens + i) % 50) for i in range(12)], dim=1)
        peaks = multiply(embedded, self.filters).amax(dim=1).clamp(min=0)
        if tokens[0, 0] % 2:  # the same weight twice in one graph: both count
            peaks = peaks + multiply(embedded.sum(dim=1), self.filters)
        hidden: torch.Tensor = self.out(torch.relu(self.hidden(self.norm(peaks))))
        return hidden


def _train_sentences(
    model: Sentences, optimizer: torch.optim.Optimizer, multiply: Callable[..., torch.Tensor]
) -> list[float]:
    source = torch.Generator().manual_seed(8)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 49, (6, 5), generator=source)
        targets = torch.randint(0, 3, (6,), generator=source)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens, multiply), targets)
        loss.backward()
        model.seen.add(model.filters.grad is None)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("free_gradients", [False, True])
@pytest.mark.parametrize("kind", sorted(LOCAL))
def test_products_and_freed_gradients_as_torch(
    kind: str, free_gradients: bool, job_name: str
) -> None:
    settings, local = LOCAL[kind]
    with daemon(job_name, sync="bsp", optimizer=settings, shards=1):
        model, twin = Sentences(), Sentences()
        optimizer = Optimizer(model, job_name, free_gradients=free_gradients)
        losses = _train_sentences(model, optimizer, linear)
        assert model.seen == {False, True}, "a product alone, and with a gradient"
        assert (model.out.weight.grad is None) == free_gradients
        expected = _train_sentences(twin, local(twin.parameters()), nn.functional.linear)
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        same_state(model, twin)
        assert status(job_name)["gradients_refused"] == 0
        optimizer.close()
        tokens = torch.zeros(2, 5, dtype=torch.int64)
        model(tokens, linear).sum().backward()  # no optimizer takes the products any more
        assert model.filters.grad is not None


def test_linear_is_torchs_elsewhere() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(3, 5, 7, requires_grad=True)
    weight, bias = torch.randn(4, 7, requires_grad=True), torch.randn(4, requires_grad=True)
    linear(inputs, weight, bias).square().sum().backward()
    mine = [one.grad.clone() for one in (inputs, weight, bias) if one.grad is not None]
    for one in (inputs, weight, bias):
        one.grad = None
    nn.functional.linear(inputs, weight, bias).square().sum().backward()
    for got, one in zip(mine, (inputs, weight, bias), strict=True):
        torch.testing.assert_close(got, one.grad)


def test_freed_gradients_leave_once(job_name: str) -> None:
    """A second backward() is refused; one that no step() follows is forgotten by zero_grad()."""
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}):
        model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = Optimizer(model, job_name, free_gradients=True)
        inputs = torch.ones(1, 1, 5)
        model(inputs).sum().backward()
        with pytest.raises(UsageError, match=r"second backward"):
            model(inputs).sum().backward()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.client.wait_applied()
        for parameter, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter, old - 3.0)
        assert status(job_name)["gradients_applied"] == 1
        optimizer.close()


@pytest.mark.parametrize(
    "take",
    [
        lambda loss, inputs, weight: torch.autograd.grad(loss, inputs),
        lambda loss, inputs, weight: torch.autograd.grad(loss, weight),
        lambda loss, inputs, weight: torch.autograd.grad(loss, (inputs, weight)),
        lambda loss, inputs, weight: loss.backward(inputs=[inputs]),
    ],
)
def test_other_gradients_leave_no_product(take: Callable[..., Any], job_name: str) -> None:
    """The step has the gradients of backward() alone, after those of an adversarial example too."""
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}):
        model = nn.Linear(6, 8, bias=False)
        before = model.weight.detach().clone()
        optimizer = Optimizer(model, job_name, free_gradients=True)
        inputs = torch.ones(2, 6, requires_grad=True)
        taken, expected = (
            take(outputs.sum(), inputs, model.weight)
            for outputs in (model(inputs), nn.functional.linear(inputs, model.weight))
        )
        torch.testing.assert_close(taken, expected)
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.client.wait_applied()
        torch.testing.assert_close(model.weight.detach(), before - 2)
        optimizer.close()


# free_gradients has given a gradient away before a hook that comes after the sum.
@pytest.mark.parametrize(("after", "frees"), [(False, False), (False, True), (True, False)])
def test_hooks_of_the_script_get_the_gradient(after: bool, frees: bool, job_name: str) -> None:
    def limited(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-0.1, 0.1)

    def limit(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.1, 0.1)

    def train(
        model: nn.Linear, optimizer: torch.optim.Optimizer, multiply: Callable[..., torch.Tensor]
    ) -> None:
        weight = model.weight
        if after:
            weight.register_post_accumulate_grad_hook(limit)
        else:
            weight.register_hook(limited)
        for _ in range(3):
            optimizer.zero_grad()
            multiply(torch.ones(1, 4), weight, model.bias).square().sum().backward()
            optimizer.step()

    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.1}):
        twin, model = nn.Linear(4, 3), nn.Linear(4, 3)
        model.load_state_dict(twin.state_dict())
        train(twin, torch.optim.SGD(twin.parameters(), 0.1), nn.functional.linear)
        optimizer = Optimizer(model, job_name, wait=True, free_gradients=frees)
        train(model, optimizer, linear)
        same_state(model, twin)
        optimizer.close()


def test_products_are_of_backward_only(job_name: str) -> None:
    """autograd.grad and a frozen weight leave no product; under autocast it is torch's own."""
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = Optimizer(model, job_name, free_gradients=True)
        inputs = torch.randn(2, 6, requires_grad=True)
        (wanted,) = torch.autograd.grad(model(inputs).sum(), inputs)
        torch.testing.assert_close(wanted, (before[1] @ before[0]).sum(0).expand(2, 6))
        model[0].weight.requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16):
            model(inputs.detach()).float().sum().backward()
        optimizer.zero_grad()
        model(inputs.detach()).sum().backward()
        optimizer.step()
        optimizer.client.wait_applied()
        torch.testing.assert_close(model[0].weight.detach(), before[0])
        moved = torch.ones(4, 2) @ (inputs.detach() @ before[0].t())
        torch.testing.assert_close(model[1].weight.detach(), before[1] - moved)
        assert status(job_name)["gradients_applied"] == 1
        optimizer.close()
        optimizer.close()


@pytest.mark.parametrize("which", ["inputs", "gradient"])
def test_inputs_that_have_changed_are_noticed(which: str, job_name: str) -> None:
    with daemon(job_name):
        model = nn.Linear(6, 8, bias=False)
        optimizer = Optimizer(model, job_name, free_gradients=True)
        inputs, gradient = torch.randn(2, 6), torch.ones(2, 8)
        model(inputs).backward(gradient)
        (inputs if which == "inputs" else gradient).zero_()
        with pytest.raises(UsageError, match=r"changed between backward\(\) and step\(\)"):
            optimizer.step()
        optimizer.close()


@pytest.mark.parametrize(("skips", "moved"), [(True, 1.0), (False, 1.5)])
def test_what_has_no_gradient_beside_products(skips: bool, moved: float, job_name: str) -> None:
    """It stays as it is; or it is zero, as in a dense frame, and momentum moves the weight on."""
    settings = {"kind": "momentum", "lr": 1.0, "momentum": 0.5}
    with daemon(job_name, sync="bsp", optimizer=settings):
        model = nn.ModuleDict(
            {"one": nn.Linear(16, 8, bias=False), "two": nn.Linear(4, 4, bias=False)}
        )
        start = model["two"].weight.detach().clone()
        optimizer = Optimizer(model, job_name, skip_unused=skips)
        (
            linear(torch.ones(1, 16), model["one"].weight).sum() + model["two"].weight.sum()
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
        linear(torch.ones(1, 16), model["one"].weight).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model["two"].weight.detach(), start - moved)
        optimizer.close()
