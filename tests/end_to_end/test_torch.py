"""A plain PyTorch script trains as before once its optimizer line is changed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import PATIENCE_S, daemon, eventually, live_weights, status
from support.torch_models import (
    LOCAL,
    STEPS,
    batch_norm_model,
    close_late,
    data,
    plain_model,
    same_state,
)
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    steps: int = STEPS,
) -> list[float]:
    """The user's loop, for both optimizers."""
    losses = []
    for inputs, targets in data(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


# What a script says, and the same of torch. Without a job's word, what is left out is torch's.
SCRIPTS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"kind": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, 0.1)),
    "nesterov": (
        {"kind": "sgd", "lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, 0.05, 0.8, nesterov=True, weight_decay=0.01),
    ),
    "momentum": (
        {"like": torch.optim.SGD, "lr": 0.05, "momentum": 0.8},
        lambda p: torch.optim.SGD(p, 0.05, 0.8),
    ),
    "adagrad": ({"kind": "adagrad"}, torch.optim.Adagrad),
    "adam": (
        {"kind": "adam", "betas": (0.8, 0.99), "eps": 1e-6},
        lambda p: torch.optim.Adam(p, betas=(0.8, 0.99), eps=1e-6),
    ),
    "adamw": ({"like": torch.optim.AdamW}, torch.optim.AdamW),
    "rmsprop": (
        {"kind": "rmsprop", "lr": 0.001, "alpha": 0.9, "weight_decay": 0.01},
        lambda p: torch.optim.RMSprop(p, 0.001, alpha=0.9, weight_decay=0.01),
    ),
    "rmsprop with momentum": (
        {"like": torch.optim.RMSprop, "lr": 0.001, "momentum": 0.6, "eps": 1e-6},
        lambda p: torch.optim.RMSprop(p, 0.001, momentum=0.6, eps=1e-6),
    ),
}


@pytest.mark.parametrize(
    ("of_job", "of_script", "local"),
    [
        *((settings, {}, local) for settings, local in LOCAL.values()),
        *(({}, in_script, local) for in_script, local in SCRIPTS.values()),
    ],
    ids=[*LOCAL, *(f"script-{kind}" for kind in SCRIPTS)],
)
def test_as_torch(
    of_job: dict[str, Any],
    of_script: dict[str, Any],
    local: Callable[..., torch.optim.Optimizer],
    job_name: str,
) -> None:
    with daemon(job_name, sync="bsp", optimizer=of_job, shards=1):
        model, twin = plain_model(), plain_model()
        optimizer = Optimizer(model, job_name, **of_script)
        losses = train(model, optimizer)
        expected = train(twin, local(twin.parameters()))
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        same_state(model, twin)
        assert status(job_name)["version"] == STEPS
        optimizer.close()
        same_state(model, twin)
        model[0].weight.data += 1  # the memory is the model's own now
        eventually(lambda: not status(job_name)["learners"])
        with pytest.raises(UsageError, match="this learner has detached from its job"):
            train(model, optimizer)
        with pytest.raises(UsageError, match="this Optimizer stays in the process that made it"):
            pickle.dumps(optimizer)


@pytest.mark.parametrize("how", [{"view": False}, {"wait": True}], ids=str)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_alone_as_torch(kind: str, how: dict[str, bool], job_name: str) -> None:
    """Check that a learner that waits under ASP computes with its own gradient in the weights."""
    settings, local = LOCAL[kind]
    with daemon(job_name, optimizer=settings, shards=2):
        model, twin = plain_model(), plain_model()
        optimizer = Optimizer(model, job_name, **how)
        losses = train(model, optimizer, steps=200)
        expected = train(twin, local(twin.parameters()), steps=200)
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        same_state(model, twin)
        (one,) = status(job_name)["learners"]
        assert (one["applied"], one["staleness_max"]) == (200, 0)
        optimizer.close()


