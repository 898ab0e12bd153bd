"""Layers of PyTorch that read or keep their weights in a way of their own on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support import daemon, eventually, status
from support.torch_models import same_state
from torch import nn
from torch_devices import Words, arrived, need_cuda
from torch_devices import gpu as gpu

from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer, embedding


def test_rows_are_read_from_the_segment(gpu: str, job_name: str) -> None:
    """Read them by a layer, and by embedding(); other learners' writes show at once."""
    model = Words().to(gpu)
    model.own = nn.Parameter(torch.zeros(20, 4, device=gpu))
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}):
        optimizer = Optimizer(model, job_name)
        client = Client(job_name)
        client.push({"own": np.full((20, 4), -2, np.float32)})
        client.wait_applied()
        indices = torch.tensor([[3, 3], [19, 0]], device=gpu)
        rows = embedding(indices, model.own, padding_idx=0)
        assert rows.shape == (2, 2, 4)
        np.testing.assert_array_equal(rows.detach().cpu().numpy(), 2.0)
        rows.sum().backward()
        optimizer.step()
        optimizer.client.wait_applied()
        own = client.weights["own"]
        np.testing.assert_array_equal(own[3], 0)  # named twice
        np.testing.assert_array_equal(own[19], 1)
        np.testing.assert_array_equal(own[0], 2)  # padding
        several = torch.arange(12, device=gpu).view(4, 3)
        for some in (
            indices,
            several[:, 0],
            several[:, 1:],
            several[0, 0].expand(5),
            several.int(),
        ):
            table = model.table(some).detach().cpu().numpy()
            np.testing.assert_array_equal(table, client.weights["table.weight"][some.cpu()])
        optimizer.close()
        np.testing.assert_array_equal(model.own.detach().cpu().numpy(), own)
        client.detach()


def looked_up(where: str, weight: torch.Tensor, look_up: Callable[..., torch.Tensor]) -> None:
    """Use rows 0 to 5 of a weight of eight rows, several ways; backward()."""
    device = weight.device
    first = torch.tensor([[1, 0], [5, 1]], device=device)
    second = torch.tensor([0, 3, 4, 3], dtype=torch.int32, device=device)
    paddings = {"one": 0, "none": None, "two": 3}
    scale = torch.arange(1.0, 13.0, device=device).view(2, 2, 3)
    look_up(first, weight, 0, sparse=True).mul(scale).sum().backward()
    if where in paddings:
        rows = look_up(second, weight, paddings[where], sparse=True)
        (rows.mul_(2) + look_up(second[:0], weight, 0, sparse=True).sum()).sum().backward()
    elif where == "whole":
        (weight * weight).sum().backward()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("where", ["alone", "one", "none", "two", "whole"])
def test_a_gradient_of_rows_is_left_to_the_step(gpu: str, where: str, job_name: str) -> None:
    torch.manual_seed(3)
    model = nn.ParameterDict({"rows": torch.randn(8, 3)})
    twin = copy.deepcopy(model)
    weight = model.to(gpu)["rows"]
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.5}):
        optimizer, plain = Optimizer(model, job_name), torch.optim.SGD(twin.parameters(), 0.5)
        looked_up(where, weight, embedding)
        assert (weight.grad is not None) == (where == "whole")
        optimizer.zero_grad()  # undoes that backward()
        for _ in range(3):
            optimizer.zero_grad()
            looked_up(where, weight, embedding)
            optimizer.step()
            plain.zero_grad()
            looked_up(where, twin["rows"], nn.functional.embedding)
            plain.step()
        optimizer.close()
        same_state(model, twin)


