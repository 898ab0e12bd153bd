"""Training that is saved and resumed as people write it, with torch's optimizers or a job's."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import daemon, eventually, fork, status
from support.torch_models import data, plain_model, same_state
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import CheckpointError, ControlError, UsageError
from gadei_ps.job import control
from gadei_ps.job.control import Copy, ask, memory_file
from gadei_ps.job.faults import Processes
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer

HALF = 50
KINDS: dict[str, tuple[dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": ({"kind": "sgd", "lr": 0.1}, torch.optim.SGD, {"lr": 0.1}),
    "momentum": (
        {"kind": "momentum", "lr": 0.05, "momentum": 0.8},
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8},
    ),
    "nesterov": (
        {"kind": "nesterov", "lr": 0.05, "momentum": 0.8},
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8, "nesterov": True},
    ),
    "adagrad": ({"kind": "adagrad", "lr": 0.02}, torch.optim.Adagrad, {"lr": 0.02}),
    "adam": (
        {"kind": "adam", "lr": 0.01, "beta2": 0.99},
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.9, 0.99)},
    ),
    "rmsprop": (
        {"kind": "rmsprop", "lr": 0.002, "alpha": 0.9},
        torch.optim.RMSprop,
        {"lr": 0.002, "alpha": 0.9},
    ),
    "rmsprop with momentum": (
        {"kind": "rmsprop", "lr": 0.001, "momentum": 0.6},
        torch.optim.RMSprop,
        {"lr": 0.001, "momentum": 0.6},
    ),
    "adamw": (
        {"kind": "adamw", "lr": 0.01, "weight_decay": 0.05},
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.05},
    ),
}
BATCHES = list(data(2 * HALF))


def train(model: nn.Module, optimizer: Any, batches: Iterable[Any]) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def save(model: nn.Module, optimizer: Any, file: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)


def resumed(file: Path, make: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    saved = torch.load(file)
    model = plain_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved["model"])
    optimizer = make(model)
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["from torch", "to torch", "to another job"])
def test_half_and_half(kind: str, way: str, tmp_path: Path, job_name: str) -> None:
    """The second half continues as one run of torch does, by torch or by a job, after either."""
    settings, of_torch, words = KINDS[kind]

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return of_torch(model.parameters(), **words)

    def ours(model: nn.Module) -> Optimizer:
        return Optimizer(model, job_name, wait=True)

    expected = plain_model()
    train(expected, plain(expected), BATCHES)
    file = tmp_path / "saved.pt"
    model = plain_model()
    if way == "from torch":
        optimizer: Any = plain(model)
        train(model, optimizer, BATCHES[:HALF])
        save(model, optimizer, file)
    else:
        with daemon(job_name, optimizer=settings, shards=2) as job:
            optimizer = ours(model)
            train(model, optimizer, BATCHES[:HALF])
            save(model, optimizer, file)
            optimizer.close()
            job.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if way == "to torch":
            model, optimizer = resumed(file, plain)
            train(model, optimizer, BATCHES[HALF:])
        else:
            with daemon(job_name, optimizer=settings, shards=2) as job:
                model, optimizer = resumed(file, ours)
                train(model, optimizer, BATCHES[HALF:])
                optimizer.close()
                job.check()
    same_state(model, expected)


def test_the_format_is_torchs(job_name: str) -> None:
    settings, of_torch, words = KINDS["adamw"]
    twin, model = plain_model(), plain_model()
    theirs = of_torch(twin.parameters(), **words)
    with daemon(job_name, optimizer=settings):
        ours = Optimizer(model, job_name, wait=True)
        assert ours.state_dict()["state"] == {}
        train(twin, theirs, BATCHES[:3])
        train(model, ours, BATCHES[:3])
        mine, expected = ours.state_dict(), theirs.state_dict()
        assert mine.keys() - expected.keys() == {"gadei_ps"}
        assert mine["param_groups"][0].keys() == expected["param_groups"][0].keys()
        assert mine["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            assert mine["state"][number].keys() == state.keys()
            for name, one in state.items():
                torch.testing.assert_close(mine["state"][number][name], one, rtol=1e-4, atol=1e-6)
        ours.close()
        with pytest.raises(UsageError, match="save before close"):
            ours.state_dict()


def _resume(pipe: Connection, job: str, file: Path, warns: bool) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, optimizer = resumed(file, lambda model: Optimizer(model, job, wait=True))
    pipe.send([str(one.message) for one in warned])
    pipe.recv()
    train(model, optimizer, BATCHES[HALF : HALF + 5])
    optimizer.close()
    pipe.send("done")


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_all_learners_load_and_one_writes(sync: str, tmp_path: Path, job_name: str) -> None:
    """Those that begin together: once, before the first step. One that comes late: not."""
    settings, of_torch, words = KINDS["adam"]
    twin = plain_model()
    theirs = of_torch(twin.parameters(), **words)
    train(twin, theirs, BATCHES[:HALF])
    save(twin, theirs, tmp_path / "saved.pt")
    train(twin, theirs, BATCHES[HALF : HALF + 1])
    save(twin, theirs, tmp_path / "later.pt")
    job = daemon(job_name, optimizer=settings, sync=sync)
    with job, fork(3, _resume, job_name, tmp_path / "saved.pt", True) as learners:
        assert [one.receive() for one in learners] == [[], [], []]
        with Client(job_name) as client:
            assert client.job_state().steps == HALF
            assert int(client.current_version) == 2, "one of them wrote, in two parts"
        for one in learners:
            one.send()
        assert [one.receive() for one in learners] == ["done"] * 3
        with fork(1, _resume, job_name, tmp_path / "saved.pt", False) as (late,):
            assert late.receive() == [], "it is what was loaded"
            late.kill()
        with fork(1, _resume, job_name, tmp_path / "later.pt", False) as (other,):
            (message,) = other.receive()
            assert "the job has made steps with another state, and keeps it" in message
            other.kill()
        with Client(job_name) as client:
            steps = client.job_state().steps - HALF
            assert steps == 15 if sync == "asp" else 5 <= steps <= 15
        job.check()


def _load(pipe: Connection, job: str) -> None:
    client = Client(job)
    pipe.send(None)
    pipe.recv()
    size = client.model.elements
    values = [{"w": np.full(size, 1.0)}, {"w": np.full(size, 2.0)}]
    assert client.load_optimizer_state(values, 7)
    pipe.send("done")
    pipe.recv()


@pytest.mark.parametrize("victim", ["server", "learner"])
def test_deaths_while_it_is_loaded(victim: str, job_name: str) -> None:
    """A server or the learner dies: the state is whole in the end, and its steps count once."""
    tensors = [{"name": "w", "shape": [160_000]}]
    optimizer = {"kind": "adam", "lr": 0.1}
    with daemon(job_name, optimizer=optimizer, tensors=tensors, standby=True) as job:
        with fork(2, _load, job_name) as (one, other):
            for learner in (one, other):
                learner.receive()
            server = eventually(lambda: Processes(job_name).server(ready=True))
            one.send()
            if victim == "server":
                os.kill(server.pid, signal.SIGKILL)
            elif victim == "learner":
                eventually(lambda: status(job_name)["version"] or one.has_sent)
                one.kill()
            other.send()
            assert other.receive() == "done"
            with Client(job_name) as client:
                found = client.job_state()
                assert found.steps == 7
                assert (found.slots[0] == 1).all() and (found.slots[1] == 2).all()
                assert not found.weights.any()
        job.check()


def test_a_copy_that_cannot_be_made(job_name: str) -> None:
    tensors = [{"name": "w", "shape": [10]}]
    with daemon(job_name, tensors=tensors) as job, Client(job_name) as client:
        with pytest.raises(ControlError, match="no file came with the request"):
            ask(job_name, Copy())
        for size in (0, 4, 1 << 20):
            file = memory_file(size, [])
            try:
                with (
                    control.Connection(job_name) as asks,
                    pytest.raises(ControlError, match="no copy of the job: the file for the"),
                ):
                    asks.request(Copy(), fds=[file])
            finally:
                os.close(file)
        report = status(job_name)
        assert report["checkpoints"] == report["checkpoint_failures"] == 0
        assert client.job_state().weights.shape == (client.model.elements,)
        job.check()
    with daemon(job_name) as job:
        file = memory_file(64, [])
        with control.Connection(job_name) as asks, pytest.raises(CheckpointError, match="no model"):
            asks.request(Copy(), fds=[file])
        os.close(file)
        job.check()


def test_going_back_in_the_middle(job_name: str) -> None:
    """A learner that has trained goes back to what it saved: weights, moments and steps."""
    settings, of_torch, words = KINDS["adam"]
    expected, model = plain_model(), plain_model()
    with daemon(job_name, optimizer=settings) as job:
        ours = Optimizer(model, job_name, wait=True)
        theirs = of_torch(expected.parameters(), **words)
        train(model, ours, BATCHES[:5])
        train(expected, theirs, BATCHES[:5])
        weights, state = {k: v.clone() for k, v in model.state_dict().items()}, ours.state_dict()
        train(model, ours, BATCHES[5:20])
        ours.assign(weights)
        ours.load_state_dict(state)
        same_state(model, expected)
        train(model, ours, BATCHES[20:40])
        train(expected, theirs, BATCHES[20:40])
        same_state(model, expected)
        ours.close()
        job.check()


@pytest.mark.parametrize("of", ["a job", "torch"])
def test_going_back_to_the_beginning(of: str, job_name: str) -> None:
    """The state of before any step: there is no momentum, and the steps are 0."""
    settings, of_torch, words = KINDS["momentum"]
    model = plain_model()
    with daemon(job_name, optimizer=settings, shards=2) as job:
        ours = Optimizer(model, job_name, wait=True)
        new = ours.state_dict()
        if of == "torch":
            new = of_torch(plain_model().parameters(), **words).state_dict()
        train(model, ours, BATCHES[:3])
        assert ours.state_dict()["state"]
        ours.load_state_dict(new)
        found = ours.client.job_state()
        assert found.steps == 0
        assert not np.any(found.slots)
        assert ours.state_dict()["state"] == {}
        ours.close()
        job.check()


def test_a_state_of_torch_without_steps(job_name: str) -> None:
    """SGD of torch counts none; its momentum is there to be saved before the job's first step."""
    settings, of_torch, words = KINDS["momentum"]
    twin, model = plain_model(), plain_model()
    theirs = of_torch(twin.parameters(), **words)
    train(twin, theirs, BATCHES[:2])
    with daemon(job_name, optimizer=settings) as job:
        ours = Optimizer(model, job_name)
        ours.load_state_dict(theirs.state_dict())
        found, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
        assert found.keys() == expected.keys()
        for number, one in expected.items():
            torch.testing.assert_close(found[number], one)
        ours.close()
        job.check()


