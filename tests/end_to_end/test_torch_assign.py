"""Writes of scripts to a model's weights in the middle of training, compared with torch."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import daemon, status
from support.torch_models import LOCAL, batch_norm_model, data, plain_model, same_state
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import GadeiError, ModelMismatch, UsageError
from gadei_ps.learners.torch import Optimizer

STEPS = 12


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> Iterator[None]:
    """The user's loop; yields after each step."""
    for number, (inputs, targets) in enumerate(data(2 * STEPS)):
        if seed * STEPS <= number < (seed + 1) * STEPS:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            yield


Write = Callable[[nn.Module, Any, Callable[[dict[str, torch.Tensor]], None]], None]


def back_to_the_best(model: nn.Module, optimizer: Any, write: Any) -> None:
    best = None
    for number, _ in enumerate(steps(model, optimizer)):
        if number == STEPS // 2:
            best = copy.deepcopy(model.state_dict())
    write(best)
    for _ in steps(model, optimizer, seed=1):
        pass


def clamp(model: nn.Module, optimizer: Any, write: Any) -> None:
    for _ in steps(model, optimizer):
        write({name: one.detach().clamp(-0.2, 0.2) for name, one in model.named_parameters()})


def average(model: nn.Module, optimizer: Any, write: Any) -> None:
    mean = copy.deepcopy(model.state_dict())
    for _ in steps(model, optimizer):
        for name, one in model.state_dict().items():
            if one.is_floating_point():
                mean[name].lerp_(one, 0.1)
    write(mean)
    for _ in steps(model, optimizer, seed=1):
        pass


def begin_anew(model: nn.Module, optimizer: Any, write: Any) -> None:
    for _ in steps(model, optimizer):
        pass
    for name, one in model.named_parameters():
        if one.dim() > 1:
            generator = torch.Generator().manual_seed(4)
            write({name: nn.init.xavier_uniform_(torch.empty_like(one), generator=generator)})
    for _ in steps(model, optimizer, seed=1):
        pass


def plain(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], None]:
    """Write as torch alone does."""

    def write(values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                model.state_dict()[name].copy_(value)

    return write


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("script", [back_to_the_best, clamp, average, begin_anew])
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sgd", batch_norm_model),
        ("momentum", batch_norm_model),
        ("adam", plain_model),  # it would blow up the rounding of biases before a batch norm
    ],
)
def test_as_torch(
    kind: str, script: Write, make: Callable[[], nn.Module], view: bool, job_name: str
) -> None:
    settings, of_torch = LOCAL[kind]
    expected = make()
    script(expected, of_torch(list(expected.parameters())), plain(expected))
    model = make()
    with daemon(job_name, optimizer=settings, shards=2) as job:
        optimizer = Optimizer(model, job_name, view=view, wait=True)
        script(model, optimizer, optimizer.assign)
        same_state(model, expected)
        optimizer.close()
        same_state(model, expected)
        assert status(job_name)["gradients_refused"] == 0
        job.check()


class Tied(nn.Module):
    """An output layer with the weights of the embedding, and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def test_a_whole_state_dict(job_name: str) -> None:
    """Also names of tied weights, buffers, and a layer that is not trained."""
    model, other = Tied(), Tied()
    other.frozen.load_state_dict(model.frozen.state_dict())
    with torch.no_grad():
        other.count += 3
    with daemon(job_name) as job:
        optimizer = Optimizer(model, job_name, kind="sgd", lr=1.0)
        optimizer.assign(other.state_dict())
        same_state(model, other)
        ones = torch.ones(6, 4)
        optimizer.assign({"out.weight": ones})
        torch.testing.assert_close(model.embedding.weight.detach(), ones)
        state = other.state_dict()
        state["out.weight"] = ones
        with pytest.raises(UsageError, match=r"'out.weight' and another name of the same tensor"):
            optimizer.assign(state)
        optimizer.close()
        job.check()


def test_what_is_refused(job_name: str) -> None:
    """Refuse it in one line without writing anything; the script may continue."""
    model, before = plain_model(), plain_model()
    with daemon(job_name) as job:
        optimizer = Optimizer(model, job_name, kind="sgd", lr=1.0)
        bias = torch.zeros(40)
        for values, error, says in (
            ({"0.bias": bias, "x": bias}, UsageError, "the model has no parameter or buffer 'x'"),
            (
                {"0.bias": torch.zeros(4)},
                ModelMismatch,
                "'0.bias' was given values of shape",
            ),
            ({"0.bias": bias * torch.nan}, UsageError, "'0.bias' holds a NaN or an infinity"),
            ({"0.bias": bias.double() + 1e300}, UsageError, r"0.bias.*a number beyond float32"),
            ({"0.bias": bias * 1j}, ModelMismatch, "give numbers to assign, not complex64"),
            ({"0.bias": "x"}, UsageError, "'0.bias' is a str: give a tensor"),
            ([bias], UsageError, "assign takes values by name"),
        ):
            with pytest.raises(error, match=says) as caught:
                optimizer.assign(values)  # type: ignore[arg-type]
            assert isinstance(caught.value, GadeiError)
            assert "\n" not in str(caught.value)
        same_state(model, before)
        optimizer.close()
        job.check()


def test_not_into_a_gradient_that_is_begun(job_name: str) -> None:
    model = plain_model()
    with daemon(job_name):
        optimizer = Optimizer(model, job_name, kind="sgd", lr=1.0, free_gradients=True)
        inputs, targets = next(data())
        nn.functional.cross_entropy(model(inputs), targets).backward()
        with pytest.raises(UsageError, match="a gradient is begun and not pushed yet"):
            optimizer.assign({"0.bias": torch.zeros(40)})
        optimizer.step()
        optimizer.assign({"0.bias": torch.zeros(40)})
        assert not model[0].bias.any()  # type: ignore[index]
        optimizer.close()


def test_a_store_names_assign(job_name: str) -> None:
    script = (
        "import torch, gadei_ps.learners.torch as g\n"
        "model = torch.nn.Linear(3, 2)\n"
        f"optimizer = g.Optimizer(model, {job_name!r}, kind='sgd', lr=1.0)\n"
        "torch.no_grad().__enter__()\n"
        "model.weight.clamp_(-1, 1)\n"
    )
    with daemon(job_name):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -11
    assert "write them with optimizer.assign({name: values})" in done.stderr


WRITES = """
import sys, torch
from gadei_ps.learners.torch import Optimizer

model = torch.nn.Linear(3, 2)
optimizer = Optimizer(model, sys.argv[1])
with torch.no_grad():
    model.weight.clamp_(-1, 1)
"""


def test_writing_to_the_jobs_weights_says_what_to_do(job_name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WRITES)
    with daemon(job_name):
        command = [sys.executable, tmp_path / "script.py", job_name]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGSEGV
    assert ended.stderr.count("use Optimizer(model, view=False)") == 1
    assert 'script.py", line 8' in ended.stderr
