"""RMSprop as a job's optimizer: what is said of it, shown, kept and refused."""

from __future__ import annotations

import pytest
import torch
from support import daemon, status
from support.torch_models import data, plain_model
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.job.config import OptimizerConfig
from gadei_ps.job.optimizer_config import ScriptSettings
from gadei_ps.learners.torch import Optimizer
from gadei_ps.show.optimizer_line import optimizer as shown

SETTINGS = {"lr": 0.002, "alpha": 0.9}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20) -> None:
    for inputs, targets in data(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_the_state_is_torchs(momentum: float, job_name: str) -> None:
    """Compare with torch: without momentum it has no buffer, so the state taken from it is zero."""
    settings = SETTINGS | {"momentum": momentum}
    model, twin = plain_model(), plain_model()
    with daemon(job_name, optimizer={}):
        like = torch.optim.RMSprop
        optimizer = Optimizer(model, job_name, like=like, wait=True, **settings)
        theirs = torch.optim.RMSprop(twin.parameters(), **settings)
        train(model, optimizer)
        train(twin, theirs)
        mine, wanted = optimizer.state_dict()["state"], theirs.state_dict()["state"]
        assert {number: {*one} for number, one in mine.items()} == {
            number: {*one} for number, one in wanted.items()
        }
        optimizer.assign(twin.state_dict())
        optimizer.load_state_dict(theirs.state_dict())
        train(model, optimizer)
        train(twin, theirs)
        for ours, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)
        centered = torch.optim.RMSprop(twin.parameters(), centered=True, **settings)
        train(twin, centered, 1)
        with (
            pytest.warns(UserWarning, match="centered was saved as True"),
            pytest.raises(UsageError, match=r"the state has grad_avg.* of another optimizer"),
        ):
            optimizer.load_state_dict(centered.state_dict())
        optimizer.close()


def test_the_job_file_and_status(job_name: str) -> None:
    """`alpha` is its word; the momentum of another kind means something else."""
    with daemon(job_name, optimizer={"kind": "rmsprop", "alpha": 0.9}):
        with pytest.warns(UserWarning, match=r"job file .* overrides the script's"):
            optimizer = Optimizer(plain_model(), job_name, kind="sgd", lr=0.5, momentum=0.9)
        settings = status(job_name)["settings"]
        assert (settings["kind"], settings["lr"], settings["momentum"], settings["alpha"]) == (
            ("rmsprop", 0.5, 0.0, 0.9)
        )
        assert shown(settings) == ("rmsprop, lr 0.5, alpha 0.9 (from the job; lr from the script)")
        group = optimizer.param_groups[0]
        assert (group["momentum"], group["alpha"], group["centered"]) == (0.0, 0.9, False)
        group["alpha"] = 0.8
        with pytest.raises(UsageError, match=r"\['alpha'\] was set to 0\.8, and the job has 0\.9"):
            optimizer.step()
        optimizer.close()


def test_what_is_refused(job_name: str) -> None:
    with daemon(job_name, optimizer={}):
        for given, why in (
            ({"kind": "rmsprop", "centered": True}, "centered=True: a job's optimizer cannot do"),
            ({"kind": "rmsprop", "alpha": 1.0}, r"alpha must be in \[0, 1\)"),
            ({"kind": "rmsprop", "betas": (0.9, 0.9)}, "betas: rmsprop has none"),
            ({"kind": "adam", "alpha": 0.9}, "alpha: adam has none"),
            ({"alpha": 0.9}, "alpha=0.9: give kind as well"),
        ):
            with pytest.raises(UsageError, match=why):
                Optimizer(plain_model(), job_name, **given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"optimizer: alpha must be in \[0, 1\)"):
        OptimizerConfig(kind="rmsprop", alpha=-0.1).spec()


def test_defaults() -> None:
    spec = OptimizerConfig(kind="rmsprop").spec(
        ScriptSettings(kind="momentum", momentum=0.5, lr=0.3)
    )
    assert (spec.momentum, spec.alpha, spec.eps, spec.lr) == (0.0, 0.99, 1e-8, 0.3)
    again = OptimizerConfig(kind="momentum").spec(
        ScriptSettings(kind="rmsprop", momentum=0.5, alpha=0.5)
    )
    assert (again.momentum, again.alpha) == (0.9, 0.99)
