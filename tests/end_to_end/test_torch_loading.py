"""load_state_dict() of a model whose weights are the job's, and what else gives it other memory."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import daemon, fork, live_weights, status
from support.torch_models import LOCAL, batch_norm_model, data, plain_model, same_state
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer

HALF = 12
BATCHES = list(data(2 * HALF))


def train(model: nn.Module, optimizer: Any, batches: list[Any]) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def back_to_the_best(model: nn.Module, optimizer: Any) -> None:
    """Train, look at earlier weights, and train on from them."""
    train(model, optimizer, BATCHES[: HALF // 2])
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer, BATCHES[HALF // 2 : HALF])
    last = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    model.eval()
    model(BATCHES[0][0])
    model.train()
    model.load_state_dict(last)
    train(model, optimizer, BATCHES[HALF : HALF + 3])
    model.load_state_dict(best)
    train(model, optimizer, BATCHES[HALF:])


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize(
    ("kind", "make"),
    [("sgd", batch_norm_model), ("momentum", batch_norm_model), ("adam", plain_model)],
)
def test_as_torch(kind: str, make: Callable[[], nn.Module], view: bool, job_name: str) -> None:
    settings, of_torch = LOCAL[kind]
    expected = make()
    back_to_the_best(expected, of_torch(list(expected.parameters())))
    model = make()
    with daemon(job_name, optimizer=settings, shards=2) as job:
        optimizer = Optimizer(model, job_name, view=view, wait=True)
        back_to_the_best(model, optimizer)
        same_state(model, expected)
        optimizer.close()
        same_state(model, expected)
        assert status(job_name)["gradients_applied"] == 2 * HALF + 3
        job.check()


@pytest.mark.parametrize("view", [True, False])
def test_weights_that_are_only_looked_at(view: bool, job_name: str) -> None:
    """They come to the job with the next step, and never if there is none."""
    model, other = batch_norm_model(), batch_norm_model()
    with torch.no_grad():
        for one in other.state_dict().values():
            one.add_(1)
    with daemon(job_name) as job:
        optimizer = Optimizer(model, job_name, view=view, wait=True)
        train(model, optimizer, BATCHES[:2])
        before = live_weights(job_name).copy()
        end = optimizer.client.model.parameters
        model.load_state_dict(other.state_dict())
        with optimizer.pause():
            same_state(model, other)
        optimizer.close()
        same_state(model, other)
        np.testing.assert_array_equal(live_weights(job_name)[:end], before[:end])
        job.check()


def _begin(pipe: Connection, job: str, file: Path, weights_first: bool) -> None:
    saved = torch.load(file)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = batch_norm_model()
        optimizer = Optimizer(model, job, wait=True)
        if weights_first:
            model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if not weights_first:
            model.load_state_dict(saved["model"])
    pipe.send([str(one.message) for one in warned])
    pipe.recv()
    train(model, optimizer, BATCHES[HALF : HALF + 5])
    optimizer.close()
    pipe.send("done")


@pytest.mark.parametrize("weights_first", [True, False])
def test_all_learners_load_and_one_writes(
    weights_first: bool, tmp_path: Path, job_name: str
) -> None:
    """Those that begin together: once. One that comes late: not, and it has the job's weights."""
    settings, of_torch = LOCAL["adam"]
    twin = batch_norm_model()
    theirs = of_torch(list(twin.parameters()))
    for name in ("saved.pt", "later.pt"):
        train(twin, theirs, BATCHES[:HALF])
        state = {"model": twin.state_dict(), "optimizer": theirs.state_dict()}
        torch.save(state, tmp_path / name)
    saved = torch.load(tmp_path / "saved.pt")["model"]
    with (
        daemon(job_name, optimizer=settings) as job,
        fork(3, _begin, job_name, tmp_path / "saved.pt", weights_first) as learners,
    ):
        assert [one.receive() for one in learners] == [[], [], []]
        with Client(job_name) as client:
            for name, array in client.weights.items():
                np.testing.assert_array_equal(array, saved[name].numpy())
            assert int(client.current_version) == 3, "one wrote the weights, one two moments"
        for one in learners:
            one.send()
        assert [one.receive() for one in learners] == ["done"] * 3
        for name, says in (("saved.pt", []), ("later.pt", ["weights", "another state"])):
            before = live_weights(job_name).copy()
            with fork(1, _begin, job_name, tmp_path / name, weights_first) as (late,):
                messages = late.receive()
                assert len(messages) == len(says)
                for kind in says:
                    assert any(f"{kind}, and keeps" in one for one in messages), messages
                late.kill()
            np.testing.assert_array_equal(live_weights(job_name), before)
        job.check()


