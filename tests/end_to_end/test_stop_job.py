"""A learner or a limit ends the job for all its learners."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support import daemon, eventually, status
from support.torch_models import plain_model
from torch import nn

from gadei_ps.cli.options import limits
from gadei_ps.errors import GadeiError, JobStopped, UsageError
from gadei_ps.job import config
from gadei_ps.learners import exit_hook
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import LocalOptimizer, Optimizer

INPUTS = torch.ones(2, 10)


def _of_torch(model: nn.Module, job: str) -> Optimizer:
    return Optimizer(model, job)


def _local(model: nn.Module, job: str) -> LocalOptimizer:
    return LocalOptimizer(model, lambda p: torch.optim.SGD(p, 0.1), job)


@pytest.mark.parametrize(("make", "kind"), [(_of_torch, "sgd"), (_local, "add")])
def test_data_of_its_own(job_name: str, make: Any, kind: str) -> None:
    """The step in which the learner can see the stop is applied; the next one is refused."""
    with daemon(job_name, optimizer={"kind": kind}) as job:
        model = plain_model()
        optimizer = make(model, job_name)
        with pytest.raises(UsageError, match="give the reason as a text"):
            optimizer.stop_job(3)
        with pytest.raises(UsageError, match="give a number up to"):
            optimizer.stop_job(timeout_s=1e9)
        optimizer.stop_job("no better\nfor 3 epochs")
        assert status(job_name)["stop_reason"] == "no better for 3 epochs"
        model(INPUTS).sum().backward()
        optimizer.step()
        model(INPUTS).sum().backward()
        with pytest.raises(JobStopped, match=f"job '{job_name}' has ended: no better for 3 epochs"):
            optimizer.step()
        optimizer.client.wait_applied()
        assert status(job_name)["gradients_applied"] == 1
        optimizer.close()
        with pytest.raises(JobStopped):
            eventually(lambda: job.check())


@pytest.mark.parametrize("limit", [{"gradients": 7}, {"samples": 30}, {"epochs": 2}])
def test_limits(job_name: str, limit: dict[str, int]) -> None:
    """Check that loops over batches() end by themselves, with all that they have pushed applied."""
    with daemon(job_name, stop_after=limit) as job:
        with Client(job_name, tensors={"w": torch.zeros(8).numpy()}) as client:
            for batch in client.batches(samples=20, batch_size=4, epochs=1000):
                client.push({"w": torch.ones(8).numpy()}, samples=len(batch.indices))
                client.wait_applied()
            ended = status(job_name)
        done = {"gradients": ended["gradients_applied"], "samples": ended["samples"]}
        done["epochs"] = ended["work"]["epochs_done"]
        ((what, least),) = limit.items()
        assert done[what] >= least
        assert ended["gradients_applied"] == client.published
        assert ended["stop_reason"].endswith(f" of {least} {what}")
        with pytest.raises(JobStopped):
            eventually(lambda: job.check())


def test_limits_that_are_none() -> None:
    with pytest.raises(UsageError, match=r"stop_after.epochs: Input should be greater"):
        config.from_mapping({"name": "x", "stop_after": {"epochs": -1}}, "job")
    for given in ("steps=3", "epochs=-3", "epochs"):
        with pytest.raises(UsageError, match="write gradients=N, samples=N or epochs=N"):
            limits([given])
    assert limits(["epochs=3", "samples=9"]) == {"epochs": "3", "samples": "9"}


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as raised:
        return raised


def test_what_a_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Print one line about the end of its job; for other errors, no frames of gadei_ps."""

    def report(error: Exception) -> None:
        one = _raised(error)
        exit_hook._report(sys.__excepthook__, type(one), one, one.__traceback__)

    with pytest.raises(SystemExit) as ended:
        report(JobStopped("job 'x' has ended: enough"))
    assert ended.value.code == 4
    report(_refused())
    report(ValueError("own"))
    output = capsys.readouterr().err
    first, second, third = output.partition("Traceback")[0], *output.split("Traceback")[1:]
    assert first.startswith("gadei-ps: learner ")
    assert first.endswith(" ends: job 'x' has ended: enough\n")
    assert "in _refused" in second
    assert "in validate" not in second
    assert "UsageError: job: name: use 1 to 48 letters" in second
    assert "ValueError: own" in third


def _refused() -> GadeiError:
    try:
        config.from_mapping({"name": "?"}, "job")
    except GadeiError as error:
        return error
    raise AssertionError


def test_other_hooks_are_kept() -> None:
    heard: list[BaseException] = []
    error = UsageError("no")
    exit_hook._report(lambda *arguments: heard.append(arguments[1]), UsageError, error, None)
    assert heard == [error]
