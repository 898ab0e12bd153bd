"""A PyTorch model on a GPU trains as it does on the CPU.

The emulated cases compute on the CPU, and all that comes and goes takes the way of the GPU's code.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from support import daemon, eventually, fork, status
from torch import nn

from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer, embedding, linear
from gadei_ps.learners.torch import gpu as torch_cuda
from gadei_ps.machine.cuda import missing as cuda_missing

STEPS = 30


@dataclass(frozen=True)
class Place:
    """Where the model under test computes."""

    device: str
    emulated: emulator.Device | None = None


def need_cuda() -> None:
    if why := cuda_missing():
        pytest.skip(why)
    if not torch.cuda.is_available():
        pytest.skip(f"PyTorch {torch.__version__} sees no GPU")


def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(torch_cuda, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch_cuda, "_current_stream", lambda device: 0)
    with emulator.installed(inline=True) as device:
        device.foreign = True
        yield Place("cpu", device)


def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    need_cuda()
    yield Place("cuda")


@pytest.fixture(params=[emulated, pytest.param(cuda, marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield from request.param(monkeypatch)
    torch.set_num_threads(threads)


class Words(nn.Module):
    """An embedding of which a mini-batch names few rows, some twice, padding among them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, padding_idx=0, sparse=True)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = (inputs.abs() * 7).long() % 50
        return self.out(self.table(tokens).mean(1))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 3))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "batch norm": batch_norm,
    "words": Words,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> list[torch.Tensor]:
    """The user's loop, on either."""
    source = torch.Generator().manual_seed(11)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(16, 10, generator=source)
        targets = (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        if isinstance(optimizer, Optimizer):
            optimizer.report(loss=loss, samples=16)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def same_state(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", MODELS)
def test_as_torch(gpu: Place, name: str, job_name: str) -> None:
    """Under BSP a lone learner goes on when its gradient is in the weights."""
    torch.manual_seed(3)
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    model.to(gpu.device)
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}, shards=2):
        optimizer = Optimizer(model, job_name)
        losses = train(model, optimizer, gpu.device)
        expected = train(twin, torch.optim.SGD(twin.parameters(), 0.1), "cpu")
        for mine, theirs in zip(losses, expected, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)
        told = status(job_name)
        assert told["version"] == STEPS
        assert told["samples"] == 16 * STEPS
        np.testing.assert_allclose(told["learners"][0]["loss"], losses[-1].item(), rtol=1e-6)
        optimizer.close()
        same_state(model, twin)
        next(model.parameters()).data += 1  # the memory is the model's own now


@pytest.mark.parametrize(
    ("wire", "feedback"), [("float32", False), ("bfloat16", False), ("float16", True)]
)
def test_each_gradient_once(gpu: Place, wire: str, feedback: bool, job_name: str) -> None:
    """Under ASP weights and gradients are on their way while the next step computes."""
    model = plain().to(gpu.device)
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 2.0**-12}):
        optimizer = Optimizer(model, job_name, wire=wire, error_feedback=feedback)
        begin = {name: array.copy() for name, array in optimizer.client.weights.items()}
        before = [id(parameter) for parameter in model.parameters()]
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        for number in range(1, 41):
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in model.parameters()).mul(number).backward()
            optimizer.step()
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        assert [id(parameter) for parameter in model.parameters()] == before
        optimizer._gpu.flush()
        optimizer.client.wait_applied()
        moved = 40 * 41 / 2 / 2**12
        for name, array in optimizer.client.weights.items():
            np.testing.assert_allclose(begin[name] - array, moved, rtol=1e-4, atol=1e-5)
        eventually(lambda: optimizer._pull() or optimizer._gpu._version == 40)
        optimizer.close()
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(
                begin[name] - parameter.detach().cpu().numpy(), moved, rtol=1e-4, atol=1e-5
            )
        assert status(job_name)["gradients_applied"] == 40


def _push_ones(pipe: Any, job: str) -> None:
    client = Client(job)
    ones = np.ones(client.model.elements, np.float32)
    pipe.send("attached")
    for _ in range(50):
        client.push(ones)
    client.wait_applied()
    pipe.send("done")


def test_beside_learners_on_the_host(gpu: Place, job_name: str) -> None:
    model = plain().to(gpu.device)
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 2.0**-12}):
        optimizer = Optimizer(model, job_name)
        begin = optimizer.client.weights["0.weight"].copy()
        with fork(1, _push_ones, job_name) as (other,):
            assert other.receive() == "attached"
            for _ in range(50):
                optimizer.zero_grad()
                sum(parameter.sum() for parameter in model.parameters()).backward()
                optimizer.step()
            assert other.receive() == "done"
        optimizer.close()
        moved = begin - model[0].weight.detach().cpu().numpy()
        np.testing.assert_allclose(moved, 100 / 2**12, rtol=1e-4)


