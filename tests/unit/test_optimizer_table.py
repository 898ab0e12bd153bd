"""The table of optimizers: command line, job file, scripts, display and torch agree with it."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, get_args

import pytest
import torch

from gadei_ps.cli import options
from gadei_ps.job.optimizer_config import FIELDS, Settings, uses
from gadei_ps.kernels import cpu
from gadei_ps.kernels.optimizers import DEFAULTS, NAMES, TABLE, Kind, OptimizerSpec, slots, usual
from gadei_ps.learners.optimizer_settings import read_settings
from gadei_ps.learners.torch.convert_settings import CLASSES, KINDS, torch_settings
from gadei_ps.show.optimizer_line import optimizer


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_is_known_everywhere(kind: Kind) -> None:
    name, one = kind.name.lower(), TABLE[kind]
    assert name in NAMES
    assert name in set(options.OptimizerName)
    assert Settings(kind=name).kind == name
    assert read_settings(kind=name, momentum=0.9 if kind is Kind.NESTEROV else None).kind == name
    assert callable(cpu.KERNELS[kind])
    assert slots(kind) == len(one.slots) <= 2
    assert uses(name) == ("kind", "lr", *one.settings)
    assert set(one.settings) | {"kind"} <= set(FIELDS)
    assert set(one.job) <= set(DEFAULTS)
    assert one.with_momentum in ("", *one.slots)
    assert name in optimizer(
        {name: getattr(OptimizerSpec(kind), name) for name in DEFAULTS} | {"kind": name}
    )


def test_fields_of_the_table_are_those_of_the_specification() -> None:
    assert set(DEFAULTS) <= {one.name for one in fields(OptimizerSpec)}
    for kind in Kind:
        spec = OptimizerSpec(kind)
        assert spec.eps == usual(kind.name)["eps"]
        assert OptimizerSpec.unpack(spec.pack()) == spec


@pytest.mark.parametrize("kind", [kind for kind in Kind if TABLE[kind].torch])
def test_the_table_agrees_with_torch(kind: Kind) -> None:
    """Compare names and defaults with torch's class, and the slots with those that it makes."""
    one, made = TABLE[kind], CLASSES[kind]
    assert KINDS[made] in NAMES
    weight = torch.nn.Parameter(torch.ones(3))
    spec = OptimizerSpec(kind, lr=one.torch_lr, **one.settings)  # type: ignore[arg-type]
    given = torch_settings(spec)
    theirs = made([weight], **given)  # type: ignore[call-arg]
    group = theirs.param_groups[0]
    for name, value in {**given, **one.torch_saved}.items():
        assert group[name] == value, name
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(made).parameters.items()
    }
    assert float(defaults["lr"]) == one.torch_lr
    if kind not in (Kind.MOMENTUM, Kind.NESTEROV):  # which are torch's SGD with a momentum
        assert {name: defaults[name] for name in given} == given
    weight.grad = torch.ones(3)
    theirs.step()
    kept = {name for name, value in theirs.state[weight].items() if value is not None}
    assert kept - {"step"} == {*one.slots} - ({one.with_momentum} if not spec.momentum else set())
    assert ("step" in kept) == one.torch_steps


def test_a_setting_does_not_count_for_a_kind_where_it_means_something_else() -> None:
    """It does so where the kinds have different defaults."""

    def applying(settings: Settings, kind: str) -> dict[str, Any]:
        return {name: one for name, one in settings.applying(kind).items() if name != "kind"}

    adam = Settings(kind="adam", lr=0.1, eps=1e-3, beta1=0.5, weight_decay=0.2)
    assert applying(adam, "adamw") == {"lr": 0.1, "eps": 1e-3, "beta1": 0.5, "weight_decay": 0.2}
    assert applying(adam, "adagrad") == {"lr": 0.1, "weight_decay": 0.2}
    momentum = Settings(kind="momentum", lr=0.1, momentum=0.8)
    assert applying(momentum, "nesterov") == {"lr": 0.1, "momentum": 0.8}
    assert applying(momentum, "rmsprop") == {"lr": 0.1}
    assert applying(momentum, "add") == {}
    assert applying(Settings(lr=0.1), "add") == {"lr": 0.1}


def test_the_job_file_names_the_kinds() -> None:
    kinds = next(one for one in get_args(Settings.model_fields["kind"].annotation) if get_args(one))
    assert get_args(kinds) == NAMES
