"""Steps of PyTorch's Optimizer that are refused, and loops that are left between two of them."""

from __future__ import annotations

import gc
import math
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from support import Child, daemon, eventually, status
from support.torch_models import batch_norm_model, plain_model
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer


def test_a_rate_beside_a_rate_of_zero(job_name: str) -> None:
    """A gradient carries its learning rate as a share of the job's: none is a share of zero."""
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0}):
        optimizer = Optimizer(plain_model(), job_name)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        with pytest.raises(UsageError, match=r"the job's rate is 0: .*above 0"):
            optimizer.step()
        optimizer.close()


@pytest.mark.parametrize(
    ("job", "most"), [(0.1, r"3\.4e\+37"), (1e-30, r"3\.4e\+08"), (0.0, "3.4e")]
)
def test_a_rate_that_float32_does_not_hold(job: float, most: str, job_name: str) -> None:
    """Set it as a scheduler does: alone, or as a share of the job's. One rounds to 0."""
    with daemon(job_name, optimizer={}):
        model = plain_model()
        optimizer = Optimizer(model, job_name, kind="sgd", lr=job)
        for rate in (1e39, math.inf):
            optimizer.param_groups[0]["lr"] = rate
            with pytest.raises(UsageError, match=rf"\['lr'\] is .*: set a number from 0 to {most}"):
                optimizer.step()
        if job:
            model(torch.ones(4, 10)).sum().backward()
            optimizer.param_groups[0]["lr"] = 1e-60
            optimizer.step()
            optimizer.client.wait_applied()
            for now, was in zip(model.parameters(), plain_model().parameters(), strict=True):
                assert torch.equal(now, was)
        optimizer.close()


def test_a_loop_that_was_left_goes_on_with_its_batch(job_name: str) -> None:
    """Leave it by break, or Ctrl-C in a notebook: each batch is still answered once."""
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.1}):
        model = plain_model()
        optimizer = Optimizer(model, job_name)
        for given, why in (
            ((0, 4, 1), "samples=0: use a whole number from 1"),
            ((12.0, 4, 1), r"samples=12\.0: use a whole number"),
            ((12, 4, 2**40), r"3 batches an epoch and \d+ epochs: give fewer"),
            ((12, 4, 1, -1), "seed=-1: use a whole number from 0"),
        ):
            with pytest.raises(UsageError, match=why):
                next(optimizer.batches(*given))  # type: ignore[arg-type]
        left = next(optimizer.batches(12, 4, 1))
        seen = []
        for batch in optimizer.batches(12, 4, 1):
            seen.append(batch.id)
            model(torch.ones(4, 10)).sum().backward()
            optimizer.step()
        assert seen[0] == left.id
        assert len(set(seen)) == len(seen) == 3
        optimizer.client.wait_applied()
        assert status(job_name)["work"]["epochs_done"] == 1
        optimizer.close()


KEPT: list[Optimizer] = []  # until the process ends


def _train_shared(_: Connection, job: str, model: nn.Module, how: str, view: bool) -> None:
    def train() -> None:
        with pytest.warns(
            UserWarning, match="they see the job's weights when this learner has ended"
        ):
            optimizer = Optimizer(model, job, kind="sgd", lr=0.001, view=view)
        if how == "at the end":
            KEPT.append(optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 10)).square().sum().backward()
            optimizer.step()
        if how == "closed":
            optimizer.close()

    train()
    gc.collect()


@pytest.mark.parametrize("view", [True, False], ids=["view", "copy"])
@pytest.mark.parametrize("how", ["closed", "dropped", "at the end"])
def test_a_model_that_other_processes_share(how: str, view: bool, job_name: str) -> None:
    """Share it as mnist_hogwild of pytorch/examples does: the owner tests it after their end."""
    model = batch_norm_model().share_memory()
    before = [one.detach().clone() for one in model.parameters()]
    with daemon(job_name, optimizer={}) as job:
        learners = [Child(_train_shared, job_name, model, how, view) for _ in range(2)]
        assert [one.join() for one in learners] == [0, 0]
        with Client(job_name) as client:
            eventually(lambda: status(job_name)["gradients_applied"] == 10)
            for name, mine in model.named_parameters():
                np.testing.assert_array_equal(mine.detach().numpy(), client.weights[name])
            # Buffers are those of one of the two; a learner that began late has counted on.
            assert int(model[1].num_batches_tracked) in (5, 10)
            eventually(lambda: int(client.weights["1.num_batches_tracked"]) in (5, 10))
        pairs = zip(model.parameters(), before, strict=True)
        assert not all(torch.equal(one, then) for one, then in pairs)
        job.check()


def test_a_warning_names_the_line_of_the_script(job_name: str) -> None:
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.5}):
        with pytest.warns(UserWarning, match="from its job file") as warned:
            optimizer = Optimizer(plain_model(), job_name, kind="sgd", lr=0.001)
        assert [one.filename for one in warned] == [__file__]
        optimizer.close()
