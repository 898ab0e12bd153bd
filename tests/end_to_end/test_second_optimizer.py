"""A model that has an Optimizer already, as where a notebook's cell is run once more."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from support import daemon, eventually, status
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import LocalOptimizer, Optimizer
from gadei_ps.learners.virtual import VirtualWorker


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (Optimizer, {"lr": 0.1}),
        (Optimizer, {"lr": 0.1, "view": False}),
        (Optimizer, {"lr": 0.1, "free_gradients": True}),
        (LocalOptimizer, {"make": sgd}),
    ],
    ids=["view", "copy", "free", "local"],
)
def test_it_takes_the_place_of_the_first(make: Any, how: dict[str, Any], job_name: str) -> None:
    """Check BSP, where a learner that is left behind would stop all others."""
    with daemon(job_name, sync="bsp", optimizer={}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        first = make(model, job=job_name, **how)
        step(model, first)
        second = make(model, job=job_name, **how)
        for _ in range(3):
            step(model, second)
        eventually(lambda: status(job_name)["gradients_applied"] == 4)
        assert len(status(job_name)["learners"]) == 1
        with pytest.raises(UsageError, match="this learner has detached from its job"):
            step(model, first)
        first.close()  # does nothing to the second
        step(model, second)
        second.close()
        weights = second.client.weights["0.weight"]
        assert (model[0].weight.detach().numpy() == weights).all()
        with torch.no_grad():
            model[0].weight += 1  # in memory of its own
        eventually(lambda: not status(job_name)["learners"])


def test_a_second_that_is_refused(job_name: str) -> None:
    """The model is without an Optimizer then; one that says the same is let in."""
    with daemon(job_name, optimizer={}):
        model = nn.Linear(3, 2)
        step(model, Optimizer(model, job_name, lr=0.1))
        with pytest.raises(UsageError, match=r"has lr 0.1 from its first learner"):
            Optimizer(model, job_name, lr=0.2)
        model.weight.data += 0
        third = Optimizer(model, job_name, lr=0.1)
        step(model, third)
        third.client.wait_applied()
        assert status(job_name)["version"] == 2
        third.close()


class Failing(Optimizer):
    """Its constructor fails when all is made."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ZeroDivisionError


def _is_plain(model: nn.Module) -> None:
    """Nothing of a learner is left at it."""
    twin = copy.deepcopy(model)
    for one in model.modules():
        assert {*vars(one)} == {*vars(nn.Linear(1, 1))}
        assert not one._load_state_dict_pre_hooks
        assert not one._load_state_dict_post_hooks
    model.load_state_dict({name: one + 1 for name, one in twin.state_dict().items()})
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other + 1)
        one.data += 1  # in memory of its own


@pytest.mark.parametrize("how", [{}, {"view": False}, {"free_gradients": True}], ids=str)
def test_a_constructor_that_fails(how: dict[str, Any], job_name: str) -> None:
    """Check that what was loaded before stays in the model for the next one."""
    with daemon(job_name, optimizer={}):
        model = nn.Linear(3, 2)
        with pytest.raises(ZeroDivisionError):
            Failing(model, job_name, lr=0.1, **how)
        eventually(lambda: not status(job_name)["learners"])
        _is_plain(model)
        first = Optimizer(model, job_name, lr=0.1)
        step(model, first)
        if "free_gradients" not in how:
            model.load_state_dict({"weight": torch.full((2, 3), 5.0), "bias": torch.ones(2)})
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ZeroDivisionError):
            Failing(model, job_name, lr=0.1, **how)
        assert first.client.left
        eventually(lambda: not status(job_name)["learners"])
        if "free_gradients" not in how:
            for name, one in model.state_dict().items():
                assert torch.equal(one, before[name])
        _is_plain(model)


def test_gradients_that_leave_and_weights_that_were_loaded(job_name: str) -> None:
    """Refused before anything is changed."""
    with daemon(job_name, optimizer={}):
        model = nn.Linear(3, 2)
        first = Optimizer(model, job_name, lr=0.1, wait=True)
        step(model, first)
        model.load_state_dict({"weight": torch.full((2, 3), 5.0), "bias": torch.ones(2)})
        with pytest.raises(UsageError, match="was loaded into the model is not the job's yet"):
            Optimizer(model, job_name, lr=0.1, free_gradients=True)
        assert (model.weight == 5).all()
        first.assign(model.state_dict())
        assert (first.client.weights["weight"] == 5).all()
        second = Optimizer(model, job_name, lr=0.1, free_gradients=True)
        assert (model.weight == 5).all()
        step(model, second)
        second.close()


def test_another_job(job_name: str) -> None:
    """The model continues there, with the weights that it has."""
    with daemon(f"{job_name}-1"), daemon(f"{job_name}-2"):
        model = nn.Linear(3, 2)
        first = Optimizer(model, f"{job_name}-1")
        step(model, first)
        first.client.wait_applied()
        before = model.weight.detach().clone()
        second = Optimizer(model, f"{job_name}-2")
        assert (model.weight == before).all()
        step(model, second)
        second.client.wait_applied()
        assert (model.weight != before).any()
        assert not status(f"{job_name}-1")["learners"]
        second.close()


def test_a_part_of_the_model(job_name: str) -> None:
    """Two learners cannot have the same parameter."""
    with daemon(f"{job_name}-1"), daemon(f"{job_name}-2"), daemon(f"{job_name}-3", optimizer={}):
        trunk, head = nn.Linear(3, 2), nn.Linear(2, 2)
        whole = nn.Sequential(trunk, head)
        first = Optimizer(whole, f"{job_name}-1")
        belongs = r"belongs to an Optimizer that has not left its job: close\(\) that one first"
        with pytest.raises(UsageError, match="a part of this model has an Optimizer already"):
            Optimizer(trunk, f"{job_name}-2")
        apart = nn.Linear(3, 2)
        apart.weight = trunk.weight
        with pytest.raises(UsageError, match=f"parameter 'weight' {belongs}"):
            Optimizer(apart, f"{job_name}-2")
        with pytest.raises(UsageError, match="a part of this model has an Optimizer already"):
            Optimizer(nn.Sequential(nn.Linear(3, 2), head), f"{job_name}-2")
        with pytest.raises(UsageError, match=f"parameter '0.weight' {belongs}"):
            LocalOptimizer(whole, sgd, f"{job_name}-3")
        with pytest.raises(UsageError, match=f"parameter '0.weight' {belongs}"):
            VirtualWorker([trunk, head], ["host", "host"], sgd, f"{job_name}-3")
        step(whole, first)
        first.close()
        second = Optimizer(trunk, f"{job_name}-2")
        step(trunk, second)
        second.close()


@pytest.mark.parametrize("how", [{}, {"view": False}], ids=str)
def test_one_that_is_dropped_leaves(how: dict[str, Any], job_name: str) -> None:
    """Drop it as a cell does that makes a new model: nothing refers to the old one then."""
    with daemon(job_name):
        for _ in range(3):
            model = nn.Linear(3, 2)
            optimizer = Optimizer(model, job_name, **how)
            step(model, optimizer)
        eventually(lambda: len(status(job_name)["learners"]) == 1)
        del model, optimizer
        eventually(lambda: not status(job_name)["learners"])


def test_one_with_hooks_that_is_dropped_leaves(job_name: str) -> None:
    """It is part of a circle, which the collector finds."""
    with daemon(job_name):
        model = nn.Linear(3, 2)
        optimizer = Optimizer(model, job_name, free_gradients=True)
        step(model, optimizer)
        del model, optimizer
        gc.collect()
        eventually(lambda: not status(job_name)["learners"])
