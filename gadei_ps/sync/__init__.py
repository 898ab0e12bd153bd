"""Synchronization models by name: when a learner may go on, and what becomes of its gradients.

This package takes and gives numbers only. It knows nothing of shared memory, clocks or threads, so
the server and the simulator drive the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gadei_ps.sync.asp import ASP
from gadei_ps.sync.base import (
    UNBOUNDED,
    AlreadyJoined,
    Commit,
    LearnerError,
    NotGranted,
    SyncModel,
    UnknownLearner,
)
from gadei_ps.sync.bsp import BSP
from gadei_ps.sync.parameters import SpecError, shown
from gadei_ps.sync.ssp import SSP

__all__ = [
    "UNBOUNDED",
    "AlreadyJoined",
    "Commit",
    "LearnerError",
    "NotGranted",
    "SpecError",
    "SyncModel",
    "UnknownLearner",
    "names",
    "parse",
]

_MODELS: dict[str, type[SyncModel]] = {model.name: model for model in (ASP, SSP, BSP)}


def names() -> tuple[str, ...]:
    """The names of all models."""
    return tuple(_MODELS)


def parse(spec: str | Mapping[str, object]) -> SyncModel:
    """A new model from text (`bsp`, `ssp:s=3`, `ssp:3`) or a mapping (`{"model": "ssp", "s": 3}`).

    Raises SpecError, in one line that names the bad parameter and the allowed forms.
    """
    if isinstance(spec, str):
        name, colon, rest = spec.strip().partition(":")
        model = _named(name)
        given = _split(model, rest) if colon else {}
    elif isinstance(spec, Mapping):
        options = dict(spec)
        if "model" not in options:
            raise SpecError(f"model is missing; the models are {', '.join(_MODELS)}")
        model = _named(options.pop("model"))
        given = options
    else:
        raise SpecError(f"a model is text or a mapping, not {shown(spec)}")
    return _made(model, given)


def _named(name: object) -> type[SyncModel]:
    model = _MODELS.get(name) if isinstance(name, str) else None
    if model is None:
        raise SpecError(f"unknown model {shown(name)}; the models are {', '.join(_MODELS)}")
    return model


def _split(model: type[SyncModel], rest: str) -> dict[str, object]:
    """The parameters of `key=value,key=value`; a first value without a key is the first one's."""
    given: dict[str, object] = {}
    for place, item in enumerate(rest.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            if place or not model.parameters or not key:
                raise _error(model, f"cannot read {shown(item)}")
            key, value = next(iter(model.parameters)), key
        if key in given:
            raise _error(model, f"{key} is given twice")
        given[key] = value
    return given


def _made(model: type[SyncModel], given: Mapping[str, object]) -> SyncModel:
    for key in given:
        if key not in model.parameters:
            raise _error(model, f"unknown parameter {shown(key)}")
    values: dict[str, object] = {}
    for key, parameter in model.parameters.items():
        if key in given:
            try:
                values[key] = parameter.convert(given[key])
            except ValueError as error:
                raise _error(model, f"{key} {error}") from None
        elif parameter.required:
            raise _error(model, f"{key} is missing")
    make: Callable[..., SyncModel] = model
    return make(**values)


def _error(model: type[SyncModel], what: str) -> SpecError:
    return SpecError(f"{model.name}: {what}; allowed: {' or '.join(model.forms)}")