def _hooked(weight: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    weight.register_hook(lambda gradient: seen.append(gradient))
    embedding(indices, weight, 1).sum().backward()
    return seen


def _accumulated(weight: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    embedding(indices, weight, 1).sum().backward()
    return seen


def _in_autocast(weight: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    torch.set_autocast_enabled("cuda", True)  # torch.autocast refuses it without a GPU
    try:
        rows = embedding(indices, weight, 1)
    finally:
        torch.set_autocast_enabled("cuda", False)
    rows.sum().backward()
    return [weight.grad]


def _twice(weight: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    rows = embedding(indices, weight, 1)
    rows.sum().backward(create_graph=True)
    return [weight.grad]


def _taken(weight: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(embedding(indices, weight, 1).sum(), weight))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # create_graph
@pytest.mark.parametrize("use", [_hooked, _accumulated, _in_autocast, _twice, _taken])
def test_a_gradient_of_rows_that_is_seen(
    gpu: str, use: Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]], job_name: str
) -> None:
    """Check that weight.grad is as torch's where something may read it before step()."""
    model = nn.ParameterDict({"rows": torch.zeros(8, 3)}).to(gpu)
    with daemon(job_name):
        optimizer = Optimizer(model, job_name)
        (gradient,) = use(model["rows"], torch.tensor([1, 2, 2], device=gpu))
        expected = torch.zeros(8, 3)
        expected[2] = 2
        assert gradient.is_sparse
        torch.testing.assert_close(gradient.detach().to_dense().cpu(), expected)
        optimizer.step()
        assert not status(job_name)["gradients_refused"]
        optimizer.close()


def test_the_gradient_of_a_sparse_layer_can_be_read(gpu: str, job_name: str) -> None:
    layer = nn.Embedding(8, 3, padding_idx=-7, sparse=True).to(gpu)
    with daemon(job_name):
        optimizer = Optimizer(layer, job_name)
        for kind in (torch.int64, torch.int32):
            layer(torch.tensor([1, 2, 2], dtype=kind, device=gpu)).sum().backward()
        rows = layer.weight.grad.to_dense().sum(1)
        assert rows.tolist() == [0, 0, 12, 0, 0, 0, 0, 0]
        optimizer.close()


@pytest.mark.parametrize("which", ["indices", "gradient"])
def test_rows_that_are_changed_before_the_step(gpu: str, which: str, job_name: str) -> None:
    model = nn.ParameterDict({"rows": torch.zeros(8, 3)}).to(gpu)
    with daemon(job_name):
        optimizer = Optimizer(model, job_name)
        indices = torch.tensor([1, 2], device=gpu)
        gradient = torch.ones(2, 3, device=gpu)
        embedding(indices, model["rows"]).backward(gradient)
        (indices if which == "indices" else gradient).add_(1)
        with pytest.raises(UsageError, match="of an embedding's rows, were changed between"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.close()


class OwnWords(Words):
    """Words that calls embedding()."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(50, 8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = (inputs.abs() * 7).long() % 50
        return self.out(embedding(tokens, self.rows, 0).mean(1))


@pytest.mark.filterwarnings("ignore")  # torch's tracer gives several
@pytest.mark.parametrize("made", [Words, OwnWords])
def test_compiled_code_reads_rows(gpu: str, made: Callable[[], nn.Module], job_name: str) -> None:
    """torch.compile does not trace how they are read."""
    torch.manual_seed(3)
    model = made()
    twin = copy.deepcopy(model)
    model.to(gpu)
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}):
        optimizer, plain = Optimizer(model, job_name), torch.optim.SGD(twin.parameters(), 0.1)
        compiled = torch.compile(model, backend="eager")
        source = torch.Generator().manual_seed(11)
        for _ in range(3):
            inputs = torch.randn(16, 10, generator=source)
            for one, by, device in ((compiled, optimizer, gpu), (twin, plain, "cpu")):
                by.zero_grad()
                one(inputs.to(device)).square().mean().backward()
                by.step()
        assert not status(job_name)["gradients_refused"]
        optimizer.close()
        same_state(model, twin)


class Tied(nn.Module):
    """A weight that is both a table and a matrix; and a buffer that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)
        self.register_buffer("across", torch.arange(6.0).view(2, 3).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.table(tokens), self.table.weight)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_tied_weight_stays_current(gpu: str, sync: str, job_name: str) -> None:
    torch.manual_seed(0)
    model = Tied().to(gpu)
    with daemon(job_name, sync=sync, optimizer={"kind": "sgd", "lr": 0.1}):
        optimizer = Optimizer(model, job_name)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.arange(10, device=gpu)).sum().backward()
            model.across += 1
            optimizer.step()
            optimizer.client.wait_applied()
            done = step + 1
            eventually(lambda done=done: arrived(optimizer, done))
            weight = optimizer.client.weights["table.weight"]
            np.testing.assert_array_equal(model.table.weight.detach().cpu().numpy(), weight)
        optimizer.close()
        across = model.across.cpu().numpy()
        np.testing.assert_array_equal(across, np.arange(6.0).reshape(2, 3).T + 5)


def test_recurrent_layers_of_another_learner(gpu: str, job_name: str) -> None:
    """The learner that made the job's model has put the biases first."""
    torch.manual_seed(0)
    model = nn.LSTM(8, 16, num_layers=2)
    arrays = {name: one.detach().numpy().copy() for name, one in model.named_parameters()}
    first = dict(sorted(arrays.items(), key=lambda one: one[0]))
    with daemon(job_name), Client(job_name, tensors=first):
        optimizer = Optimizer(model.to(gpu), job_name)
        for name, parameter in model.named_parameters():
            np.testing.assert_array_equal(parameter.detach().cpu().numpy(), arrays[name])
        optimizer.close()


@pytest.mark.gpu
def test_indices_and_losses_on_the_cpu(job_name: str) -> None:
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
        optimizer.client.wait_applied()
        reported = status(job_name)["learners"][0]["loss"]
        assert reported == pytest.approx(loss.item(), rel=1e-6)
        optimizer.close()


@pytest.mark.filterwarnings("ignore:RNN module weights")  # cuDNN warns, and copies them
def test_recurrent_layers_with_gaps(gpu: str, job_name: str) -> None:
    """Check tensors with gaps: they are not one piece for cuDNN; the results are right."""
    torch.manual_seed(0)
    model = nn.GRU(3, 5)
    twin = copy.deepcopy(model)
    model.to(gpu)
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}, shards=1):
        optimizer = Optimizer(model, job_name)
        local = torch.optim.SGD(twin.parameters(), 0.1)
        inputs = torch.randn(4, 2, 3)
        for _ in range(5):
            for one, moves, device in ((model, optimizer, gpu), (twin, local, "cpu")):
                moves.zero_grad()
                one(inputs.to(device))[0].square().sum().backward()
                moves.step()
        optimizer.close()
        same_state(model, twin)