def test_batches_of_the_server(gpu: Place, job_name: str) -> None:
    model = plain().to(gpu.device)
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.01}):
        optimizer = Optimizer(model, job_name)
        inputs = torch.randn(64, 10).to(gpu.device)
        seen: list[int] = []
        for batch in optimizer.batches(64, 8, epochs=2):
            optimizer.zero_grad()
            model(inputs[batch.indices]).square().mean().backward()
            optimizer.step()
            seen += batch.indices.tolist()
        assert sorted(seen) == sorted([*range(64), *range(64)])
        optimizer.close()
        assert status(job_name)["version"] == 16


def test_rows_are_read_from_the_segment(gpu: Place, job_name: str) -> None:
    """A layer's, and those of a weight of one's own; other learners' writes show at once."""
    model = Words().to(gpu.device)
    model.own = nn.Parameter(torch.zeros(20, 4, device=gpu.device))
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}):
        optimizer = Optimizer(model, job_name)
        client = Client(job_name)
        client.push({"own": np.full((20, 4), -2, np.float32)})
        client.wait_applied()
        indices = torch.tensor([[3, 3], [19, 0]], device=gpu.device)
        rows = embedding(indices, model.own, padding_idx=0)
        assert rows.shape == (2, 2, 4)
        np.testing.assert_array_equal(rows.detach().cpu().numpy(), 2.0)
        rows.sum().backward()
        optimizer.step()
        optimizer._gpu.flush()
        optimizer.client.wait_applied()
        own = client.weights["own"]
        np.testing.assert_array_equal(own[3], 0)  # named twice
        np.testing.assert_array_equal(own[19], 1)
        np.testing.assert_array_equal(own[0], 2)  # padding
        several = torch.arange(12, device=gpu.device).view(4, 3)
        for some in (indices, several[:, 0], several[:, 1:], several[0, 0].expand(5)):
            table = model.table(some).detach().cpu().numpy()
            np.testing.assert_array_equal(table, client.weights["table.weight"][some.cpu()])
        optimizer.close()
        np.testing.assert_array_equal(model.own.detach().cpu().numpy(), own)
        client.detach()


class Tied(nn.Module):
    """A weight that is looked up in, and a matrix as well; and a buffer that lies across."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)
        self.register_buffer("across", torch.arange(6.0).view(2, 3).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.table(tokens), self.table.weight)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_tied_weight_stays_current(gpu: Place, sync: str, job_name: str) -> None:
    torch.manual_seed(0)
    model = Tied().to(gpu.device)
    with daemon(job_name, sync=sync, optimizer={"kind": "sgd", "lr": 0.1}):
        optimizer = Optimizer(model, job_name)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.arange(10, device=gpu.device)).sum().backward()
            model.across += 1
            optimizer.step()
            optimizer._gpu.flush()
            optimizer.client.wait_applied()
            done = step + 1
            eventually(lambda done=done: optimizer._pull() or optimizer._gpu._version == done)
            weight = optimizer.client.weights["table.weight"]
            np.testing.assert_array_equal(model.table.weight.detach().cpu().numpy(), weight)
        optimizer.close()
        across = model.across.cpu().numpy()
        np.testing.assert_array_equal(across, np.arange(6.0).reshape(2, 3).T + 5)


def test_recurrent_layers_of_another_learner(gpu: Place, job_name: str) -> None:
    """Who made the job's model has put the biases first."""
    torch.manual_seed(0)
    model = nn.LSTM(8, 16, num_layers=2)
    arrays = {name: one.detach().numpy().copy() for name, one in model.named_parameters()}
    first = dict(sorted(arrays.items(), key=lambda one: one[0]))
    with daemon(job_name), Client(job_name, tensors=first):
        optimizer = Optimizer(model.to(gpu.device), job_name)
        for name, parameter in model.named_parameters():
            np.testing.assert_array_equal(parameter.detach().cpu().numpy(), arrays[name])
        optimizer.close()


@pytest.mark.gpu
def test_what_is_in_the_wrong_place(job_name: str) -> None:
    need_cuda()
    model = nn.Embedding(50, 8, sparse=True).cuda()
    with daemon(job_name):
        optimizer = Optimizer(model, job_name)
        with pytest.raises(UsageError, match="indices on cpu into an embedding on cuda"):
            model(torch.arange(3))
        loss = model(torch.arange(3).cuda()).sum()
        loss.backward()
        optimizer.report(loss=loss.cpu())
        optimizer.step()
        optimizer._gpu.flush()
        optimizer.client.wait_applied()
        told = status(job_name)["learners"][0]["loss"]
        assert told == pytest.approx(loss.item(), rel=1e-6)
        optimizer.close()


@pytest.mark.filterwarnings("ignore:RNN module weights")  # cuDNN says so, and copies them
def test_recurrent_layers_with_gaps(gpu: Place, job_name: str) -> None:
    """Whose sizes leave gaps between them are no piece for cuDNN, and right all the same."""
    torch.manual_seed(0)
    model = nn.GRU(3, 5)
    twin = copy.deepcopy(model)
    model.to(gpu.device)
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}, shards=1):
        optimizer = Optimizer(model, job_name)
        local = torch.optim.SGD(twin.parameters(), 0.1)
        inputs = torch.randn(4, 2, 3)
        for _ in range(5):
            for one, moves, device in ((model, optimizer, gpu.device), (twin, local, "cpu")):
                moves.zero_grad()
                one(inputs.to(device))[0].square().sum().backward()
                moves.step()
        optimizer.close()
        same_state(model, twin)