def test_frozen_parameters(job_name: str) -> None:
    """Torch's optimizer is given them too, and numbers them."""
    settings, of_torch, words = KINDS["adam"]
    models = plain_model(), plain_model()
    for model in models:
        model[0].weight.requires_grad_(False)  # type: ignore[index]
    theirs = of_torch(models[1].parameters(), **words)
    train(models[1], theirs, BATCHES[:5])
    model = plain_model()
    model.load_state_dict(models[1].state_dict())
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    with daemon(job_name, optimizer=settings) as job:
        ours = Optimizer(model, job_name, wait=True)
        ours.load_state_dict(theirs.state_dict())
        train(model, ours, BATCHES[5:20])
        train(models[1], theirs, BATCHES[5:20])
        same_state(model, models[1])
        ours.close()
        job.check()


def test_the_state_of_another_optimizer(job_name: str) -> None:
    twin, model = plain_model(), plain_model()
    theirs = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    train(twin, theirs, BATCHES[:2])
    with daemon(job_name, optimizer=KINDS["adam"][0]) as job:
        ours = Optimizer(model, job_name)
        with pytest.raises(UsageError, match="momentum_buffer, and the job's adam has") as caught:
            ours.load_state_dict(theirs.state_dict())
        assert "\n" not in str(caught.value)
        adam = torch.optim.Adam(twin.parameters(), 0.01, betas=(0.8, 0.9))
        train(twin, adam, BATCHES[:2])
        with pytest.warns(UserWarning, match="betas was saved as"):
            ours.load_state_dict(adam.state_dict())
        ours.close()
        job.check()
