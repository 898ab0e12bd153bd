"""Optimizer settings of a script, by torch's names; and how they lie in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.job.config import JobConfig, OptimizerConfig
from gadei_ps.job.optimizer_config import ScriptSettings, Settings
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec
from gadei_ps.learners.optimizer_settings import OF_TORCH, OptimizerSettings, read_settings
from gadei_ps.learners.torch.convert_settings import check_unchanged, settings, torch_settings
from gadei_ps.learners.torch.model import Trained
from gadei_ps.memory import layout
from gadei_ps.watchdog import script
from gadei_ps.watchdog.script import Script

CLASSES = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}


def model() -> nn.Module:
    return nn.Linear(3, 2)


def like(optimizer: Any, module: nn.Module, **given: Any) -> OptimizerSettings:
    return settings(optimizer, given, Trained.of(module))


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_defaults_are_torchs(kind: str) -> None:
    """Compare by kind, by class, and by an optimizer; with and without another learning rate."""
    module, made = model(), CLASSES[kind]
    for given in ({}, {"lr": 0.3}):
        wanted = OptimizerSettings(kind=kind, groups=(), **{**OF_TORCH[kind], **given})
        assert read_settings(kind=kind, **given) == wanted
        assert like(made, module, **given) == wanted
        assert like(made(module.parameters(), **given), module) == wanted


def test_torchs_words() -> None:
    assert read_settings() == OptimizerSettings()
    assert read_settings(lr=0.1) == OptimizerSettings(lr=0.1)
    assert read_settings(kind="SGD", momentum=0.8).kind == "momentum"
    assert read_settings(kind="sgd", momentum=0).kind == "sgd"
    assert read_settings(kind="sgd", momentum=0.8, nesterov=True).kind == "nesterov"
    assert read_settings(kind="nesterov", lr=1).momentum == 0.9
    adam = read_settings(kind="adam", betas=(0.5, 0.6), eps=1e-6, amsgrad=False, fused=True)
    assert (adam.beta1, adam.beta2, adam.eps, adam.weight_decay) == (0.5, 0.6, 1e-6, 0.0)
    module = model()
    alone = torch.optim.SGD(module.parameters(), torch.tensor(0.5), momentum=0.7, nesterov=True)
    assert like(alone, module) == read_settings(kind="nesterov", lr=0.5, momentum=0.7)
    decoupled = torch.optim.Adam(module.parameters(), weight_decay=0.1, decoupled_weight_decay=True)
    assert like(decoupled, module) == read_settings(kind="adamw", weight_decay=0.1)


@pytest.mark.parametrize("given", [{}, {"momentum": 0}, {"momentum": 0.9}])
def test_a_momentum_of_one_group(given: dict[str, Any]) -> None:
    """SGD has a momentum then; that of the other parameters is 0 unless it is given."""
    group = {"params": "a", "momentum": 0.5}
    for kind in ("sgd", "SGD") + ("momentum",) * bool(given):
        made = read_settings(kind=kind, groups=[group], **given)
        assert (made.kind, made.momentum) == ("momentum", given.get("momentum", 0))
        assert made.groups is not None
        assert made.groups[0].momentum == 0.5
    with pytest.raises(UsageError, match="nesterov=True needs a momentum above 0"):
        read_settings(kind="sgd", nesterov=True, groups=[group])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"groups": [{"params": "a", "eps": 1e-3}]}, "groups[0]: eps: give kind as well"),
        ({"kind": "lion"}, "optimizer kind 'lion': use one of sgd, momentum"),
        ({"momentum": 0.9}, "momentum=0.9: give kind as well"),
        ({"kind": "adam", "momentum": 0.9}, "momentum: adam has none"),
        ({"kind": "adam", "nesterov": True}, "nesterov: adam has none"),
        ({"kind": "sgd", "nesterov": True}, "needs a momentum above 0"),
        ({"kind": "sgd", "betas": (0.9, 0.99)}, "betas: sgd has none"),
        ({"kind": "adam", "betas": (0.9,)}, "give two numbers"),
        ({"kind": "adam", "betas": 0.9}, "give two numbers"),
        ({"kind": torch.optim.Adam}, "like=Adam"),
        ({"lr": 10**400}, "give a number"),
        ({"lr": b"1"}, "give a number"),
        ({"kind": "adam", "betas": (0.9, 1.0)}, "beta2 must be in"),
        ({"kind": "adam", "amsgrad": True}, "amsgrad=True: a job's optimizer cannot do that"),
        ({"kind": "sgd", "dampening": 0.1}, "dampening=0.1: a job's optimizer cannot"),
        ({"kind": "sgd", "maximize": True}, "maximize=True"),
        ({"kind": "sgd", "lr": "0.1"}, "lr='0.1': give a number"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"veiw": False}, "veiw=False: an optimizer has no such setting"),
    ],
)
def test_settings_that_a_job_cannot_have(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as info:
        read_settings(**given)
    assert why in str(info.value)


def test_what_cannot_be_taken_over() -> None:
    module = model()
    parameters = list(module.parameters())
    used = torch.optim.Adam(parameters)
    module(torch.ones(1, 3)).sum().backward()
    used.step()
    groups = [{"params": parameters[:1], "nesterov": True}, {"params": parameters[1:]}]
    empty = [{"params": parameters}, {"params": nn.Linear(1, 1).parameters()}]
    for optimizer, given, why in (
        (torch.optim.Adamax, {}, "like=Adamax: a job has the optimizers SGD, Adagrad"),
        (torch.optim.RMSprop, {"centered": True}, "centered=True: a job's optimizer cannot do"),
        (torch.optim.Adam(parameters, amsgrad=True), {}, "amsgrad=True: a job's optimizer cannot"),
        (torch.optim.AdamW, {"momentum": 0.9}, "like=AdamW: got an unexpected keyword argument"),
        (torch.optim.AdamW, {"kind": "adam"}, "give like= or kind='adam', not both"),
        (torch.optim.AdamW(parameters), {"lr": 0.1}, "lr: like= brings all settings"),
        (
            torch.optim.SGD(groups, momentum=0.9),
            {},
            "parameter groups with nesterov True and False",
        ),
        (torch.optim.SGD(empty), {}, "parameter group 1 has no parameter of the model"),
        (torch.optim.SGD(parameters[:1]), {}, "it does not train parameter 'bias'"),
        (used, {}, "it has made steps"),
        (parameters, {}, "give an optimizer of torch.optim for this model, or its class"),
    ):
        with pytest.raises(UsageError) as info:
            like(optimizer, module, **given)
        assert why in str(info.value)
        assert "\n" not in str(info.value)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.ADD])
def test_param_groups_are_torchs(kind: Kind) -> None:
    spec = OptimizerSpec(kind, 0.3, momentum=0.7, beta1=0.8, weight_decay=0.1)
    group = torch_settings(spec)
    name = "sgd" if kind in (Kind.MOMENTUM, Kind.NESTEROV) else kind.name.lower()
    made = CLASSES[name](
        model().parameters(), **{key: value for key, value in group.items() if key != "eps"}
    )
    theirs = made.param_groups[0]
    assert {key: theirs[key] for key in group} == group
    with pytest.raises(UsageError, match="'betas'" if "betas" in group else "'weight_decay'"):
        check_unchanged({**group, "betas": (0.8, 0.5), "weight_decay": None}, group)
    check_unchanged({**theirs, "lr": 7, "betas": list(theirs.get("betas", ()))}, group)
    changed: dict[str, Any] = dict.fromkeys(group.keys() - {"lr"}, 0.123)
    if "betas" in group:
        changed["betas"] = 0.1, 0.2
        check_unchanged({**group, "betas": (0.1, group["betas"][1])}, group)
    if group.get("momentum"):
        del changed["momentum"]  # it travels with each gradient
        check_unchanged({**group, "momentum": 0.1}, group)
    for key, value in changed.items():
        with pytest.raises(
            UsageError, match=rf"param_groups\[0\]\['{key}'\] was set to .*job file"
        ):
            check_unchanged({**group, key: value}, group)


class Rows(np.ndarray):
    """Memory that loses all stores but the first ones, as where their process is killed."""

    stores: list[int]

    def __array_finalize__(self, whole: Any) -> None:
        self.stores = getattr(whole, "stores", [0])

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.stores[0]:
            self.stores[0] -= 1
            super().__setitem__(index, value)


class Memory(dict[str, Any]):
    """A control segment's words, of which only the first `left` stores are done."""

    def __init__(self) -> None:
        rows = np.zeros((2, layout.MAX_GROUPS, 16)).view(Rows)
        rows.stores = self.left = [1000]
        super().__init__(script=rows, script_word=0)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.left[0]:
            self.left[0] -= 1
            super().__setitem__(name, value)

    def view(self, _: object) -> Memory:
        """Return a view like a segment's."""
        return self


