"""A plain PyTorch script, its optimizer line changed, does what it did."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import daemon, fork, live_weights, status
from torch import nn

from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer, linear

STEPS = 50


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 3))


def batch_norm_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))


def data(steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(11)
    for _ in range(steps):
        inputs = torch.randn(16, 10, generator=source)
        yield inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    steps: int = STEPS,
) -> list[float]:
    """The user's loop, the same for both."""
    losses = []
    for inputs, targets in data(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def same_state(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)


# Under BSP a lone learner goes on when its gradient is in the weights, as with torch's own.
LOCAL: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"kind": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (
        {"kind": "momentum", "lr": 0.05, "momentum": 0.8},
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.8),
    ),
    "adam": ({"kind": "adam", "lr": 0.01}, lambda p: torch.optim.Adam(p, 0.01)),
}


@pytest.mark.parametrize("kind", sorted(LOCAL))
def test_as_torch(kind: str, job_name: str) -> None:
    settings, local = LOCAL[kind]
    with daemon(job_name, sync="bsp", optimizer=settings, shards=1):
        model, twin = plain_model(), plain_model()
        optimizer = Optimizer(model, job_name)
        losses = train(model, optimizer)
        expected = train(twin, local(twin.parameters()))
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        same_state(model, twin)
        assert status(job_name)["version"] == STEPS
        optimizer.close()
        same_state(model, twin)
        model[0].weight.data += 1  # the memory is the model's own now


SPARSE: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"kind": "sgd", "lr": 0.5}, lambda p: torch.optim.SGD(p, 0.5)),
    "adagrad": (
        {"kind": "adagrad", "lr": 0.1, "eps": 1e-10},
        lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-10),
    ),
    # Its eps stands elsewhere than Adam's.
    "adam": (
        {"kind": "adam", "lr": 0.01, "eps": 1e-12},
        lambda p: torch.optim.SparseAdam(list(p), 0.01, eps=1e-12),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
@pytest.mark.parametrize("kind", sorted(SPARSE))
def test_sparse_embeddings_as_torch(kind: str, job_name: str) -> None:
    """Only the rows that a batch touches move, with their optimizer state."""
    settings, local = SPARSE[kind]

    def embedding() -> nn.EmbeddingBag:
        torch.manual_seed(5)
        return nn.EmbeddingBag(500, 3, sparse=True, mode="sum", padding_idx=0)

    def words() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        source = torch.Generator().manual_seed(12)
        for _ in range(STEPS):
            tokens = torch.randint(0, 40, (8, 6), generator=source)  # some of them repeated
            yield tokens, tokens[:, 0] % 3

    def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for tokens, targets in words():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), targets).backward()
            optimizer.step()

    with daemon(job_name, sync="bsp", optimizer=settings, shards=2):
        model, twin = embedding(), embedding()
        before = twin.weight.detach().clone()
        optimizer = Optimizer(model, job_name)
        learn(model, optimizer)
        learn(twin, local(twin.parameters()))
        same_state(model, twin)
        moved = (model.weight.detach() != before).any(1)
        assert not moved[40:].any()
        assert not moved[0], "the padding"
        assert moved[1:40].all()
        assert status(job_name)["gradients_applied"] == STEPS
        optimizer.close()


@pytest.mark.parametrize("view", [True, False])
def test_scheduler_view_and_batch_norm(view: bool, job_name: str) -> None:
    """All at once: the rate moves, weights are a view or a copy, statistics follow."""
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}):
        model, twin = batch_norm_model(), batch_norm_model()
        optimizer = Optimizer(model, job_name, view=view)
        local = torch.optim.SGD(twin.parameters(), 0.1)
        rate = torch.optim.lr_scheduler.StepLR
        losses = train(model, optimizer, rate(optimizer, 10, 0.5))
        expected = train(twin, local, rate(local, 10, 0.5))
        np.testing.assert_allclose(losses, expected, rtol=1e-3)
        same_state(model, twin)
        shared = optimizer.client.weights
        for name in ("1.running_mean", "1.running_var"):
            np.testing.assert_allclose(
                shared[name], twin.state_dict()[name].numpy(), rtol=1e-4, atol=1e-6
            )
        assert int(model[1].num_batches_tracked) == STEPS
        assert np.shares_memory(model[0].weight.detach().numpy(), optimizer.client.flat) == view
        if not view:
            with torch.no_grad():
                model[0].weight.zero_()  # the learner's own copy: no harm
        model.eval()
        twin.eval()
        optimizer.close()


