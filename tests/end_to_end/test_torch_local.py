"""A learner's own optimizer of torch's, in a job that adds updates."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from support import daemon, status
from support.torch_models import one_thread as one_thread
from support.torch_models import plain_model
from torch import nn

from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import LocalOptimizer, Optimizer

INPUTS = torch.randn(20, 10, generator=torch.Generator().manual_seed(5))
TARGETS = (INPUTS.sum(1) > 0).long()


@pytest.fixture
def job(job_name: str) -> Iterator[Daemon]:
    with daemon(job_name, sync="wsp:D=1,s_local=2", optimizer={"kind": "add"}) as one:
        yield one


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.8)


def _train(model: nn.Module, optimizer: LocalOptimizer | torch.optim.Optimizer, at: slice) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(INPUTS[at]), TARGETS[at]).backward()
    optimizer.step()


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_its_state_stays_with_the_learner(job: Daemon, job_name: str) -> None:
    """Momentum over ten mini-batches, bit for bit as the same program without a job."""
    model, twin = plain_model(), plain_model()
    optimizer, local = LocalOptimizer(model, momentum, job_name), momentum([*twin.parameters()])
    server, base = _values(twin), _values(twin)
    for number in range(10):
        if number == 0 or number % 3 == 2:  # pulls; its changes that it has not pushed stay
            with torch.no_grad():
                for own, was, now in zip(twin.parameters(), base, server, strict=True):
                    own.copy_(now + (own - was))
            base = [one.clone() for one in server]
        at = slice(2 * number, 2 * number + 2)
        _train(twin, local, at)
        model.eval()(INPUTS)  # an evaluation begins no mini-batch
        with torch.no_grad():
            model.train()(INPUTS)
        assert not optimizer.waves.in_flight
        _train(model, optimizer, at)
        if number in (2, 5, 8, 9):
            changed = _values(twin)
            for now, own, was in zip(server, changed, base, strict=True):
                now += own - was
            base = changed
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    client = optimizer.client
    optimizer.close()  # pushes the wave that has one mini-batch
    assert client.published == 4
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    other = plain_model()
    late = LocalOptimizer(other, momentum, job_name)
    for mine, theirs in zip(other.parameters(), server, strict=True):
        assert torch.equal(mine, theirs)
    late.close()


def test_batches_are_cut_into_mini_batches(job: Daemon, job_name: str) -> None:
    model = plain_model()
    optimizer = LocalOptimizer(model, momentum, job_name)
    taken: list[int] = []
    for batch in optimizer.batches(len(INPUTS), batch_size=2, epochs=1):
        taken += batch.indices.tolist()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(INPUTS[batch.indices]), TARGETS[batch.indices]).backward()
        optimizer.step()
    assert sorted(taken) == list(range(20))
    optimizer.client.wait_applied()
    report = status(job_name)
    # Waves of three mini-batches of two, and a last one of two samples.
    assert (report["gradients_applied"], report["learners"][0]["samples"]) == (4, 20)
    optimizer.close()


def test_gradients_and_updates_are_told_apart(job: Daemon, job_name: str) -> None:
    with pytest.raises(UsageError, match="adds updates, and Optimizer pushes gradients"):
        Optimizer(plain_model(), job_name)
    both = "has kind {} from its {}, but this script has {}: add is for scripts that push updates"
    of_job = "job file or command line"
    with pytest.raises(UsageError, match=both.format("add", of_job, "adamw")):
        Optimizer(plain_model(), job_name, kind="adamw")
    other = f"{job_name}-sgd"
    with (
        daemon(other, optimizer={"kind": "sgd"}),
        warnings.catch_warnings(),
        pytest.raises(UsageError, match=both.format("sgd", of_job, "add")) as refused,
    ):
        warnings.simplefilter("error")  # one line, and no more
        LocalOptimizer(plain_model(), momentum, other)
    assert "\n" not in str(refused.value)


def test_an_interrupted_push_is_made_up_for(job_name: str) -> None:
    """Press Ctrl-C in step(), as in a notebook: the next step pushes the changes of both."""
    with daemon(job_name, optimizer={}):
        model = plain_model()
        optimizer = LocalOptimizer(model, momentum, job_name)
        interrupted = mock.patch.object(optimizer.client, "push", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            _train(model, optimizer, slice(0, 2))
        _train(model, optimizer, slice(2, 4))
        optimizer.client.wait_applied()
        assert optimizer.client.published == 1
        for mine, jobs in zip(model.parameters(), optimizer.client.weights.values(), strict=True):
            torch.testing.assert_close(mine.detach(), torch.from_numpy(jobs.copy()))
        optimizer.close()


def test_it_says_itself_that_the_job_adds(job_name: str) -> None:
    with daemon(job_name, optimizer={}):
        optimizer = LocalOptimizer(plain_model(), momentum, job_name)
        LocalOptimizer(plain_model(), momentum, job_name).close()
        settings = status(job_name)["settings"]
        assert (settings["kind"], settings["lr"]) == ("add", 1.0)
        assert settings["from"] == {"kind": "script", "lr": "default"}
        with pytest.raises(UsageError, match="make is a SGD: give a function"):
            LocalOptimizer(plain_model(), momentum([*plain_model().parameters()]), job_name)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="make gave a NoneType"):
            LocalOptimizer(plain_model(), lambda p: None, job_name)  # type: ignore[arg-type,return-value]
        with pytest.raises(UsageError, match="has kind add from its first learner"):
            Optimizer(plain_model(), job_name, kind="sgd")
        optimizer.close()


def test_it_is_an_optimizer_of_torch(job: Daemon, job_name: str) -> None:
    """Give it the settings of the optimizer that was made, for schedulers and for a script."""
    model, twin = plain_model(), plain_model()
    optimizer, local = LocalOptimizer(model, momentum, job_name), momentum([*twin.parameters()])
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in (optimizer, local)]
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(nn.functional.cross_entropy(model(INPUTS), TARGETS)).backward()
    scaler.step(optimizer)
    _train(twin, local, slice(None))
    for one in schedulers:
        one.step()
    assert optimizer.local.param_groups[0]["lr"] == local.param_groups[0]["lr"] == 0.025
    saved, wanted = optimizer.state_dict(), local.state_dict()
    assert saved["param_groups"] == wanted["param_groups"]
    optimizer.load_state_dict(wanted)
    optimizer.param_groups[0]["lr"] = 0.01
    assert optimizer.local.param_groups[0]["lr"] == 0.01
    assert optimizer.state is optimizer.local.state
    with pytest.raises(UsageError, match="a job's model is fixed"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(UsageError, match="stays in the process that made it"):
        pickle.dumps(optimizer)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    optimizer.close()


def test_settings_belong_to_the_function() -> None:
    for given in ({}, {"lr": 0.1}, {"make": momentum, "lr": 0.1}):
        with pytest.raises(UsageError, match="takes a function that makes the optimizer with its"):
            LocalOptimizer(plain_model(), **given)
