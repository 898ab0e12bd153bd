"""Settings of torch's own optimizers as a job's, and a job's as torch's."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from gadei_ps.errors import UsageError
from gadei_ps.kernels.optimizers import TABLE, Kind, OptimizerSpec
from gadei_ps.learners.optimizer_settings import HOW, OF_A_GROUP, OptimizerSettings, read_settings
from gadei_ps.learners.torch.model import Trained

CLASSES: dict[Kind, type[torch.optim.Optimizer]] = {
    kind: getattr(torch.optim, one.torch) for kind, one in TABLE.items() if one.torch
}
KINDS: dict[type[torch.optim.Optimizer], str] = {}
for _kind, _class in CLASSES.items():
    KINDS.setdefault(_class, _kind.name.lower())
# What schedulers add to a group, and what is not a setting.
NOT_SETTINGS = (
    "params",
    "param_names",
    "initial_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
)


def settings(like: Any, given: Mapping[str, Any], trained: Trained) -> OptimizerSettings:
    """Return the settings of a script.

    like: an optimizer of torch, or its class.

    given: keywords of read_settings(). Raises UsageError for what a job cannot do.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if "groups" in given:
        given["groups"] = _named(given["groups"], trained)
    if like is None:
        return read_settings(**given)
    if "kind" in given:
        raise UsageError(f"give like= or kind={given['kind']!r}, not both")
    if isinstance(like, type):
        groups = given.pop("groups", None)
        return _of(_known(like), _of_class(like, given), groups)
    if not isinstance(like, torch.optim.Optimizer):
        raise UsageError(
            f"like= is a {type(like).__name__}: give an optimizer of torch.optim for this model, "
            "or its class"
        )
    if given:
        raise UsageError(
            f"{next(iter(given))}: like= brings all settings of its optimizer; set it there"
        )
    return _of_object(like, trained)


def _named(groups: Iterable[Mapping[str, Any]], trained: Trained) -> list[Mapping[str, Any]]:
    """Return the same groups, whose `params` are names and patterns.

    groups: their params are parameters of the model, modules, names or patterns, or several of
    these. Parameters that require no gradient are left out. Raises UsageError.
    """
    if isinstance(groups, Mapping) or not isinstance(groups, Iterable):
        raise UsageError("groups: give a list of dicts, as [{'params': '*.bias', 'lr': 0.1}]")
    name_of = {id(one): name for name, one in trained.parameters.items()}
    name_of |= {id(one): "" for one in trained.frozen.values()}
    return [
        dict(group) | {"params": [*filter(None, _names_of(number, group["params"], name_of))]}
        if isinstance(group, Mapping) and "params" in group
        else group
        for number, group in enumerate(groups)
    ]


def _names_of(number: int, given: Any, name_of: Mapping[int, str]) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, torch.Tensor):
        if id(given) not in name_of:
            raise UsageError(
                f"groups[{number}]: a parameter of shape {list(given.shape)} is not the model's"
            )
        yield name_of[id(given)]
    elif isinstance(given, torch.nn.Module):
        yield from _names_of(number, list(given.parameters()), name_of)
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        yield from _names_of(number, given[1], name_of)  # as named_parameters() has them
    elif isinstance(given, Iterable):
        for one in given:
            yield from _names_of(number, one, name_of)
    else:
        raise UsageError(
            f"groups[{number}]: params has {given!r}: give parameters, modules, or names"
        )


def from_zero(settings: OptimizerSettings) -> tuple[OptimizerSettings, list[bool]]:
    """Return the same with rates of 1 for rates of 0, and which groups began at 0, the last one
    that of all other parameters.

    A scheduler, or a wrapper, moves such a rate before the first step. The rates of a learner
    travel relative to the job's, which must not be 0.
    """

    def is_zero(lr: float | None) -> bool:
        return settings.lr == 0 if lr is None else lr == 0

    groups = settings.groups or ()
    zero = [*(is_zero(one.lr) for one in groups), settings.lr == 0]
    update: dict[str, Any] = {"lr": 1.0} if settings.lr == 0 else {}
    if any(one.lr == 0 for one in groups):
        update["groups"] = tuple(
            one.model_copy(update={"lr": 1.0}) if one.lr == 0 else one for one in groups
        )
    return settings.model_copy(update=update), zero


def _known(kind: type) -> str:
    if kind not in KINDS:
        known = ", ".join(one.__name__ for one in KINDS)
        raise UsageError(
            f"like={kind.__name__}: a job has the optimizers {known} of torch.optim, without "
            "changes; use one of them"
        )
    return KINDS[kind]