def test_what_is_not_trained(job_name: str) -> None:
    """Frozen parameters stay local; constant buffers, even infinite ones, do no harm."""
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}):
        model = plain_model()
        model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        model.register_buffer("count", torch.zeros(3, dtype=torch.long))
        model[0].weight.requires_grad_(False)
        frozen = model[0].weight.detach().clone()
        optimizer = Optimizer(model, job_name)
        assert {one.name for one in optimizer.client.model.tensors} == {
            "0.bias",
            "2.weight",
            "2.bias",
            "mask",
        }
        losses = train(model, optimizer)
        torch.testing.assert_close(model[0].weight, frozen, rtol=0, atol=0)
        row = status(job_name)["learners"][0]
        assert (row["applied"], row["refused"]) == (STEPS, 0)
        assert np.mean(losses[-5:]) < np.mean(losses[:5])
        assert torch.isneginf(model.mask[0, 1])
        optimizer.close()


def test_what_cannot_be_trained(job_name: str) -> None:
    with daemon(job_name):
        model = plain_model()
        model[2].double()
        with pytest.raises(UsageError, match=r"'2\.weight' is torch\.float64.*float32"):
            Optimizer(model, job_name)
        with pytest.raises(UsageError, match="no parameters"):
            Optimizer(nn.ReLU(), job_name)
        with pytest.raises(UsageError, match="the model itself"):
            Optimizer(plain_model().parameters(), job_name)
        optimizer = Optimizer(plain_model(), job_name)
        with pytest.raises(UsageError, match="fixed"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        other = nn.Sequential(nn.Linear(10, 41), nn.Tanh(), nn.Linear(41, 3))
        with pytest.raises(ModelMismatch, match=r"'0\.weight' has shape \[41, 10\]"):
            Optimizer(other, job_name)
        optimizer.close()


def test_closure_and_missing_gradients(job_name: str) -> None:
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}):
        model = plain_model()
        optimizer = Optimizer(model, job_name)
        before = model[0].weight.detach().clone()
        optimizer.step()  # no backward yet: all gradients are zero
        torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)
        inputs, targets = next(data())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert status(job_name)["learners"][0]["loss"] == pytest.approx(float(loss.detach()))
        assert (model[0].weight != before).any()
        optimizer.close()


def test_two_learners_statistics_move_by_both(job_name: str) -> None:
    """Batch-norm statistics of the job have moved by every learner's batches."""
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.0}):
        models = [batch_norm_model(), batch_norm_model()]
        optimizers = [Optimizer(model, job_name) for model in models]
        total = np.zeros(40, np.float32)
        for number, (inputs, _) in enumerate(data(6)):
            model, optimizer = models[number % 2], optimizers[number % 2]
            before = model[1].running_mean.clone()
            model(inputs)
            total += (model[1].running_mean - before).numpy()
            optimizer.step()
            optimizer.client.wait_applied()
            optimizer.step()  # nothing has changed: it only pulls
            optimizer.client.wait_applied()
            for one in optimizers:
                shared = one.client.weights["1.running_mean"]
                np.testing.assert_allclose(shared, total, atol=1e-6)
        for optimizer in optimizers:
            optimizer.close()
        torch.testing.assert_close(models[0][1].running_mean, torch.from_numpy(total))