class Masked(nn.Module):
    """Layer with a constant buffer that is not finite, as attention layers have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(inputs).T @ inputs + self.mask, -1)


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("nonfinite", ["refuse", "allow"])
def test_a_mask_of_minus_infinity(nonfinite: str, view: bool, job_name: str) -> None:
    """It is loaded with the rest, before the first step and later, by all learners."""
    saved = Masked().state_dict()
    mask = saved["mask"].clone()
    saved["linear.weight"] += 1
    with daemon(job_name, nonfinite=nonfinite) as job:
        models = [Masked(), Masked()]
        optimizers = [Optimizer(one, job_name, view=view, wait=True) for one in models]
        for later in (False, True):
            for model, optimizer in zip(models, optimizers, strict=True):
                model.load_state_dict(saved)
                if later:
                    optimizer.zero_grad()
                    optimizer.step()  # the job gets it then
                for name, one in model.state_dict().items():
                    assert torch.equal(one, saved[name]), name
                    assert (optimizer.client.weights[name] == saved[name].numpy()).all(), name
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(3, 3)).square().sum().backward()
                optimizer.step()
                assert torch.equal(model.mask, mask)
        model.load_state_dict(saved | {"mask": -mask})
        optimizer.step()
        assert torch.equal(model.mask, -mask)
        for optimizer in optimizers:
            optimizer.close()
        job.check()


def test_warnings_name_the_script(job_name: str) -> None:
    """The line that loads, however deep torch calls itself."""
    with daemon(job_name, optimizer=LOCAL["adam"][0]) as job:
        first = Optimizer(model := plain_model(), job_name, wait=True)
        train(model, first, BATCHES[:2])
        saved = copy.deepcopy(first.state_dict())
        train(model, first, BATCHES[2:4])
        late = Optimizer(other := plain_model(), job_name)
        with pytest.warns(UserWarning, match="with other weights") as warned:
            other.load_state_dict({name: one + 1 for name, one in other.state_dict().items()})
        assert [one.filename for one in warned] == [__file__]
        saved["param_groups"][0] |= {"lr": 0.5, "eps": 0.5}
        with pytest.warns(UserWarning, match="load_state_dict") as warned:
            late.load_state_dict(saved)
        assert [one.filename for one in warned] == [__file__] * 3
        late.close()
        first.close()
        job.check()


def test_copies_of_the_model(job_name: str) -> None:
    """They have nothing to do with the job, and may be loaded and written."""
    model = batch_norm_model()
    with daemon(job_name) as job:
        optimizer = Optimizer(model, job_name)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                for one in twin.parameters():
                    one.add_(1)
            model.load_state_dict(twin.state_dict())
            twin.load_state_dict(batch_norm_model().state_dict())
            same_state(twin, batch_norm_model())
        with pytest.raises(UsageError, match="leave assign=True out"):
            model.load_state_dict(twin.state_dict(), assign=True)
        optimizer.close()
        job.check()
        kept = Optimizer(model, job_name)
        del kept, optimizer  # without close()
        gc.collect()
        model.load_state_dict(twin.state_dict())
        same_state(model, twin)


def test_the_model_itself_is_saved(tmp_path: Path, job_name: str) -> None:
    """The file needs torch and nothing else; hooks of the script are kept, and end when it says."""
    model, heard = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), []
    first = model.register_load_state_dict_post_hook(lambda *_: heard.append("first"))
    classes = [nn.Sequential, nn.Linear, nn.BatchNorm1d]
    with daemon(job_name) as job:
        abandoned = Optimizer(model, job_name)
        del abandoned  # without close()
        gc.collect()
        optimizer = Optimizer(model, job_name)
        later = model.register_load_state_dict_post_hook(lambda *_: heard.append("later"))
        model.load_state_dict(model.state_dict())
        assert heard == ["first", "later"]
        optimizer.close()
        optimizer = Optimizer(model, job_name)
        first.remove()
        model.load_state_dict(model.state_dict())
        assert heard[2:] == ["later"]
        later.remove()
        torch.save(model, tmp_path / "model.pt")
        with torch.serialization.safe_globals(classes):
            same_state(torch.load(tmp_path / "model.pt", weights_only=True), model)
        last = model.register_load_state_dict_post_hook(lambda *_: heard.append("last"))
        optimizer.close()
        model.load_state_dict(model.state_dict())
        last.remove()
        model.load_state_dict(model.state_dict())
        assert heard[3:] == ["last"]
        job.check()


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.double(),
        lambda model: model.half(),
        lambda model: setattr(model[0].weight, "data", model[0].weight.data[:1].clone()),
    ],
)
def test_other_memory(move: Callable[[nn.Module], None], view: bool, job_name: str) -> None:
    """Found at the next step, before the job gets anything."""
    model = plain_model()
    with daemon(job_name) as job:
        optimizer = Optimizer(model, job_name, view=view)
        model.to("cpu", torch.float32)  # which changes nothing
        train(model, optimizer, BATCHES[:1])
        optimizer.client.wait_applied()
        version = status(job_name)["version"]
        move(model)
        optimizer.zero_grad()
        with pytest.raises(UsageError, match=r"^parameter '0.weight' is torch.float.* now, since"):
            optimizer.step()
        assert status(job_name)["version"] == version
        optimizer.close()
        job.check()


def test_a_late_learner_that_is_handed_back_what_it_has_read(job_name: str) -> None:
    """Prepare it as accelerate does with an optimizer; meanwhile the job trains."""
    with daemon(job_name, optimizer=LOCAL["adam"][0]) as job:
        first = Optimizer(model := plain_model(), job_name, wait=True)
        train(model, first, BATCHES[:2])
        late = Optimizer(plain_model(), job_name)
        state = copy.deepcopy(late.state_dict())
        train(model, first, BATCHES[2:4])
        late.load_state_dict(state)  # warnings are errors here
        assert first.client.job_state().steps == 4
        late.close()
        first.close()
        job.check()


def test_another_optimizer_for_the_same_model(job_name: str) -> None:
    """Make one for each fit(), as frameworks do: it replaces the one before."""
    settings, of_torch = LOCAL["momentum"]
    twin, model = plain_model(), plain_model()
    theirs = of_torch(list(twin.parameters()))
    train(twin, theirs, BATCHES[:HALF])
    saved = copy.deepcopy((twin.state_dict(), theirs.state_dict()))
    train(twin, theirs, BATCHES[HALF:])
    twin.load_state_dict(saved[0])
    theirs.load_state_dict(saved[1])
    train(twin, theirs, BATCHES[:HALF])
    with daemon(job_name, optimizer=settings) as job:
        first = Optimizer(model, job_name, wait=True)
        with pytest.raises(UsageError, match="a part of this model has an Optimizer already"):
            Optimizer(model[0], job_name)  # type: ignore[index]
        train(model, first, BATCHES[:HALF])
        saved = copy.deepcopy((model.state_dict(), first.state_dict()))
        train(model, first, BATCHES[HALF:])
        model.load_state_dict(saved[0])
        second = Optimizer(model, job_name, wait=True)
        assert len(status(job_name)["learners"]) == 1
        second.load_state_dict(saved[1])
        train(model, second, BATCHES[:HALF])
        same_state(model, twin)
        with pytest.raises(UsageError, match="detached"):
            first.step()
        second.close()
        job.check()