def test_recurrent_layers_stay_in_one_piece(gpu: str, job_name: str) -> None:
    """Check the order that cuDNN requires: matrices, then biases, from the start of one storage."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 16, num_layers=2, bidirectional=True))
    model.to(gpu)
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
        outputs, _ = model(torch.ones(3, 2, 4, device=gpu))
        outputs.sum().backward()
        optimizer.step()
        optimizer.client.wait_applied()
        eventually(lambda: arrived(optimizer, 1))
        for name, array in optimizer.client.weights.items():
            np.testing.assert_array_equal(model.get_parameter(name).detach().cpu().numpy(), array)
        optimizer.close()
        assert lstm.flatten_parameters() is None  # torch's own again


def test_a_row_that_does_not_exist(gpu: str, job_name: str) -> None:
    model = nn.Embedding(50, 8, sparse=True).to(gpu)
    with daemon(job_name):
        optimizer = Optimizer(model, job_name)
        model(torch.tensor([1, 50], device=gpu)).sum().backward()
        optimizer.step()
        with pytest.raises(ModelMismatch, match=r"'weight' does not have \(it has 50\)"):
            optimizer.step()  # this one is in the other staging buffer by now
        optimizer.zero_grad()
        model(torch.tensor([1, 49], device=gpu)).sum().backward()
        optimizer.step()
        optimizer.client.wait_applied()
        optimizer.close()
        assert status(job_name)["gradients_applied"] == 1
