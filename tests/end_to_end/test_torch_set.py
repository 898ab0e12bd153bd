"""`param_groups` show what `gadei-ps set` changes, and schedulers of torch keep their meaning."""

from __future__ import annotations

import pytest
import torch
from support import PATIENCE_S, daemon, live_weights

from gadei_ps.commands import change
from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import Optimizer


def _model() -> torch.nn.Module:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


class Learner:
    """A script whose gradients are all one."""

    def __init__(self, job: str, **settings: object) -> None:
        self.job = job
        self.model = _model()
        self.optimizer = Optimizer(self.model, job, wait=True, **settings)  # type: ignore[arg-type]
        self.group = self.optimizer.param_groups[0]

    def step(self) -> float:
        """Return how far the weight has moved."""
        before = float(live_weights(self.job)[0])
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).backward()
        self.optimizer.step()
        return round(before - float(live_weights(self.job)[0]), 6)


def _set(job: str, **values: object) -> None:
    change.set_optimizer(job, values, PATIENCE_S)


def test_groups_show_the_job(job_name: str) -> None:
    with daemon(job_name, optimizer={}):
        one = Learner(job_name, kind="sgd", lr=1.0, momentum=0.5)
        assert one.step() == 1.0
        _set(job_name, lr=0.5, momentum=0.0, weight_decay=0.25)
        assert one.step() == pytest.approx(0.5 * (1.0 - 0.25))
        assert (one.group["lr"], one.group["momentum"], one.group["weight_decay"]) == (0.5, 0, 0.25)
        _set(job_name, weight_decay=0.0)
        # A rate that the script has chosen stays as it is beside the job's.
        one.group["lr"] = 0.25
        assert one.step() == 0.25
        _set(job_name, lr=1.0)
        assert one.step() == 0.5
        assert one.group["lr"] == 0.5
        _set(job_name, lr=0.0)
        assert one.step() == 0.0
        _set(job_name, lr=1.0)
        assert one.step() == 0.5
        one.group["momentum"] = 0.9
        with pytest.raises(UsageError, match=r"param_groups\[0\]\['momentum'\]"):
            one.step()
        one.optimizer.close()


def test_betas(job_name: str) -> None:
    with daemon(job_name, optimizer={}):
        one = Learner(job_name, kind="adam", lr=0.1)
        one.step()
        _set(job_name, beta1=0.5, beta2=0.75, eps=1e-3)
        one.step()
        assert (one.group["betas"], one.group["eps"]) == ((0.5, 0.75), 1e-3)
        one.optimizer.close()


def test_alpha(job_name: str) -> None:
    """The gradient is always 1. Its mean square is 0.01, then 0.0075 + 0.25."""
    with daemon(job_name, optimizer={}):
        one = Learner(job_name, kind="rmsprop", lr=0.1)
        assert one.step() == pytest.approx(0.1 / 0.01**0.5)
        _set(job_name, alpha=0.75, eps=1e-3)
        assert one.step() == pytest.approx(0.1 / ((0.0075 + 0.25) ** 0.5 + 1e-3), abs=1e-6)
        assert (one.group["alpha"], one.group["eps"]) == (0.75, 1e-3)
        with pytest.raises(UsageError, match="beta1: the job's optimizer is rmsprop, which has"):
            _set(job_name, beta1=0.5)
        one.optimizer.close()


@pytest.mark.parametrize("absolute", [False, True])
def test_schedulers_of_torch_go_on(absolute: bool, job_name: str) -> None:
    """Set a learning rate or multiply it: the schedule and the job's learning rate multiply."""
    with daemon(job_name, optimizer={}):
        one = Learner(job_name, kind="sgd", lr=1.0)
        scheduler: torch.optim.lr_scheduler.LRScheduler
        if absolute:
            scheduler = torch.optim.lr_scheduler.LambdaLR(one.optimizer, lambda step: 0.5**step)
        else:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(one.optimizer, 0.5)
        moved = []
        for number in range(4):
            if number == 2:
                _set(job_name, lr=4.0)
            moved.append(one.step())
            scheduler.step()
        assert moved == [1.0, 0.5, 1.0, 0.5]
        one.optimizer.close()


def test_a_learner_that_comes_later(job_name: str) -> None:
    """Send the settings of the first script again; the reply has those in force."""
    with daemon(job_name, optimizer={}):
        one = Learner(job_name, kind="sgd", lr=1.0)
        assert one.step() == 1.0
        _set(job_name, lr=0.5)
        with pytest.warns(UserWarning, match="has lr 0.5 from gadei-ps set, which overrides"):
            other = Learner(job_name, kind="sgd", lr=1.0)
        assert other.group["lr"] == 0.5
        assert other.step() == 0.5
        other.optimizer.close()
        one.optimizer.close()