def test_closed_with_its_last_gradient(job_name: str) -> None:
    """Check that close() leaves all gradients of this learner in the model."""
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 2.0**-12}, hang_s=60):
        model = plain_model()
        optimizer = Optimizer(model, job_name)
        begin = model[0].weight.detach().clone()
        close_late(optimizer, model, job_name)
        np.testing.assert_allclose(begin - model[0].weight.detach(), 2.0**-12, rtol=1e-4)


SPARSE: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"kind": "sgd", "lr": 0.5}, lambda p: torch.optim.SGD(p, 0.5)),
    "adagrad": (
        {"kind": "adagrad", "lr": 0.1, "eps": 1e-10},
        lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-10),
    ),
    # Its eps is added elsewhere than Adam's.
    "adam": (
        {"kind": "adam", "lr": 0.01, "eps": 1e-12},
        lambda p: torch.optim.SparseAdam(list(p), 0.01, eps=1e-12),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
@pytest.mark.parametrize("kind", sorted(SPARSE))
def test_sparse_embeddings_as_torch(kind: str, job_name: str) -> None:
    """Only the rows that a batch touches move, with their optimizer state."""
    settings, local = SPARSE[kind]

    def embedding() -> nn.EmbeddingBag:
        torch.manual_seed(5)
        return nn.EmbeddingBag(500, 3, sparse=True, mode="sum", padding_idx=0)

    def words() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        source = torch.Generator().manual_seed(12)
        for _ in range(STEPS):
            tokens = torch.randint(0, 40, (8, 6), generator=source)  # some of them repeated
            yield tokens, tokens[:, 0] % 3

    def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for tokens, targets in words():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), targets).backward()
            optimizer.step()

    with daemon(job_name, sync="bsp", optimizer=settings, shards=2):
        model, twin = embedding(), embedding()
        before = twin.weight.detach().clone()
        optimizer = Optimizer(model, job_name)
        learn(model, optimizer)
        learn(twin, local(twin.parameters()))
        same_state(model, twin)
        moved = (model.weight.detach() != before).any(1)
        assert not moved[40:].any()
        assert not moved[0], "the padding"
        assert moved[1:40].all()
        assert status(job_name)["gradients_applied"] == STEPS
        optimizer.close()


@pytest.mark.parametrize("view", [True, False])
def test_scheduler_view_and_batch_norm(view: bool, job_name: str) -> None:
    """Together: the rate changes, weights are a view or a copy, statistics follow."""
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}):
        model, twin = batch_norm_model(), batch_norm_model()
        optimizer = Optimizer(model, job_name, view=view)
        local = torch.optim.SGD(twin.parameters(), 0.1)
        rate = torch.optim.lr_scheduler.StepLR
        losses = train(model, optimizer, rate(optimizer, 10, 0.5))
        expected = train(twin, local, rate(local, 10, 0.5))
        np.testing.assert_allclose(losses, expected, rtol=1e-3)
        same_state(model, twin)
        assert int(model[1].num_batches_tracked) == STEPS
        assert np.shares_memory(model[0].weight.detach().numpy(), optimizer.client.flat) == view
        shared = optimizer.client.weights
        optimizer.close()
        same_state(model, twin)  # the job's, even if the learner had a copy
        eventually(lambda: int(shared["1.num_batches_tracked"]) == STEPS)
        for name in ("1.running_mean", "1.running_var"):
            np.testing.assert_allclose(
                shared[name], twin.state_dict()[name].numpy(), rtol=1e-4, atol=1e-6
            )
        model[1].running_mean.fill_(7.0)
        optimizer.close()  # a second time: nothing happens to the model
        assert (model[1].running_mean == 7).all()


