"""Parameter groups of torch, in a job: equal to torch's own optimizers, schedulers included."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import daemon
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import Optimizer

STEPS = 200
# A class of torch, what it is given, and what one of its groups has.
CLASSES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}, {"lr": 0.05, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0, "weight_decay": 0.1}),
    "momentum in one group": (torch.optim.SGD, {}, {"momentum": 0.8, "weight_decay": 0.1}),
    "nesterov": (
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.5, "weight_decay": 0.1},
    ),
    "adagrad": (torch.optim.Adagrad, {}, {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-6}),
    "adam": (torch.optim.Adam, {}, {"lr": 0.002, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
    "rmsprop": (
        torch.optim.RMSprop,
        {"momentum": 0.5},
        {"lr": 0.002, "weight_decay": 0.1, "alpha": 0.9, "momentum": 0.0, "eps": 1e-6},
    ),
    "adamw": (torch.optim.AdamW, {}, {"lr": 0.002, "weight_decay": 0.3, "eps": 1e-6}),
}
RATES = (lambda t: 0.99**t, lambda t: 1.0, lambda t: 1 / (1 + t / 50))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.ReLU(), nn.Linear(30, 7))


def groups(model: nn.Sequential, one: dict[str, Any]) -> list[dict[str, Any]]:
    """Return them as torch takes them; the parameters of a group do not lie side by side."""
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    return [
        {"params": biases, "weight_decay": 0.0},
        {"params": [model[0].weight, model[3].weight], **one},
        {"params": [model[1].weight]},
    ]


def train(models: list[nn.Sequential], optimizers: list[torch.optim.Optimizer]) -> None:
    """The same data for all."""
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, list(RATES)) for one in optimizers]
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        inputs, targets = (
            torch.randn(16, 20, generator=draw),
            torch.randint(0, 7, (16,), generator=draw),
        )
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("kind", CLASSES)
def test_equal_to_torch(kind: str, job_name: str) -> None:
    made, given, one = CLASSES[kind]
    mine, theirs = network(), network()
    reference = made(groups(theirs, one), lr=0.01, **given)
    with daemon(job_name, optimizer={}):
        like: Any = made(groups(mine, one), lr=0.01, **given)
        optimizer = Optimizer(mine, job_name, like=like, wait=True)
        names = set(optimizer.param_groups[0]) - {"params"}
        for ours, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
            assert {name: ours[name] for name in names} == {name: other[name] for name in names}
            assert [one.shape for one in ours["params"]] == [one.shape for one in other["params"]]
        train([mine, theirs], [optimizer, reference])
        for ours, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours, other, rtol=2e-5, atol=2e-6)
        saved, wanted = optimizer.state_dict(), reference.state_dict()
        assert [one["params"] for one in saved["param_groups"]] == [
            one["params"] for one in wanted["param_groups"]
        ]
        for number, state in saved["state"].items():
            for name, value in state.items():
                other = wanted["state"].get(number, {}).get(name)
                if other is not None:  # torch keeps no momentum of 0
                    torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-5)
        reference.load_state_dict(saved)
        optimizer.load_state_dict(wanted)
        optimizer.close()


def test_parameters_modules_and_names(job_name: str) -> None:
    model, other = network(), network()
    model[0].bias.requires_grad_(False)
    in_script: list[dict[str, Any]] = [
        {"params": [model[3], "1.weight"], "lr": 0.5},
        {"params": iter([model[0].bias, ("1.bias", model[1].bias)]), "weight_decay": 0.25},
        {"params": "*", "betas": (0.5, 0.5)},
    ]
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, kind="adamw", groups=in_script)
        assert [[*map(id, one["params"])] for one in optimizer.param_groups] == [
            [id(model[3].weight), id(model[3].bias), id(model[1].weight)],  # as they are given
            [id(model[1].bias)],
            [id(model[0].weight)],
        ]
        assert [one["lr"] for one in optimizer.param_groups] == [0.5, 1e-3, 1e-3]
        assert [one["weight_decay"] for one in optimizer.param_groups] == [0.01, 0.25, 0.01]
        assert optimizer.param_groups[2]["betas"] == (0.5, 0.5)
        optimizer.param_groups[1]["weight_decay"] = 0.1
        model(torch.ones(2, 20)).sum().backward()
        with pytest.raises(
            UsageError, match=r"param_groups\[1\]\['weight_decay'\] was set to 0\.1"
        ):
            optimizer.step()
        optimizer.param_groups[1]["weight_decay"] = 0.25
        optimizer.param_groups[2]["lr"] = -1
        with pytest.raises(UsageError, match=r"param_groups\[2\]\['lr'\] is -1"):
            optimizer.step()
        saved = optimizer.state_dict()
        for one, lr in zip(saved["param_groups"], (0.5, 0.1, 1e-3), strict=True):
            one["lr"] = lr
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            optimizer.load_state_dict(saved)
        assert len(warned) == 2
        assert "learning rate of param_groups[1] to 0.1; it was 0.001" in str(warned[0].message)
        saved["param_groups"].pop()
        with pytest.raises(ValueError, match="of other parameters"):
            optimizer.load_state_dict(saved)
        for bad, why in (
            (
                [{"params": other[0].weight}],
                r"groups\[0\]: a parameter of shape \[30, 20\] is not the model's",
            ),
            ([{"params": 3}], r"groups\[0\]: params has 3: give parameters, modules, or names"),
            ({"params": "*.bias"}, "groups: give a list of dicts"),
            ([{"lr": 3}], r"groups\[0\]: give a dict with params"),
            ([{"params": "*", "kind": "sgd"}], r"groups\[0\]: kind='sgd': a group has params, lr"),
            ([{"params": "*", "momentum": 0.5}], r"groups\[0\]: momentum: adamw has none"),
            ([{"params": "*", "lr": -1}], r"groups\[0\]: lr must be at least 0"),
            ([{"params": []}], r"groups\[0\]: params=\[\]: give names of parameters"),
            ([{"params": "*"}] * 16, "groups: 16 are given; a job has at most 15"),
        ):
            with pytest.raises(UsageError, match=why):
                Optimizer(network(), job_name, kind="adamw", groups=bad)
        optimizer.close()


def test_no_decay_for_biases_and_norms(job_name: str) -> None:
    """The example of the documentation."""
    model = network()
    with daemon(job_name, optimizer={}):
        norms = [one for one in model.modules() if isinstance(one, nn.LayerNorm)]
        optimizer = Optimizer(
            model,
            job_name,
            kind="adamw",
            lr=1e-3,
            weight_decay=0.1,
            groups=[{"params": ["*.bias", *norms], "weight_decay": 0}],
        )
        assert [one["weight_decay"] for one in optimizer.param_groups] == [0, 0.1]
        assert [len(one["params"]) for one in optimizer.param_groups] == [4, 2]
        optimizer.close()