def test_a_watchdog_that_dies_while_it_enters_them() -> None:
    old = Script(ScriptSettings(kind="adamw", lr=0.1, groups=()), is_open=True, saved=True)
    two = (Settings(lr=0.5, beta1=0.5), Settings(weight_decay=0.0))
    new = Script(ScriptSettings(kind="adam", lr=0.2, weight_decay=0.3, groups=two))
    last = Script(ScriptSettings(lr=0.4))
    seen = []
    for stores in range(4 + 1 + 3 + 2 + 2):
        memory: Any = Memory()
        assert script.read(memory) == Script()
        for one in (old, last, old):
            script.write(memory, one)
        memory.left[0] = stores
        script.write(memory, new)
        memory.left[0] = 1000
        seen.append(script.read(memory))
        script.write(memory, last)
        assert script.read(memory) == last
    assert set(map(repr, seen)) == {repr(old), repr(new)}
    assert seen[-1] == new


def test_a_default_of_another_optimizer_is_not_the_scripts() -> None:
    """Check AdamW: defaults of sgd do not apply to it, so status must not name the script."""
    spoken = Script(ScriptSettings(kind="sgd", lr=0.1, weight_decay=0.0))
    job = JobConfig(name="a", optimizer=OptimizerConfig(kind="adamw"))
    assert [spoken.source(job, name) for name in ("kind", "lr", "weight_decay")] == [
        *("job", "script", "default")
    ]
    assert spoken.source(JobConfig(name="a"), "weight_decay") == "script"
    for_any = Script(ScriptSettings(weight_decay=0.0))
    assert for_any.source(job, "weight_decay") == "script"