def test_what_is_not_trained(job_name: str) -> None:
    """The job has frozen parameters, out of reach of frames; constant buffers may be infinite."""
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}):
        model = plain_model()
        model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        model.register_buffer("count", torch.zeros(3, dtype=torch.long))
        model[0].weight.requires_grad_(False)
        frozen = model[0].weight.detach().clone()
        optimizer = Optimizer(model, job_name)
        assert {one.name for one in optimizer.client.model.tensors} == {
            "0.bias",
            "2.weight",
            "2.bias",
            "mask",
            "count",
        }
        assert [one.name for one in optimizer.client.model.frozen] == ["0.weight"]
        np.testing.assert_array_equal(optimizer.client.weights["0.weight"], frozen.numpy())
        losses = train(model, optimizer)
        torch.testing.assert_close(model[0].weight, frozen, rtol=0, atol=0)
        row = status(job_name)["learners"][0]
        assert (row["applied"], row["refused"]) == (STEPS, 0)
        assert np.mean(losses[-5:]) < np.mean(losses[:5])
        assert torch.isneginf(model.mask[0, 1])
        model[0].weight.requires_grad_(True)
        with pytest.warns(UserWarning, match=r"'0\.weight' requires a gradient now.*not trained"):
            train(model, optimizer, steps=2)
        train(model, optimizer, steps=2)  # it warns once
        optimizer.close()


def test_what_cannot_be_trained(job_name: str) -> None:
    with daemon(job_name):
        with pytest.raises(UsageError, match="no parameters"):
            Optimizer(nn.ReLU(), job_name)
        with pytest.raises(UsageError, match=r"'weight' has no values yet.*a batch"):
            Optimizer(nn.LazyLinear(3), job_name)
        with pytest.raises(UsageError, match="name=3: give a text"):
            Optimizer(plain_model(), job_name, name=3)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"the model itself, not its .* kind='adamw'"):
            Optimizer(plain_model().parameters(), job_name)
        with pytest.raises(UsageError, match=r"the job's name: write kind='adam'$"):
            Optimizer(plain_model(), "adam")
        with pytest.raises(UsageError, match=r"argument is the job's name, not 0\.1: write lr="):
            Optimizer(plain_model(), 0.1)  # type: ignore[arg-type]
        optimizer = Optimizer(plain_model(), job_name)
        with pytest.raises(UsageError, match="fixed"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        other = nn.Sequential(nn.Linear(10, 41), nn.Tanh(), nn.Linear(41, 3))
        with pytest.raises(ModelMismatch, match=r"'0\.weight' has shape \[41, 10\]"):
            Optimizer(other, job_name)
        optimizer.close()


def test_settings_that_move_while_it_trains(job_name: str) -> None:
    """The rate may; what every gradient of the job has in common may not."""
    with daemon(job_name, optimizer={}):
        model = plain_model()
        optimizer = Optimizer(model, job_name, like=torch.optim.SGD(model.parameters(), 0.1, 0.9))
        group = optimizer.param_groups[0]
        assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 0)
        group["lr"] = 0.2
        optimizer.step()
        group["weight_decay"] = 0.3
        with pytest.raises(UsageError, match=r"\['weight_decay'\] was set to 0\.3, and"):
            optimizer.step()
        group["weight_decay"] = 0
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10)
        assert group["momentum"] == 0.95
        optimizer.step()
        optimizer.client.wait_applied()
        assert status(job_name)["version"] == 2
        for wrong in ("fast", None, -0.1, float("nan"), float("inf")):
            group["lr"] = wrong
            with pytest.raises(UsageError, match=r"\['lr'\] is .*: set a number"):
                optimizer.step()
        group["lr"] = torch.tensor(0.1)
        before = model[0].bias.detach().clone()
        train(model, optimizer, steps=3)  # refused steps have left nothing behind
        optimizer.client.wait_applied()
        assert status(job_name)["version"] == 5
        assert (model[0].bias != before).any()
        optimizer.close()


