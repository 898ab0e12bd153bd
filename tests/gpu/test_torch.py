"""A PyTorch model on a GPU trains as it does on the CPU."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from support import PATIENCE_S, daemon, eventually, fork, status
from support.torch_models import batch_norm_model, close_late, plain_model, same_state
from torch import nn
from torch_devices import Words, arrived, installed, need_cuda
from torch_devices import gpu as gpu

from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer, embedding, gpu_backend, linear

STEPS = 30
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain_model,
    "batch norm": batch_norm_model,
    "words": Words,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> list[torch.Tensor]:
    """The user's loop, for both optimizers."""
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


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("name", "sync"), [*((name, "bsp") for name in MODELS), ("plain", "asp"), ("batch norm", "asp")]
)
def test_as_torch(gpu: str, name: str, sync: str, job_name: str) -> None:
    """A lone learner continues when its gradient is in the weights: under BSP, or if it waits."""
    torch.manual_seed(3)
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    model.to(gpu)
    with daemon(job_name, sync=sync, optimizer={"kind": "sgd", "lr": 0.1}, shards=2):
        optimizer = Optimizer(model, job_name, wait=sync == "asp")
        losses = train(model, optimizer, gpu)
        expected = train(twin, torch.optim.SGD(twin.parameters(), 0.1), "cpu")
        for mine, theirs in zip(losses, expected, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)
        report = status(job_name)
        assert report["gradients_applied"] == STEPS
        assert report["samples"] == 16 * STEPS
        np.testing.assert_allclose(report["learners"][0]["loss"], losses[-1].item(), rtol=1e-6)
        other = {
            name: one + 1 if one.is_floating_point() else one
            for name, one in model.state_dict().items()
        }
        first, weight = next(iter(model.named_parameters()))
        kept = {name: one.clone() for name, one in model.state_dict().items()}
        shared = {name: optimizer.client.weights[name] for name, _ in model.named_parameters()}
        before = {name: array.copy() for name, array in shared.items()}
        model.load_state_dict(other)
        with optimizer.pause():
            torch.testing.assert_close(weight, other[first])
        for name, array in shared.items():
            np.testing.assert_array_equal(array, before[name])
        optimizer.zero_grad()
        optimizer.step()  # with no gradient, so that only what was loaded comes to the job
        for name, array in shared.items():
            np.testing.assert_array_equal(array, other[name].detach().cpu().numpy())
        optimizer.assign(kept | {name: torch.from_numpy(one) for name, one in before.items()})
        optimizer.close()
        same_state(model, twin)
        next(model.parameters()).data += 1  # the memory is the model's own now


def test_a_start_does_not_load_the_compiler(
    gpu: str, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train eager code without it, rows included: its import takes seconds."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import of it fails
    model = Words().to(gpu)
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.1}):
        optimizer = Optimizer(model, job_name)
        train(model, optimizer, gpu)
        optimizer.close()
        assert status(job_name)["gradients_applied"] == STEPS


@pytest.mark.parametrize(
    ("wire", "feedback"), [("float32", False), ("bfloat16", False), ("float16", True)]
)
def test_each_gradient_once(gpu: str, wire: str, feedback: bool, job_name: str) -> None:
    """Check ASP, where weights and gradients are on their way while the next step computes."""
    model = plain_model().to(gpu)
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
        optimizer.client.wait_applied()
        moved = 40 * 41 / 2 / 2**12
        for name, array in optimizer.client.weights.items():
            np.testing.assert_allclose(begin[name] - array, moved, rtol=1e-4, atol=1e-5)
        eventually(lambda: arrived(optimizer, 40))
        optimizer.close()
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(
                begin[name] - parameter.detach().cpu().numpy(), moved, rtol=1e-4, atol=1e-5
            )
        assert status(job_name)["gradients_applied"] == 40


def _push_ones(pipe: Connection, job: str) -> None:
    client = Client(job)
    ones = np.ones(client.model.elements, np.float32)
    pipe.send("attached")
    for _ in range(50):
        client.push(ones)
    client.wait_applied()
    pipe.send("done")


def test_beside_learners_on_the_host(gpu: str, job_name: str) -> None:
    model = plain_model().to(gpu)
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


