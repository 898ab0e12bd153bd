"""Models of other types than float32: kept in float32 by the job, cast at the learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import daemon, eventually
from support.torch_models import batch_norm_model, data, plain_model
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import LocalOptimizer, Optimizer

STEPS = 200
HALVES = [torch.bfloat16, torch.float16]
CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.8),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.02),
    "adam": lambda p: torch.optim.Adam(p, 0.002),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.001, momentum=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, 0.002, weight_decay=0.1),
}


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    first = next(model.parameters())
    outputs = model(inputs.to(first.dtype))
    # In 16 bits as autocast has it; float64 stays, as rounding would move a bias before batch norm.
    outputs = outputs.float() if first.dtype in HALVES else outputs
    return nn.functional.cross_entropy(outputs, targets)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for inputs, targets in data(steps):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()


def train_masters(model: nn.Module, made: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    """Train 16-bit weights by torch alone as a job does; return them in float32."""
    masters = {name: one.detach().float() for name, one in model.named_parameters()}
    optimizer = made(list(masters.values()))
    for inputs, targets in data(STEPS):
        model.zero_grad()
        loss_of(model, inputs, targets).backward()
        for name, one in model.named_parameters():
            assert one.grad is not None
            masters[name].grad = one.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.copy_(masters[name])
    return masters


def types_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: one.dtype for name, one in model.state_dict().items()}


@pytest.mark.parametrize("kind", CLASSES)
def test_float64_as_torch(kind: str, job_name: str) -> None:
    """Compare to the rounding of float32. Statistics of batch norm are float64, too."""
    model, twin = batch_norm_model().double(), batch_norm_model().double()
    before = types_of(model)
    with daemon(job_name, optimizer={}, shards=2):
        reference = CLASSES[kind](twin.parameters())
        optimizer = Optimizer(model, job_name, like=CLASSES[kind](model.parameters()))
        train(model, optimizer)
        train(twin, reference)
        assert types_of(model) == before
        for mine, theirs in zip(
            model.state_dict().values(), twin.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        saved, wanted = optimizer.state_dict(), reference.state_dict()["state"]
        for number, state in saved["state"].items():
            for name, value in state.items():
                other = wanted[number][name]
                if other is None:
                    continue  # sgd
                assert value.dtype == other.dtype
                torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-5)
        reference.load_state_dict(saved)
        optimizer.load_state_dict(saved)
        optimizer.close()
        assert types_of(model) == before
        train(model, reference, 1)  # the memory is the model's own now


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_float32_beside_16_bits(kind: str, dtype: torch.dtype, job_name: str) -> None:
    """The job's weights are what torch's optimizer makes of float32 masters."""
    model, twin = plain_model().to(dtype), plain_model().to(dtype)
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, like=CLASSES[kind](model.parameters()))
        train(model, optimizer)
        masters = train_masters(twin, CLASSES[kind])
        for name, one in model.named_parameters():
            shared = torch.from_numpy(optimizer.client.weights[name].copy())
            assert one.dtype == dtype
            assert torch.equal(one, shared.to(dtype))
            # A weight that is rounded the other way once moves all gradients after it a little.
            torch.testing.assert_close(shared, masters[name], rtol=0.02, atol=0.02)
        state = optimizer.state_dict()["state"]
        reference = CLASSES[kind](twin.parameters())
        train(twin, reference, 1)
        for number, one in reference.state_dict()["state"].items():
            assert {key: value.dtype for key, value in state[number].items()} == {
                key: value.dtype for key, value in one.items()
            }
        optimizer.close()


def test_small_steps_are_not_lost(job_name: str) -> None:
    """Check that the job adds in float32: in bfloat16 alone, 1 + 1/1024 is 1."""
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 2.0**-10}):
        optimizer = Optimizer(model, job_name)
        for _ in range(1024):
            weight.grad = -torch.ones_like(weight)
            optimizer.step()
        assert (weight == 2).all()
        optimizer.close()


def mixed_model() -> nn.Module:
    """Return norms in float32, as models in bfloat16 mostly have them; a table in float64."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first = nn.Linear(10, 40).bfloat16()
            self.norm = nn.BatchNorm1d(40)
            self.last = nn.Linear(40, 3).double()
            self.register_buffer("table", torch.full((3,), 1 / 3, dtype=torch.float64))
            self.register_buffer("mask", torch.full((3,), -torch.inf, dtype=torch.bfloat16))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            inner = self.norm(self.first(inputs.bfloat16()).float())
            out: torch.Tensor = self.last(inner.double()) * self.table
            return out

    return Mixed()