def test_closure_and_missing_gradients(job_name: str) -> None:
    with daemon(job_name, sync="bsp", optimizer={"kind": "sgd", "lr": 0.1}):
        model = plain_model()
        optimizer = Optimizer(model, job_name)
        before = model[0].weight.detach().clone()
        optimizer.step()  # no backward yet: all gradients are zero
        torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)
        inputs, targets = next(data())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert status(job_name)["learners"][0]["loss"] == pytest.approx(float(loss.detach()))
        assert (model[0].weight != before).any()
        for values, why in (
            ({"loss": torch.ones(3)}, r"loss=a tensor of shape \[3\]\): give one number"),
            ({"loss": "low"}, r"loss='low'\): give one number"),
            ({"samples": 2.5}, r"samples=2\.5\): give a whole number"),
        ):
            with pytest.raises(UsageError, match=why):
                optimizer.report(**values)
        optimizer.close()


SCRIPT = """
import sys
import torch
from torch import nn
from gadei_ps.learners.torch import Optimizer, linear

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(20, 2)
inputs = torch.randn(400, 20)
targets = (inputs[:, 0] + inputs[:, 1] > 0).long()
optimizer = Optimizer(model)
for batch in optimizer.batches(samples=400, batch_size=10, epochs=6):
    at = torch.from_numpy(batch.indices)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs[at]), targets[at])
    loss.backward()
    optimizer.report(loss=loss)
    optimizer.step()
optimizer.state_dict()
optimizer.zero_grad(set_to_none=False)
optimizer.close()
assert "torch._dynamo" not in sys.modules, "which takes as long to load as all the rest"
"""


def test_two_learners_run_one_script(job_name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.1}):
        env = os.environ | {"GADEI_PS_JOB": job_name}
        team = [subprocess.Popen([sys.executable, str(script)], env=env) for _ in range(2)]
        assert [child.wait(PATIENCE_S) for child in team] == [0, 0]
        end = status(job_name)
        assert end["work"]["state"] == "done"
        assert end["gradients_applied"] == 40 * 6
        torch.manual_seed(0)
        model = nn.Linear(20, 2)
        inputs = torch.randn(400, 20)
        targets = (inputs[:, 0] + inputs[:, 1] > 0).long()
        before = nn.functional.cross_entropy(model(inputs), targets)
        with Client(job_name) as client:
            assert live_weights(job_name).size == client.model.elements
            with torch.no_grad():
                model.weight.copy_(torch.from_numpy(client.weights["weight"].copy()))
                model.bias.copy_(torch.from_numpy(client.weights["bias"].copy()))
        after = nn.functional.cross_entropy(model(inputs), targets)
        assert after < before / 2


def test_hooks_of_step_are_called(job_name: str) -> None:
    with daemon(job_name):
        model = plain_model()
        optimizer = Optimizer(model, job_name)
        called: list[str] = []
        first = optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        model(torch.zeros(2, 10)).sum().backward()
        optimizer.step()
        first.remove()
        optimizer.step()
        assert called == ["before", "after", "after"]
        optimizer.close()


def test_loading_the_optimizers_state(job_name: str) -> None:
    with daemon(job_name, optimizer={"kind": "adam", "lr": 0.1}):
        model, twin = plain_model(), plain_model()
        theirs = torch.optim.Adam(twin.parameters(), 0.3, weight_decay=0.7)
        train(twin, theirs, steps=1)
        optimizer = Optimizer(model, job_name)
        before = dict(optimizer.param_groups[0])
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.warns(UserWarning) as warned:
            optimizer.load_state_dict(theirs.state_dict())
        assert "weight_decay was saved as 0.7; the job keeps 0.0" in str(warned[0].message)
        assert len(warned) == 2
        assert "learning rate to 0.3; it was 0.1" in str(warned[1].message)
        assert optimizer.param_groups[0] == before | {"lr": 0.3}
        state = torch.optim.SGD([torch.zeros(1)], 0.1).state_dict()
        with pytest.raises(ValueError, match="other parameters"):
            optimizer.load_state_dict(state)
        optimizer.close()