def test_closed_with_its_last_gradient(gpu: str, job_name: str) -> None:
    """Check that close() leaves all gradients of this learner in the model."""
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 2.0**-12}, hang_s=60):
        model = plain_model().to(gpu)
        optimizer = Optimizer(model, job_name)
        begin = model[0].weight.detach().cpu().clone()
        close_late(optimizer, model, job_name)
        np.testing.assert_allclose(begin - model[0].weight.detach().cpu(), 2.0**-12, rtol=1e-4)


def test_a_step_is_one_launch(monkeypatch: pytest.MonkeyPatch, job_name: str) -> None:
    """Stage rows and whole tensors, and copy pulled weights."""
    called: list[str] = []

    def step() -> bool:
        optimizer.zero_grad()
        model(torch.randn(4, 10)).sum().backward()
        called.clear()
        before = optimizer.backend.version
        optimizer.step()
        return optimizer.backend.version > before and called.count("cuLaunchKernel") == 1

    with installed(monkeypatch) as device, daemon(job_name):
        model = Words()
        optimizer = Optimizer(model, job_name)
        device.fails = lambda name: called.append(name) or 0  # type: ignore[func-returns-value]
        eventually(step)
        optimizer.close()


def test_weights_that_a_closure_loads(gpu: str, job_name: str) -> None:
    """No pulled weights come over them."""
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.001}):
        model = nn.Linear(3, 2).to(gpu)
        optimizer = Optimizer(model, job_name)
        for loaded in range(7, 27):
            state = {name: torch.full_like(one, loaded) for name, one in model.state_dict().items()}

            def closure(state: dict[str, torch.Tensor] = state) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(4, 3, device=gpu)).mean()
                loss.backward()
                model.load_state_dict(state)
                return loss

            for _ in range(3):  # so that weights are pulled
                optimizer.zero_grad()
                model(torch.ones(4, 3, device=gpu)).mean().backward()
                optimizer.step()
            optimizer.step(closure)
            optimizer.step()
            optimizer.client.wait_applied()
            for array in optimizer.client.weights.values():
                np.testing.assert_allclose(array, loaded, atol=0.1)
        optimizer.close()


def test_batches_of_the_server(gpu: str, job_name: str) -> None:
    model = plain_model().to(gpu)
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.01}):
        optimizer = Optimizer(model, job_name)
        inputs = torch.randn(64, 10).to(gpu)
        seen: list[int] = []
        for batch in optimizer.batches(64, 8, epochs=2):
            optimizer.zero_grad()
            model(inputs[batch.indices]).square().mean().backward()
            optimizer.step()
            seen += batch.indices.tolist()
        assert sorted(seen) == sorted([*range(64), *range(64)])
        optimizer.close()
        assert status(job_name)["version"] == 16


def test_free_gradients_and_products_are_for_the_cpu(gpu: str, job_name: str) -> None:
    model = plain_model().to(gpu)
    with daemon(job_name):
        with pytest.raises(UsageError, match="free_gradients"):
            Optimizer(model, job_name, free_gradients=True)
        optimizer = Optimizer(model, job_name)
        inputs = torch.randn(2, 10).to(gpu)
        weight = model[0].weight
        torch.testing.assert_close(linear(inputs, weight), nn.functional.linear(inputs, weight))
        linear(inputs, weight).sum().backward()
        assert weight.grad is not None
        optimizer.close()


def captured(
    optimizer: Optimizer, call: Callable[[], torch.Tensor]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of the call, and what it returns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # outside of the graph: what the first call sets up
        call()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = call()
    return graph, loss


@pytest.mark.gpu
def test_cuda_graph_of_rows(job_name: str) -> None:
    """A graph reads rows from the segment, and each step pushes the gradient of its replay."""
    need_cuda()
    torch.manual_seed(3)
    model = nn.ParameterDict({"rows": torch.randn(20, 4)})
    twin = copy.deepcopy(model)
    model.cuda()
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}):
        optimizer = Optimizer(model, job_name)
        indices = torch.zeros(6, dtype=torch.int64).cuda()

        def forward_and_backward() -> torch.Tensor:
            loss = embedding(indices, model["rows"], 0).square().sum()
            loss.backward()
            return loss

        graph, loss = captured(optimizer, forward_and_backward)
        local = torch.optim.SGD(twin.parameters(), 0.1)
        for _ in range(5):
            given = torch.randint(20, (6,))
            indices.copy_(given)
            graph.replay()
            optimizer.report(loss=loss)
            optimizer.step()
            local.zero_grad()
            expected = nn.functional.embedding(given, twin["rows"], 0).square().sum()
            expected.backward()
            local.step()
            torch.testing.assert_close(loss.cpu(), expected, rtol=1e-3, atol=1e-4)
        optimizer.close()
        same_state(model, twin)


