"""Each learner has its own buffers, as in a process under DDP; one learner's are the job's copy.

With a rate of 0 the weights stay as they are, so that a learner's buffers must be those of torch
alone after the same batches, however many learners there are.
"""

from __future__ import annotations

import contextlib
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Child, daemon, eventually, live_weights, status
from support.torch_models import one_thread as one_thread
from support.torch_models import same_state, seeded
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from gadei_ps.commands import saved
from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import LocalOptimizer, Optimizer
from gadei_ps.learners.torch import buffers as of_torch
from gadei_ps.learners.torch.buffers import toward

STILL = {"kind": "sgd", "lr": 0.0}
RATE = 0.003


class Normed(nn.Module):
    """Replaces its buffer by another tensor, as many write it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        out: torch.Tensor = self.last(inputs - self.mean)
        return out


class Scratch(nn.Module):
    """A buffer of the last batch, running bounds that begin at infinity, a queue, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("low", torch.full((8,), torch.inf))
        self.register_buffer("queue", torch.zeros(5, 8, dtype=torch.float64))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))
        self.register_buffer("full", torch.tensor(False))
        self.register_buffer("brief", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("weight", torch.tensor([3.0]).expand(8))
        self.register_buffer("local", torch.zeros(8), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.detach().mean(0)
        self.seen.copy_(mean)
        self.local.copy_(mean)
        self.low.copy_(torch.minimum(self.low, inputs.amin(0)))
        self.queue[int(self.at) % 5] = mean.double()
        self.at += 1
        self.full.fill_(int(self.at) >= 5)
        self.brief += mean[:3].bfloat16()
        out: torch.Tensor = self.last(inputs * self.weight)
        return out


class Quantized(nn.Module):
    """Codes that forward() moves, as a VQ-VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)
        self.register_buffer("codes", torch.randn(4, 8))
        self.register_buffer("counts", torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        picked = torch.cdist(inputs, self.codes).argmin(1)
        one = nn.functional.one_hot(picked, 4).float()
        with torch.no_grad():
            self.counts.mul_(0.9).add_(one.sum(0), alpha=0.1)
            self.codes.lerp_((one.T @ inputs) / self.counts[:, None], 0.1)
        out: torch.Tensor = self.last(inputs)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(8, 4)), nn.Linear(4, 1)),
    "replaced": Normed,
    "scratch": Scratch,
    "codes": Quantized,
}


def made(which: str) -> nn.Module:
    with seeded(3):
        return MODELS[which]()


def batches(learner: int, count: int = 8, size: int = 16) -> Iterator[torch.Tensor]:
    source = torch.Generator().manual_seed(50 + learner)
    for _ in range(count):
        yield 3 + 2 * torch.randn(size, 8, generator=source)


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the loss, about 1 at best: a part of the targets cannot be learned."""
    targets = (inputs - 3).sum(1) + torch.sign(torch.sin(50 * inputs[:, 0]))
    loss: torch.Tensor = (model(inputs)[:, 0] - targets).pow(2).mean()
    return loss


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, inputs)
    loss.backward()
    optimizer.step()
    return loss.item()


def alone(which: str, learner: int) -> nn.Module:
    """Return what torch alone has after a learner's batches."""
    model = made(which)
    local = torch.optim.SGD(model.parameters(), 0.0)
    for inputs in batches(learner):
        step(model, local, inputs)
    return model


def same_copy(job: str, model: nn.Module) -> None:
    """The job has the model's buffers, to the last bit."""
    kept = model.state_dict()
    bytes_of = {
        name: bytes(one.clone().reshape(-1).view(torch.uint8).tolist())
        for name, one in model.named_buffers()
        if name in kept
    }
    with Client(job) as client:
        eventually(
            lambda: all(client.weights[name].tobytes() == one for name, one in bytes_of.items())
        )


@pytest.mark.parametrize("count", [1, 4, 24])
@pytest.mark.parametrize("which", MODELS)
def test_as_torch(which: str, count: int, job_name: str) -> None:
    with daemon(job_name, optimizer=STILL) as job:
        models = [made(which) for _ in range(count)]
        optimizers = [Optimizer(model, job_name) for model in models]
        for some in zip(*map(batches, range(count)), strict=True):
            for model, optimizer, inputs in zip(models, optimizers, some, strict=True):
                step(model, optimizer, inputs)
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.close()
            same_state(model, alone(which, number))
        # The last one was alone when it left, so that its buffers are the job's.
        same_copy(job_name, models[-1])
        report = status(job_name)
        assert (report["gradients_applied"], report["gradients_refused"]) == (8 * count, 0)
        job.check()


@pytest.mark.parametrize("how", ["bsp", "ssp:s=1", "wsp:D=1,s_local=1", "local"])
def test_under_each_model(how: str, job_name: str) -> None:
    local = how == "local"
    kind = {"kind": "add"} if local else STILL
    with daemon(job_name, sync="asp" if local else how, optimizer=kind) as job:
        model = made("batch norm")
        optimizer: Optimizer | LocalOptimizer
        if local:
            optimizer = LocalOptimizer(model, lambda p: torch.optim.SGD(p, 0.0), job_name)
        else:
            optimizer = Optimizer(model, job_name)
        for inputs in batches(0):
            step(model, optimizer, inputs)
            optimizer._buffers.write()
        optimizer.close()
        same_state(model, alone("batch norm", 0))
        same_copy(job_name, model)
        assert status(job_name)["gradients_applied"] == (4 if "wsp" in how else 8)
        job.check()


def test_a_new_learner_begins_with_the_jobs(job_name: str) -> None:
    """Send those of the first process as DDP does; also of layers that are not trained."""

    def model(seed: int) -> nn.Module:
        with seeded(seed):
            made = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        made[0].requires_grad_(False)
        return made

    with daemon(job_name, optimizer=STILL) as job:
        first, second, third = (model(seed) for seed in range(3))
        one = Optimizer(first, job_name)
        for inputs in batches(0):
            step(first, one, inputs)
        one._buffers.write()
        eventually(lambda: one.client.weights["1.num_batches_tracked"] == 8)
        two = Optimizer(second, job_name)
        same_state(first, second)
        three = Optimizer(third, job_name, buffers="own", frozen=False)
        assert not torch.equal(third[0].weight, first[0].weight)
        assert int(third[1].num_batches_tracked) == 0
        one.close()
        step(second, two, next(batches(1)))
        two._buffers.write()  # it has the lowest row now
        eventually(lambda: two.client.weights["1.num_batches_tracked"] == 9)
        two.close()
        three.close()
        same_copy(job_name, second)
        job.check()


def test_many_learners_train_batch_norm(job_name: str) -> None:
    """Twenty in lockstep: the loss in eval mode is about that of torch alone."""

    def evaluated(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float(loss_of(model, next(batches(99, size=4000))))

    def train(learners: list[tuple[nn.Module, torch.optim.Optimizer]]) -> None:
        """The rate falls to 0; each learner's statistics are those of its own batches."""
        for number, some in enumerate(zip(*streams, strict=True)):
            for (model, optimizer), inputs in zip(learners, some, strict=True):
                optimizer.param_groups[0]["lr"] = RATE * max(0.0, 1 - number / 40)
                step(model, optimizer, inputs)

    count = 20
    streams = [list(batches(number, 80, 256)) for number in range(count)]
    twin = made("batch norm")
    train([(twin, torch.optim.SGD(twin.parameters(), RATE))] * count)
    with daemon(job_name, optimizer={"kind": "sgd", "lr": RATE}) as job:
        models = [made("batch norm") for _ in range(count)]
        optimizers = [Optimizer(model, job_name, wait=True) for model in models]
        train(list(zip(models, optimizers, strict=True)))
        for optimizer in optimizers:
            optimizer.close()
        same_copy(job_name, models[-1])
        job.check()
    expected = evaluated(twin)
    for model in models:
        assert evaluated(model) < 1.1 * expected


# -- the job's copy is a mean ---------------------------------------------------------------------

FLOATS = st.floats(-1e3, 1e3, width=32)


@given(
    own=st.lists(FLOATS, min_size=1, max_size=24),
    copy=FLOATS,
    writers=st.lists(st.integers(0, 23), max_size=24, unique=True),
)
@settings(deadline=None)
def test_the_mean_is_a_contraction(own: list[float], copy: float, writers: list[int]) -> None:
    """Check simultaneous writes from one copy: they stay within the range of all values;
    if all do, it is their mean."""
    at = np.float32(copy)
    moves = [
        toward(np.array([one], np.float32), np.array([at]), len(own))
        for number, one in enumerate(own)
        if number in writers
    ]
    now = float(at + sum(float(move[0]) for move in moves if move is not None))
    slack = 1e-4 * (1 + max(abs(one) for one in [*own, copy]))
    assert min(*own, copy) - slack <= now <= max(*own, copy) + slack
    if len(moves) == len(own):
        assert abs(now - np.mean(own)) <= slack


def test_values_without_a_mean() -> None:
    with_infinity = np.array([np.inf, 1], np.float32)
    assert toward(with_infinity, np.zeros(2, np.float32), 2) is None
    assert toward(np.zeros(2, np.float32), with_infinity, 2) is None


def test_a_mean_of_learners(job_name: str) -> None:
    count = 4
    with daemon(job_name, optimizer=STILL) as job:
        models = [made("batch norm") for _ in range(count)]
        optimizers = [Optimizer(model, job_name, buffers="mean") for model in models]
        for some in zip(*map(batches, range(count)), strict=True):
            for model, optimizer, inputs in zip(models, optimizers, some, strict=True):
                step(model, optimizer, inputs)
        shared = optimizers[0].client.weights
        for _ in range(60):
            for optimizer in optimizers:
                optimizer._buffers.write()
                optimizer.client.wait_applied()
        means = np.array([model[1].running_mean.numpy() for model in models])
        spread = means.max(0) - means.min(0)
        assert (abs(shared["1.running_mean"] - means.mean(0)) < 0.3 * spread).all()
        assert shared["1.num_batches_tracked"] == 8
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.close()
            same_state(model, alone("batch norm", number))
        with pytest.raises(UsageError, match="buffers='sum': use 'first', 'mean' or 'own'"):
            Optimizer(made("batch norm"), job_name, buffers="sum")
        job.check()


# -- deaths ---------------------------------------------------------------------------------------


class Filled(nn.Module):
    """A large buffer, all of whose values are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 1)
        self.register_buffer("all", torch.zeros(300_000))


def _writes(pipe: Connection, job: str) -> None:
    model = Filled()
    optimizer = Optimizer(model, job)
    pipe.send(None)
    while True:
        model.all += 1
        optimizer._buffers.write()
        time.sleep(0.001)


def test_the_writer_is_killed_while_it_writes(job_name: str) -> None:
    """Each write is whole or absent, and the next learner continues to write."""
    with daemon(job_name, optimizer=STILL, shards=1) as job:
        keeper = Filled()
        held = Optimizer(keeper, job_name)
        held.close()  # it has made the model
        for _ in range(5):
            writer = Child(_writes, job_name)
            writer.receive()
            model = Filled()
            optimizer = Optimizer(model, job_name)
            shared = optimizer.client.weights["all"]
            before = float(shared[-1])
            eventually(lambda shared=shared, before=before: float(shared[-1]) > before + 2)
            assert not optimizer.client.writes_buffers
            writer.signal(signal.SIGKILL)
            writer.join()
            eventually(lambda optimizer=optimizer: optimizer.client.writes_buffers)
            left = live_weights(job_name)
            eventually(lambda: status(job_name)["learners"][0]["queue"] == 0)
            assert len(np.unique(shared)) == 1, left
            model.all.fill_(float(shared[0]) + 1000)
            optimizer.close()
            eventually(lambda model=model, at=shared: np.array_equal(at, model.all.numpy()))
        job.check()


# -- what is loaded, recomputed, resized ----------------------------------------------------------


def test_recomputed_statistics_stay(job_name: str) -> None:
    with daemon(job_name, optimizer=STILL) as job:
        model = made("batch norm")
        optimizer = Optimizer(model, job_name)
        for inputs in batches(0):
            step(model, optimizer, inputs)
        torch.optim.swa_utils.update_bn(list(batches(9)), model)
        new = {name: one.clone() for name, one in model.named_buffers()}
        optimizer.close()
        for name, one in model.named_buffers():
            assert torch.equal(one, new[name]), name
        same_copy(job_name, model)
        job.check()


def test_best_weights_at_the_end_are_not_the_jobs(job_name: str) -> None:
    """Check that weights that are only loaded do not reach the job, and trained ones do."""
    with daemon(job_name, optimizer=STILL) as job:
        model = made("batch norm")
        optimizer = Optimizer(model, job_name)
        best = {name: one.clone() for name, one in model.state_dict().items()}
        for inputs in batches(0):
            step(model, optimizer, inputs)
        trained = alone("batch norm", 0)
        model.load_state_dict(best)
        assert int(model[1].num_batches_tracked) == 0
        optimizer.close()
        assert int(model[1].num_batches_tracked) == 0
        same_copy(job_name, trained)
        job.check()


def test_a_script_without_close(job_name: str) -> None:
    with daemon(job_name, optimizer=STILL) as job:
        model = made("batch norm")
        optimizer = Optimizer(model, job_name)
        for inputs in batches(0):
            step(model, optimizer, inputs)
        optimizer._buffers._exit()  # as at the end of the process
        same_copy(job_name, model)
        optimizer.close()
        job.check()


class Resized(nn.Module):
    """Observers of quantization-aware training, whose shapes the first batch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)
        self.register_buffer("least", torch.zeros(0))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not len(self.least):
            self.least.resize_(8)
            self.scale.resize_(8)
        self.least.copy_(inputs.amin(0))
        out: torch.Tensor = self.last(inputs)
        return out


def test_a_buffer_that_gets_another_shape(job_name: str) -> None:
    with daemon(job_name, optimizer=STILL) as job, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = Resized()
        optimizer = Optimizer(model, job_name)
        for inputs in batches(0):
            step(model, optimizer, inputs)
            optimizer._buffers.write()
        optimizer.close()
        assert model.least.shape == (8,)
        messages = [str(one.message) for one in warned if "another shape" in str(one.message)]
        assert len(messages) == 1, warned
        assert "one forward pass before Optimizer(model)" in messages[0]
        job.check()


def test_quantization_aware_training(job_name: str) -> None:
    """Check observers that begin at infinity, some of which the first batch resizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao import quantization

        class Labels(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.into, self.out = quantization.QuantStub(), quantization.DeQuantStub()
                self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 2)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return self.out(self.last(torch.relu(self.first(self.into(inputs)))))

        with seeded(0):
            model = Labels().train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        quantization.prepare_qat(model, inplace=True)
        source = torch.Generator().manual_seed(70)
        with daemon(job_name, optimizer={"kind": "adam", "lr": 0.02}) as job:
            optimizer = Optimizer(model, job_name, wait=True)
            for _ in range(100):
                inputs = torch.randn(32, 8, generator=source)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long()).backward()
                optimizer.step()
            optimizer.close()
            assert status(job_name)["gradients_refused"] == 0
            job.check()
        model.eval()
        inputs = torch.randn(2000, 8, generator=source)
        right = model(inputs).argmax(1) == (inputs.sum(1) > 0)
        assert right.float().mean() > 0.95


def test_frozen_parameters_that_are_loaded_late(job_name: str) -> None:
    with daemon(job_name, optimizer=STILL) as job:
        model = made("scratch")
        model.register_parameter("fixed", nn.Parameter(torch.ones(2), requires_grad=False))
        optimizer = Optimizer(model, job_name)
        model.load_state_dict(model.state_dict())  # nothing is new
        state = model.state_dict() | {"fixed": torch.zeros(2)}
        with pytest.warns(UserWarning, match=r"'fixed' has other values.*before Optimizer\(model"):
            model.load_state_dict(state)
        with pytest.warns(UserWarning, match="'fixed' has other values"):
            optimizer.assign({"fixed": torch.full((2,), 3.0)})
        assert (optimizer.client.weights["fixed"] == 1).all()
        assert (model.fixed == 3).all()
        optimizer.close()
        job.check()


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "npz"])
def test_an_export_loads_strictly(suffix: str, tmp_path: Path, job_name: str) -> None:
    """Export buffers of all types, a frozen layer in bfloat16, and tied frozen weights."""

    def model() -> nn.Module:
        one = made("scratch")
        one.frozen = nn.Linear(3, 2).bfloat16().requires_grad_(False)
        one.tied = nn.Module()
        one.tied.weight = one.frozen.weight
        return one

    file = tmp_path / f"out.{suffix}"
    with daemon(job_name, optimizer=STILL) as job:
        trained = model()
        optimizer = Optimizer(trained, job_name)
        for inputs in batches(0):
            step(trained, optimizer, inputs)
        optimizer.close()
        eventually(lambda: not status(job_name)["learners"])  # all that it has published is applied
        saved.export_memory(job_name, file)
        job.check()
    other = model()
    other.weight = torch.zeros(8)  # torch itself cannot load into an expanded tensor
    if suffix == "pt":
        other.load_state_dict(torch.load(file))
        for name, one in torch.load(file).items():
            assert one.dtype == trained.state_dict()[name].dtype, name
    elif suffix == "safetensors":
        from safetensors.torch import load_file

        other.load_state_dict(load_file(file))
    else:
        with np.load(file) as arrays:
            assert {*arrays} == {*trained.state_dict()}
        return
    for name, one in other.state_dict().items():
        with contextlib.suppress(AttributeError):
            assert torch.equal(one, trained.state_dict()[name]), name


def test_writes_take_little_time(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longer a write takes, the rarer it is."""
    with daemon(job_name, optimizer=STILL) as job:
        model = made("batch norm")
        optimizer = Optimizer(model, job_name)
        now = 100.0
        monkeypatch.setattr(of_torch.time, "monotonic", lambda: now)
        buffers = optimizer._buffers
        buffers.write()
        assert buffers._next == now + of_torch.WRITE_INTERVAL_S
        job.check()
        monkeypatch.undo()
        optimizer.close()
