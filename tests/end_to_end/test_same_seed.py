"""Learners that begin with the same mini-batch: the later one warns at its first step."""

from __future__ import annotations

import warnings
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from support import Child, daemon
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import Optimizer
from gadei_ps.learners.torch.first_batch import FirstBatch

SAID = "another learner has the same seed as this one, 5, and has begun with the same mini-batch"


def _model() -> nn.Module:
    return nn.Linear(4, 1)


def _steps(optimizer: Optimizer, model: nn.Module, part: int = 1) -> list[str]:
    """Return warnings of two steps with a part of the data."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            model(input=torch.full((2, 4), float(part))).sum().backward()
            optimizer.step()
    return [str(one.message) for one in warned]


def _first(pipe: Connection, job: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = _model()
    optimizer = Optimizer(model, job)
    pipe.send(_steps(optimizer, model))
    pipe.recv()


def _later(job: str, *, then: int | None = None, work: bool = False, part: int = 1) -> list[str]:
    """Return warnings of a learner with seed 5, and its next seed. work: of server batches."""
    torch.manual_seed(5)
    model = _model()
    optimizer = Optimizer(model, job)
    if then is not None:
        torch.manual_seed(then)
    if not work:
        warned = _steps(optimizer, model, part)
        optimizer.close()
        return warned
    for _ in optimizer.batches(8, 4, 1):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    optimizer.close()
    return []


@pytest.mark.parametrize("same", [True, False])
def test_said_once_and_by_the_later_one(same: bool, job_name: str) -> None:
    with daemon(job_name) as job:
        first = Child(_first, job_name, 5 if same else 6)
        assert first.receive() == []
        messages: list[Any] = _later(job_name)
        assert [one[: len(SAID)] for one in messages] == [SAID] * same
        assert not _later(job_name, then=7)
        assert not _later(job_name, part=2), "a part of its own, by the same permutation"
        assert not _later(job_name, work=True)
        first.kill()  # its mini-batch goes with it
        assert not _later(job_name)
        job.check()


def test_two_in_one_process_draw_in_turn(job_name: str) -> None:
    with daemon(job_name) as job:
        torch.manual_seed(5)
        model = _model()
        one = Optimizer(model, job_name)
        assert not _steps(one, model)
        assert not _later(job_name)
        one.close()
        job.check()


def test_a_process_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GADEI_PS_JOB", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UsageError, match="was started by torchrun, and has no job"):
        Optimizer(_model())


def test_a_compiled_model_is_not_looked_at() -> None:
    model = _model()
    first = FirstBatch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.ones(2, 4))
    assert first._digest is None
    model(torch.ones(2, 4))
    assert first._digest is not None