@pytest.mark.gpu
def test_cuda_graph(job_name: str) -> None:
    """A graph that was captured once reads each step's weights: their addresses stay."""
    need_cuda()
    torch.manual_seed(3)
    model = plain_model()
    twin = copy.deepcopy(model)
    model.cuda()
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}):
        optimizer = Optimizer(model, job_name)
        inputs, targets = torch.zeros(16, 10).cuda(), torch.zeros(16, dtype=torch.int64).cuda()

        def forward_and_backward() -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        graph, loss = captured(optimizer, forward_and_backward)
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
        with pytest.raises(UsageError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            inputs.zero_()  # torch warns of an empty graph
            optimizer.step()
        optimizer.close()
        same_state(model, twin)


def test_a_cuda_graph_of_a_step(monkeypatch: pytest.MonkeyPatch, job_name: str) -> None:
    """It is refused before any of it is captured, and the next step works."""
    with installed(monkeypatch) as device, daemon(job_name, optimizer={"kind": "sgd", "lr": 0.1}):
        model = plain_model()
        optimizer = Optimizer(model, job_name)
        train(model, optimizer, "cpu")
        with monkeypatch.context() as patch:
            patch.setattr(gpu_backend, "is_capturing", lambda: True)
            device.fails = lambda name: 900 if name == "cuEventQuery" else 0
            with pytest.raises(UsageError, match=r"a CUDA graph cannot contain step\(\)"):
                optimizer.step()
        device.fails = lambda name: 0
        assert optimizer.client.published == STEPS
        train(model, optimizer, "cpu")
        optimizer.close()


@pytest.mark.gpu
def test_memory_comes_back(job_name: str) -> None:
    """A learner that has left holds no memory of the device."""
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
        subprocess.run([sys.executable, example], env=environment, check=True, timeout=PATIENCE_S)
        report = status(job_name)
        assert report["gradients_applied"] == 2000
        assert not report["gradients_refused"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", MODELS)
def test_assigned_weights(gpu: str, name: str, job_name: str) -> None:
    """They are in the model when the call returns; training continues from there, as on the CPU."""
    torch.manual_seed(3)
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    model.to(gpu)
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.05}, sync="bsp") as job:
        optimizer, plain = Optimizer(model, job_name), torch.optim.SGD(twin.parameters(), 0.05)
        best = copy.deepcopy(model.state_dict())
        train(model, optimizer, gpu)
        optimizer.assign(best)
        if name != "words":  # of a table, pulls bring only the rows that are looked up
            same_state(model, twin)
        train(model, optimizer, gpu)
        train(twin, plain, "cpu")
        optimizer.close()
        same_state(model, twin)
        job.check()


def test_own_buffers_make_no_gradient_stale(gpu: str, job_name: str) -> None:
    """They are written between the pull of the weights and the push of their gradient."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6)).to(gpu)
    with daemon(job_name, optimizer={"kind": "momentum", "lr": 0.05}) as job:
        optimizer = Optimizer(model, job_name, wait=True)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(8, 4, device=gpu)).square().mean().backward()
            optimizer.client.assign({"1.running_mean": torch.zeros(6).numpy()}, wait=False)
            optimizer.step()
        (learner,) = status(job_name)["learners"]
        assert (learner["applied"], learner["staleness_max"]) == (20, 0)
        optimizer.close()
        job.check()


def test_saved_and_resumed(gpu: str, job_name: str) -> None:
    """Momentum and moments come to the model's device and go back."""
    settings = {"kind": "adam", "lr": 0.01}
    model, twin = plain_model().to(gpu), plain_model()
    with daemon(job_name, optimizer=settings, sync="bsp") as job:
        optimizer, plain = Optimizer(model, job_name), torch.optim.Adam(twin.parameters(), 0.01)
        train(twin, plain, "cpu")
        optimizer.assign(twin.state_dict())
        optimizer.load_state_dict(plain.state_dict())
        state = optimizer.state_dict()["state"]
        for number, one in plain.state_dict()["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert state[number][name].device == next(model.parameters()).device
                torch.testing.assert_close(state[number][name].cpu(), one[name])
        train(model, optimizer, gpu)
        train(twin, plain, "cpu")
        optimizer.close()
        same_state(model, twin)
        job.check()
