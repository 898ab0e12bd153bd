"""What a script says about the job's optimizer, in the words of torch.optim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsFloat

from gadei_ps.errors import UsageError
from gadei_ps.job.optimizer import NOTHING, Settings
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec

KINDS = tuple(kind.name.lower() for kind in Kind)
# What torch.optim's class has where the script says only its kind.
OF_TORCH: dict[str, dict[str, float]] = {
    "sgd": {"lr": 1e-3, "weight_decay": 0.0},
    "momentum": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0},
    "nesterov": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0},
    "adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "add": {"lr": 1.0},  # not torch's
    "adamw": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
}
# Of torch's classes: what only tells how they compute, and what the job cannot do.
HOW = frozenset(("foreach", "fused", "capturable"))
CANNOT = frozenset(
    ("amsgrad", "dampening", "differentiable", "initial_accumulator_value", "lr_decay", "maximize")
)


def said(
    *,
    kind: str | None = None,
    lr: SupportsFloat | None = None,
    momentum: float | None = None,
    nesterov: bool | None = None,
    betas: Sequence[float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    **others: object,
) -> Settings:
    """The settings that a script gives.

    kind: sgd, momentum, nesterov, adagrad, adam, adamw or add; sgd with a momentum is momentum, as
    in torch.optim.SGD. With a kind, what is not given has the default of torch's class. Without
    one, only lr and weight_decay can be given, for whichever the job has. others: further keywords
    of torch's classes. Raises UsageError for what a job cannot do.
    """
    _check_others(others)
    given = {"momentum": momentum, "betas": betas, "eps": eps, "nesterov": nesterov or None}
    if kind is None:
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"{name}={value!r}: give kind as well, one of {', '.join(KINDS)}")
        if lr is None and weight_decay is None:
            return NOTHING
        return _checked(
            {"lr": _number("lr", lr), "weight_decay": _number("weight_decay", weight_decay)}
        )
    name = _kind(kind, momentum, nesterov)
    fields: dict[str, Any] = {
        "lr": _number("lr", lr),
        "momentum": _number("momentum", momentum),
        "eps": _number("eps", eps),
        "weight_decay": _number("weight_decay", weight_decay),
    }
    if betas is not None:
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise UsageError(f"betas={betas!r}: give two numbers, as (0.9, 0.999)")
        fields["beta1"], fields["beta2"] = (_number("betas", one) for one in betas)
    fields = {field: value for field, value in fields.items() if value is not None}
    has = OF_TORCH[name]
    if name == "sgd":
        fields.pop("momentum", None)  # it is 0
    for field in fields.keys() - has.keys():
        word = "betas" if field.startswith("beta") else field
        raise UsageError(f"{word}: {name} has none; leave it out, or give another kind")
    return _checked({"kind": name, **has, **fields})


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


def _checked(fields: dict[str, Any]) -> Settings:
    """Raises UsageError naming the field that is wrong."""
    fields = {name: value for name, value in fields.items() if value is not None}
    spec = {name: value for name, value in fields.items() if name != "kind"}
    try:
        OptimizerSpec(Kind[fields.get("kind", "sgd").upper()], **spec)
    except ValueError as error:
        raise UsageError(f"optimizer: {error}") from None
    return Settings(**fields)


def _check_others(others: dict[str, object]) -> None:
    for name, value in others.items():
        if name not in HOW | CANNOT:
            raise UsageError(
                f"{name}={value!r}: an optimizer has no such setting; it has kind, lr, momentum, "
                "nesterov, betas, eps and weight_decay"
            )
        if name in CANNOT and value:
            raise UsageError(
                f"{name}={value!r}: a job's optimizer cannot do that; leave it out (or train "
                "without gadei-ps)"
            )