def test_recurrent_layers_stay_in_one_piece(gpu: Place, job_name: str) -> None:
    """As cuDNN wants them: matrices, then biases, from the storage's begin on."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 16, num_layers=2, bidirectional=True))
    model.to(gpu.device)
    with daemon(job_name):
        optimizer = Optimizer(model, job_name)
        lstm = model[1]
        names = [name for name, _ in lstm.named_parameters()]
        at = 0
        for name in sorted(names, key=lambda name: name.startswith("bias")):
            parameter = getattr(lstm, name)
            assert parameter.storage_offset() == at
            at += parameter.numel()
        assert len({one.untyped_storage().data_ptr() for one in lstm.parameters()}) == 1
        lstm.flatten_parameters()
        outputs, _ = model(torch.ones(3, 2, 4, device=gpu.device))
        outputs.sum().backward()
        optimizer.step()
        optimizer._gpu.flush()
        optimizer.client.wait_applied()
        eventually(lambda: optimizer._pull() or optimizer._gpu._version == 1)
        for name, array in optimizer.client.weights.items():
            np.testing.assert_array_equal(model.get_parameter(name).detach().cpu().numpy(), array)
        optimizer.close()
        assert lstm.flatten_parameters() is None  # torch's own again


def test_a_row_that_there_is_not(gpu: Place, job_name: str) -> None:
    model = nn.Embedding(50, 8, sparse=True).to(gpu.device)
    with daemon(job_name):
        optimizer = Optimizer(model, job_name)
        model(torch.tensor([1, 50], device=gpu.device)).sum().backward()
        optimizer.step()
        with pytest.raises(ModelMismatch, match="'weight'"):
            optimizer._gpu.flush()
        optimizer.close()
        assert status(job_name)["gradients_applied"] == 0


def test_what_is_for_the_host(gpu: Place, job_name: str) -> None:
    model = plain().to(gpu.device)
    with daemon(job_name):
        with pytest.raises(UsageError, match="free_gradients"):
            Optimizer(model, job_name, free_gradients=True)
        optimizer = Optimizer(model, job_name)
        inputs = torch.randn(2, 10).to(gpu.device)
        weight = model[0].weight
        torch.testing.assert_close(linear(inputs, weight), nn.functional.linear(inputs, weight))
        linear(inputs, weight).sum().backward()
        assert weight.grad is not None
        optimizer.close()


@pytest.mark.gpu
def test_cuda_graph(job_name: str) -> None:
    """A graph that was captured once reads each step's weights: they stay where they are."""
    need_cuda()
    torch.manual_seed(3)
    model = plain()
    twin = copy.deepcopy(model)
    model.cuda()
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}):
        optimizer = Optimizer(model, job_name)
        inputs, targets = torch.zeros(16, 10).cuda(), torch.zeros(16, dtype=torch.int64).cuda()

        def forward_and_backward() -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what a first call sets up is no part of a graph
            forward_and_backward()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = forward_and_backward()
        local = torch.optim.SGD(twin.parameters(), 0.1)
        source = torch.Generator().manual_seed(11)
        for _ in range(STEPS):
            given = torch.randn(16, 10, generator=source)
            wanted = (given.sum(1) > 0).long()
            inputs.copy_(given)
            targets.copy_(wanted)
            graph.replay()
            optimizer.report(loss=loss)
            optimizer.step()
            local.zero_grad()
            expected = nn.functional.cross_entropy(twin(given), wanted)
            expected.backward()
            local.step()
            torch.testing.assert_close(loss.cpu(), expected, rtol=1e-3, atol=1e-4)
        optimizer.close()
        same_state(model, twin)


@pytest.mark.gpu
def test_memory_comes_back(job_name: str) -> None:
    """What a learner had on the device is free again once it has left."""
    need_cuda()
    import cupy

    with daemon(job_name):
        held = []
        for _ in range(4):
            model = nn.Linear(1000, 1000).cuda()
            optimizer = Optimizer(model, job_name)
            model(torch.ones(1, 1000).cuda()).sum().backward()
            optimizer.step()
            optimizer.close()
            del model, optimizer
            gc.collect()
            held.append(cupy.get_default_memory_pool().used_bytes())
        assert held[-1] <= held[0]


@pytest.mark.gpu
def test_jax(job_name: str) -> None:
    need_cuda()
    pytest.importorskip("jax")
    example = Path(__file__).parents[2] / "examples" / "jax_learner.py"
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.1}):
        environment = os.environ | {
            "GADEI_PS_JOB": job_name,
            "GADEI_PS_DEVICE": "cuda",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        subprocess.run([sys.executable, example], env=environment, check=True, timeout=100)
        told = status(job_name)
        assert told["gradients_applied"] == 2000
        assert not told["gradients_refused"]
