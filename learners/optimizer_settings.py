"""Optimizer settings of a script, by the names of torch.optim."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

from gadei_ps.errors import UsageError
from gadei_ps.job.optimizer_config import MOST_GROUPS, ScriptSettings
from gadei_ps.job.parameter_groups import Group
from gadei_ps.kernels.optimizers import NAMES, Kind, OptimizerSpec, traits

KINDS = NAMES
OF_TORCH: dict[str, dict[str, float]] = {
    name: {"lr": traits(name).torch_lr, **traits(name).settings} for name in NAMES
}
"""Defaults of torch's class, for a script that gives only the kind."""
# Keywords of torch's classes that only choose how they compute, and those a job cannot have.
HOW = frozenset(("foreach", "fused", "capturable"))
CANNOT = frozenset(
    (
        "amsgrad",
        "centered",
        "dampening",
        "differentiable",
        "initial_accumulator_value",
        "lr_decay",
        "maximize",
    )
)

OF_A_GROUP = ("lr", "momentum", "betas", "alpha", "eps", "weight_decay")


class OptimizerSettings(ScriptSettings):
    """Settings of a script, with the names of the parameters in each group."""

    groups: tuple[Group, ...] | None = None

    def for_watchdog(self) -> ScriptSettings | None:
        """Return the same for the watchdog, which receives the groups of tensors with the model."""
        if self.is_empty:
            return None
        groups = None if self.groups is None else [one.given for one in self.groups]
        return ScriptSettings.model_validate({**self.given, "groups": groups})


def read_settings(
    *,
    kind: str | None = None,
    lr: SupportsFloat | None = None,
    momentum: float | None = None,
    nesterov: bool | None = None,
    betas: Sequence[float] | None = None,
    alpha: float | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    groups: Iterable[Mapping[str, Any]] | None = None,
    **others: object,
) -> OptimizerSettings:
    """Check and return the settings that a script gives.

    kind: one of KINDS; sgd with a momentum is momentum, as in torch.optim.SGD. With a kind, what is
    not given has the default of torch's class. Without one, only lr and weight_decay can be given,
    for whichever the job has. groups: as torch's parameter groups, the names of parameters, or
    patterns of names, as `params`; what a group does not set is that of the optimizer. A parameter
    belongs to the first group that names it. others: further keywords of torch's classes. Raises
    UsageError for what a job cannot do.
    """
    _check_others(others)
    own = None if groups is None else [_group(number, one) for number, one in enumerate(groups)]
    if own is not None and len(own) > MOST_GROUPS:
        raise UsageError(f"groups: {len(own)} are given; a job has at most {MOST_GROUPS}")
    given = {"momentum": momentum, "betas": betas, "alpha": alpha, "eps": eps}
    given["nesterov"] = nesterov or None
    if kind is None:
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"{name}={value!r}: give kind as well, one of {', '.join(KINDS)}")
        fields = {"lr": _number("lr", lr), "weight_decay": _number("weight_decay", weight_decay)}
        for number, group in enumerate(own or ()):
            for name in group.keys() - {"match", *fields}:
                word = "betas" if name.startswith("beta") else name
                raise UsageError(
                    f"groups[{number}]: {word}: give kind as well, one of {', '.join(KINDS)}"
                )
        return _checked(fields, own)
    most = max((one.get("momentum", 0.0) for one in own or ()), default=0.0)
    bare = momentum == 0 or (momentum is None and str(kind).lower() == "sgd")
    if most and bare and not nesterov and str(kind).lower() in ("sgd", "momentum"):
        name, momentum = _kind(kind, most, nesterov), 0.0
    else:
        name = _kind(kind, momentum, nesterov)
    values: dict[str, Any] = {
        "lr": _number("lr", lr),
        "momentum": _number("momentum", momentum),
        "alpha": _number("alpha", alpha),
        "eps": _number("eps", eps),
        "weight_decay": _number("weight_decay", weight_decay),
    }
    if betas is not None:
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise UsageError(f"betas={betas!r}: give two numbers, as (0.9, 0.999)")
        values["beta1"], values["beta2"] = (_number("betas", one) for one in betas)
    values = {field: value for field, value in values.items() if value is not None}
    _check_has(name, values)
    for number, group in enumerate(own or ()):
        _check_has(name, group, f"groups[{number}]: ")
    return _checked({"kind": name, **OF_TORCH[name], **values}, own or ())


def _check_has(kind: str, fields: dict[str, Any], where: str = "") -> None:
    """Raise UsageError for a field that the kind does not look at."""
    if kind == "sgd":
        fields.pop("momentum", None)  # it is 0
    for field in fields.keys() - OF_TORCH[kind].keys() - {"match"}:
        word = "betas" if field.startswith("beta") else field
        raise UsageError(f"{where}{word}: {kind} has none; leave it out, or give another kind")


