"""Learners that draw the same random numbers: the later one says so at its first step."""

from __future__ import annotations

import warnings
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from support import Child, daemon
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.learners.torch import Optimizer

SAID = "another learner has the same seed as this one, 5: if the mini-batches are drawn by it"


def _model() -> nn.Module:
    return nn.Linear(4, 1)


def _steps(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """What two steps say; the optimizer ends."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        optimizer.close()
    return [str(one.message) for one in said]


def _first(pipe: Connection, job: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = _model()
    optimizer = Optimizer(model, job)
    pipe.send(None)
    pipe.recv()
    pipe.send(_steps(optimizer, model))
    pipe.recv()


def _later(job: str, *, then: int | None = None, work: bool = False) -> list[str]:
    """What a learner with seed 5 says, which takes another one `then`, or the server's batches."""
    torch.manual_seed(5)
    model = _model()
    optimizer = Optimizer(model, job)
    if then is not None:
        torch.manual_seed(then)
    if not work:
        return _steps(optimizer, model)
    for _ in optimizer.batches(8, 4, 1):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    optimizer.close()
    return []


@pytest.mark.parametrize("same", [True, False])
def test_said_once_and_by_the_later_one(same: bool, job_name: str) -> None:
    with daemon(job_name) as job:
        first = Child(_first, job_name, 5 if same else 6)
        first.receive()
        said: list[Any] = _later(job_name)
        assert [one[: len(SAID)] for one in said] == [SAID] * same
        assert not _later(job_name, then=7)
        assert not _later(job_name, work=True)
        first.send()
        assert first.receive() == []
        first.kill()  # its seed goes with it
        assert not _later(job_name)
        job.check()


def test_two_in_one_process_draw_in_turn(job_name: str) -> None:
    with daemon(job_name) as job:
        torch.manual_seed(5)
        one = Optimizer(_model(), job_name)
        assert not _later(job_name)
        one.close()
        job.check()