def test_mixed_types(job_name: str) -> None:
    model = mixed_model()
    before, was = types_of(model), {name: one.clone() for name, one in model.state_dict().items()}
    with daemon(job_name, optimizer={"kind": "adam", "lr": 0.01}):
        optimizer = Optimizer(model, job_name)
        train(model, optimizer, 20)
        shared = {name: one.copy() for name, one in optimizer.client.weights.items()}
        assert {*shared} == {*before}
        trained = dict(model.named_parameters())
        for name, one in model.state_dict().items():
            assert one.dtype == before[name]
            if name in trained:
                cast = one_type(shared[name], one.dtype)
                np.testing.assert_array_equal(one.float().numpy(), cast)
            assert torch.equal(one, was[name]) == (name in ("table", "mask")), name
        optimizer.assign(model.state_dict())
        optimizer.assign({"first.weight": torch.full((40, 10), 1 / 3)})
        assert (model.first.weight == torch.tensor(1 / 3).bfloat16()).all()
        assert (optimizer.client.weights["first.weight"] == np.float32(1 / 3)).all()
        optimizer.assign({"mask": torch.full((3,), 1 / 3), "table": torch.full((3,), 2 / 3)})
        third = torch.tensor([1 / 3] * 3).bfloat16()
        assert torch.equal(model.mask, third)
        bits = third.view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(optimizer.client.weights["mask"], bits)
        assert (optimizer.client.weights["table"] == np.float64(np.float32(2 / 3))).all()
        optimizer.assign({name: one for name, one in was.items() if name != "mask"})
        for name, one in model.state_dict().items():
            if name not in ("table", "mask"):
                assert torch.equal(one, was[name]), name
        optimizer.close()


def one_type(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).float().numpy()


def test_learners_of_different_types(job_name: str) -> None:
    models = [batch_norm_model(), batch_norm_model().bfloat16(), batch_norm_model().double()]
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.1}):
        optimizers = [Optimizer(model, job_name, wait=True) for model in models]
        for model, optimizer in zip(models * 5, optimizers * 5, strict=True):
            train(model, optimizer, 1)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.backend.refresh()
            for name, one in model.named_parameters():
                shared = torch.from_numpy(optimizer.client.weights[name].copy())
                assert torch.equal(one.detach(), shared.to(one.dtype)), name
            assert all((one.isfinite()).all() for one in model.parameters())
            optimizer.close()
            # Its own are the job's now, rounded from another type.
            mean, has = optimizer.client.weights["1.running_mean"], model[1].running_mean
            eventually(lambda mean=mean, has=has: np.array_equal(mean, has.float().numpy()))


def test_sparse_rows_and_free_gradients(job_name: str) -> None:
    """Push rows of an embedding in bfloat16, and gradients as soon as they are computed."""
    torch.manual_seed(3)
    model = nn.EmbeddingBag(50, 4, sparse=True).bfloat16()
    before = model.weight.detach().clone()
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}):
        optimizer = Optimizer(model, job_name)
        model(torch.tensor([[3, 3, 7]])).sum().backward()
        optimizer.step()
        moved = (model.weight.detach() != before).any(1)
        assert moved.nonzero().flatten().tolist() == [3, 7]
        optimizer.close()
    model, twin = plain_model().double(), plain_model().double()
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.1}):
        optimizer = Optimizer(model, job_name, free_gradients=True)
        train(model, optimizer)
        train(twin, torch.optim.SGD(twin.parameters(), 0.1))
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        optimizer.close()


def test_what_other_types_do_not_have(job_name: str) -> None:
    with pytest.raises(UsageError, match=r"'0\.weight' is torch\.float64 .*use Optimizer"):
        LocalOptimizer(plain_model().double(), lambda p: torch.optim.SGD(p, 0.1), job=job_name)
    with daemon(job_name):
        model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
        with pytest.raises(UsageError, match=r"'0' is torch\.complex64 on cpu: .* bfloat16"):
            Optimizer(model, job_name)
        weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = Optimizer(nn.ParameterList([weight]), job_name, kind="sgd", lr=1.0)
        weight.grad = torch.full_like(weight, 1e300)  # no number of float32
        optimizer.step()
        assert (weight == 1).all()
        optimizer.close()