def _group(number: int, given: Mapping[str, Any]) -> dict[str, Any]:
    where = f"groups[{number}]"
    if not isinstance(given, Mapping) or "params" not in given:
        raise UsageError(f"{where}: give a dict with params, as {{'params': '*.bias', 'lr': 0.1}}")
    names = given["params"]
    names = [names] if isinstance(names, str) else list(names)
    if not names or not all(isinstance(one, str) for one in names):
        raise UsageError(f"{where}: params={names!r}: give names of parameters, or patterns")
    fields: dict[str, Any] = {"match": tuple(names)}
    for name, value in given.items():
        if name == "params" or value is None:
            continue
        if name not in OF_A_GROUP:
            raise UsageError(
                f"{where}: {name}={value!r}: a group has params, {', '.join(OF_A_GROUP)}; give all "
                "else to the optimizer itself"
            )
        if name == "betas":
            if not isinstance(value, Sequence) or len(value) != 2:
                raise UsageError(f"{where}: betas={value!r}: give two numbers, as (0.9, 0.999)")
            fields["beta1"], fields["beta2"] = (_number(f"{where}: betas", one) for one in value)
        else:
            fields[name] = _number(f"{where}: {name}", value)
    return fields


def client_settings(
    optimizer: Mapping[str, Any] | OptimizerSettings | None,
    tensors: object,
    others: Mapping[str, Any],
) -> OptimizerSettings:
    """Return the settings that a client is given. tensors: None if it brings no model. others:
    arguments that it does not have. Raises UsageError."""
    for name, value in others.items():
        given = f"{name}={value!r}: a client has no such argument"
        known = name != "others" and name in inspect.signature(read_settings).parameters
        asked = {"kind": "sgd"} | {name: value}
        raise UsageError(f"{given}; write optimizer={asked!r}" if known else given)
    settings = (
        optimizer
        if isinstance(optimizer, OptimizerSettings)
        else read_settings(**(optimizer or {}))
    )
    if settings.groups and tensors is None:
        raise UsageError(
            "groups name parameters: give tensors, or [[optimizer.groups]] in the job file"
        )
    return settings


def _kind(kind: str, momentum: float | None, nesterov: bool | None) -> str:
    if isinstance(kind, type):
        raise UsageError(
            f"kind={kind.__name__}: write like={kind.__name__} for a class of torch, or give one "
            f"of {', '.join(KINDS)}"
        )
    name = str(kind).lower()
    if name not in KINDS:
        raise UsageError(f"optimizer kind {kind!r}: use one of {', '.join(KINDS)}")
    if name not in ("sgd", "momentum", "nesterov"):
        if nesterov:
            raise UsageError(f"nesterov: {name} has none; leave it out, or give kind='sgd'")
        return name
    if nesterov:
        if name == "sgd" and not momentum:
            raise UsageError("nesterov=True needs a momentum above 0: give momentum as well")
        return "nesterov"
    if momentum is None or (name == "nesterov" and nesterov is None):
        return name
    return "momentum" if momentum else "sgd"


def _number(name: str, value: SupportsFloat | None) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name}={value!r}: give a number") from None


def _checked(fields: dict[str, Any], groups: Sequence[dict[str, Any]] | None) -> OptimizerSettings:
    """Raise UsageError naming the field that is wrong."""
    fields = {name: value for name, value in fields.items() if value is not None}
    spec = {name: value for name, value in fields.items() if name != "kind"}
    kind = Kind[fields.get("kind", "sgd").upper()]
    own = [{name: one for name, one in group.items() if name != "match"} for group in groups or ()]
    where = "optimizer"
    try:
        OptimizerSpec(kind, **spec)
        for number, group in enumerate(own):
            where = f"groups[{number}]"
            OptimizerSpec(kind, **spec | group)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    said_groups = None if groups is None else tuple(Group(**group) for group in groups)
    return OptimizerSettings(**fields, groups=said_groups)


def _check_others(others: dict[str, object]) -> None:
    for name, value in others.items():
        if name not in HOW | CANNOT:
            raise UsageError(
                f"{name}={value!r}: an optimizer has no such setting; it has kind, lr, momentum, "
                "nesterov, betas, alpha, eps, weight_decay and groups"
            )
        if name in CANNOT and value:
            raise UsageError(
                f"{name}={value!r}: a job's optimizer cannot do that; leave it out (or train "
                "without gadei-ps)"
            )