def _of_class(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a class of torch that is given these keywords."""
    signature = inspect.signature(kind)
    try:
        bound = signature.bind(None, **given)
    except TypeError as error:
        raise UsageError(f"like={kind.__name__}: {error}") from None
    bound.apply_defaults()
    first = next(iter(signature.parameters))
    return {name: value for name, value in bound.arguments.items() if name != first}


def _of_object(like: torch.optim.Optimizer, trained: Trained) -> OptimizerSettings:
    name, kind = type(like).__name__, _known(type(like))
    if any(map(_has_stepped, like.state.values())):
        raise UsageError(
            f"like={name}: it has made steps, and what it has kept of them (momentum) would be "
            "lost; give one that is new"
        )
    groups = [
        {key: value for key, value in group.items() if key not in NOT_SETTINGS}
        for group in like.param_groups
    ]
    for group in groups[1:]:
        for key, value in groups[0].items():
            if key not in OF_A_GROUP and key not in HOW and group.get(key) != value:
                raise UsageError(
                    f"like={name}: parameter groups with {key} {value!r} and {group.get(key)!r}: "
                    "use the same in all groups; those of a job differ in "
                    f"{', '.join(OF_A_GROUP)} only"
                )
    group_of = {
        id(parameter): number
        for number, group in enumerate(like.param_groups)
        for parameter in group["params"]
    }
    names: list[list[str]] = [[] for _ in groups]
    for key, parameter in trained.parameters.items():
        if id(parameter) not in group_of:
            raise UsageError(
                f"like={name}: it does not train parameter {key!r} of the model; give it all, or "
                "freeze that one with requires_grad_(False)"
            )
        names[group_of[id(parameter)]].append(key)
    if len(groups) == 1:
        return _of(kind, groups[0])
    for number, one in enumerate(names):
        if not one:
            raise UsageError(
                f"like={name}: parameter group {number} has no parameter of the model that "
                "requires a gradient; leave it out"
            )
    usual = {key: like.defaults[key] for key in OF_A_GROUP if key in like.defaults}
    if groups[0].get("nesterov"):
        usual.pop("momentum")  # it may be 0 there, which no group has
    base = groups[0] | usual
    own = [
        {"params": one}
        | {key: group[key] for key in OF_A_GROUP if key in group and group[key] != base[key]}
        for group, one in zip(groups, names, strict=True)
    ]
    return _of(kind, base, own)


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Return whether a step has left state. Adagrad makes its state before the first step."""
    return bool(float(state.get("step", 1)) and state)


def _of(
    kind: str, values: dict[str, Any], groups: list[dict[str, Any]] | None = None
) -> OptimizerSettings:
    values = dict(values)
    if values.pop("decoupled_weight_decay", False):
        kind = "adamw"
    return read_settings(kind=kind, groups=groups, **values)


def torch_settings(spec: OptimizerSpec) -> dict[str, Any]:
    """Return a job's optimizer as the settings of torch's class."""
    one = TABLE[spec.kind]
    names = ("lr", *(name for name in one.settings if name != "weight_decay"))
    group = {name: getattr(spec, name) for name in names}
    if "beta1" in group:
        group["betas"] = group.pop("beta1"), group.pop("beta2")
    return {**group, **one.torch_fixed, "weight_decay": spec.weight_decay}


def check_unchanged(group: Mapping[str, Any], made: Mapping[str, Any], number: int = 0) -> None:
    """Raise UsageError if a setting of a parameter group differs from the job's.

    What travels with each gradient may differ: lr, a momentum, and the first of betas. number: of
    the group.
    """
    for name, has in made.items():
        now = group.get(name, has)
        if name == "lr" or now == has or (isinstance(now, list) and tuple(now) == has):
            continue
        if has and moved(name, now) is not None and rest(now) == rest(has):
            continue
        none = name == "momentum" and not has
        raise UsageError(
            f"param_groups[{number}][{name!r}] was set to {now!r}, and the job has {has!r} for all "
            f"of its gradients: set it once, in Optimizer(model, kind=..., {name}=...) or in "
            "[optimizer] of the job file"
            + ("; a scheduler moves a momentum that is not 0 there" if none else "")
        )


def moved(name: str, value: Any) -> float | None:
    """Return the momentum, or the first beta, in a setting of that name; None in another setting.

    Raises UsageError for what cannot be one.
    """
    if name == "betas" and isinstance(value, tuple | list) and len(value) == 2:
        value = value[0]
    elif name != "momentum":
        return None
    try:
        momentum = float(value)
    except (TypeError, ValueError):
        momentum = -1.0
    if not 0 <= momentum < 1:
        raise UsageError(f"{name} was set to {value!r}: set a number from 0 on, below 1")
    return momentum


def rest(value: Any) -> Any:
    """Return the part of a setting that does not travel with a gradient."""
    return value[1] if isinstance(value, tuple | list) else None