SCRIPT = """
import torch
from torch import nn
from gadei_ps.learners.torch import Optimizer, linear

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(20, 2)
inputs = torch.randn(400, 20)
targets = (inputs[:, 0] + inputs[:, 1] > 0).long()
optimizer = Optimizer(model)
for batch in optimizer.batches(samples=400, batch_size=10, epochs=6):
    at = torch.from_numpy(batch.indices)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs[at]), targets[at])
    loss.backward()
    optimizer.report(loss=loss)
    optimizer.step()
optimizer.close()
"""


def test_two_learners_run_one_script(job_name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.1}):
        env = os.environ | {"GADEI_PS_JOB": job_name}
        team = [subprocess.Popen([sys.executable, str(script)], env=env) for _ in range(2)]
        assert [child.wait(100) for child in team] == [0, 0]
        end = status(job_name)
        assert end["work"]["state"] == "done"
        assert end["gradients_applied"] == 40 * 6
        torch.manual_seed(0)
        model = nn.Linear(20, 2)
        inputs = torch.randn(400, 20)
        targets = (inputs[:, 0] + inputs[:, 1] > 0).long()
        before = nn.functional.cross_entropy(model(inputs), targets)
        with Client(job_name) as client:
            assert live_weights(job_name).size == client.model.elements
            with torch.no_grad():
                model.weight.copy_(torch.from_numpy(client.weights["weight"].copy()))
                model.bias.copy_(torch.from_numpy(client.weights["bias"].copy()))
        after = nn.functional.cross_entropy(model(inputs), targets)
        assert after < before / 2


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
        model(tokens, linear).sum().backward()  # nobody takes the products any more
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


def test_hooks_of_step_are_called(job_name: str) -> None:
    with daemon(job_name):
        model = plain_model()
        optimizer = Optimizer(model, job_name)
        called: list[str] = []
        first = optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        model(torch.zeros(2, 10)).sum().backward()
        optimizer.step()
        first.remove()
        optimizer.step()
        assert called == ["before", "after", "after"]
        optimizer.close()


def test_products_are_of_backward_only(job_name: str) -> None:
    """What autograd.grad, a frozen weight or autocast leave is none, or torch's own."""
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


def test_inputs_that_have_changed_are_noticed(job_name: str) -> None:
    with daemon(job_name):
        model = nn.Linear(6, 8, bias=False)
        optimizer = Optimizer(model, job_name, free_gradients=True)
        inputs = torch.randn(2, 6)
        model(inputs).sum().backward()
        inputs.zero_()
        with pytest.raises(UsageError, match=r"changed between backward\(\) and step\(\)"):
            optimizer.step()
        optimizer.close()


def test_what_has_no_gradient_is_zero_beside_products(job_name: str) -> None:
    """As in a dense frame: momentum goes on without it."""
    settings = {"kind": "momentum", "lr": 1.0, "momentum": 0.5}
    with daemon(job_name, sync="bsp", optimizer=settings):
        model = nn.ModuleDict(
            {"one": nn.Linear(16, 8, bias=False), "two": nn.Linear(4, 4, bias=False)}
        )
        start = model["two"].weight.detach().clone()
        optimizer = Optimizer(model, job_name)
        (
            linear(torch.ones(1, 16), model["one"].weight).sum() + model["two"].weight.sum()
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
        linear(torch.ones(1, 16), model["one"].weight).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model["two"].weight.detach(), start - 1.5)
        optimizer.close()


@pytest.mark.parametrize("own_data", [False, True])
def test_waves_are_sums_of_mini_batches(own_data: bool, job_name: str) -> None:
    """Under WSP the loop stays as it is; a wave leaves as one gradient."""
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
    """Waits until its learner's gradient is not wanted; says what ran."""

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
            told = status(job_name)
            assert (told["gradients_applied"], told["gradients_dropped"]) == (2, 1)
            other.send("go")
        optimizer.close()
