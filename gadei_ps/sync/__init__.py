"""Synchronization models by name: when a learner may continue, and what becomes of its gradients.

This package takes and gives numbers only. It knows nothing of shared memory, clocks or threads, so
the server and the simulator drive the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from gadei_ps.sync.asp import ASP
from gadei_ps.sync.base import UNBOUNDED, Commit, LearnerError, NotGranted, SyncModel
from gadei_ps.sync.bsp import BSP
from gadei_ps.sync.cutoff import Cutoff
from gadei_ps.sync.elastic_bsp import ElasticBSP
from gadei_ps.sync.parameters import SpecError, converted, path, short_repr, split
from gadei_ps.sync.ssp import SSP
from gadei_ps.sync.wsp import WSP

AlreadyJoined = UnknownLearner = LearnerError  # deprecated: names of 0.2

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
    "names_file",
    "parse",
    "relative_to",
]

_MODELS: dict[str, type[SyncModel]] = {
    model.name: model for model in (ASP, SSP, BSP, ElasticBSP, Cutoff, WSP)
}


def names() -> tuple[str, ...]:
    """The names of all models."""
    return tuple(_MODELS)


def parse(spec: str | Mapping[str, object]) -> SyncModel:
    """A new model from text (`bsp`, `ssp:s=3`, `ssp:3`) or a mapping (`{"model": "ssp", "s": 3}`).

    Raises SpecError, in one line that names the bad parameter and the allowed forms.
    """
    return _made(*_read(spec))


def relative_to(directory: Path, spec: str | Mapping[str, object]) -> str | Mapping[str, object]:
    """The same model, with relative paths resolved against `directory`. Raises SpecError."""
    model, given = _read(spec)
    for key, value in _paths(model, given):
        return {"model": model.name, **given, key: str(directory / Path(value).expanduser())}
    return spec


def names_file(spec: str | Mapping[str, object]) -> bool:
    """Return whether the model reads a file. Raises SpecError."""
    return any(_paths(*_read(spec)))


def _paths(model: type[SyncModel], given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The parameters that are paths, with their values."""
    for key, value in given.items():
        parameter = model.parameters.get(key)
        if parameter is not None and parameter.convert is path and isinstance(value, str) and value:
            yield key, value


def _read(spec: str | Mapping[str, object]) -> tuple[type[SyncModel], dict[str, object]]:
    """The class of the model, and its parameters as given, not yet converted."""
    if isinstance(spec, str):
        name, colon, rest = spec.strip().partition(":")
        model = _named(name)
        keys = list(model.parameters)
        return model, split(rest.split(","), keys, partial(_error, model)) if colon else {}
    if isinstance(spec, Mapping):
        options = dict(spec)
        if "model" not in options:
            raise SpecError(f"model is missing; the models are {', '.join(_MODELS)}")
        return _named(options.pop("model")), options
    raise SpecError(f"a model is text or a mapping, not {short_repr(spec)}")


def _named(name: object) -> type[SyncModel]:
    model = _MODELS.get(name) if isinstance(name, str) else None
    if model is None:
        raise SpecError(f"unknown model {short_repr(name)}; the models are {', '.join(_MODELS)}")
    return model


def _made(model: type[SyncModel], given: Mapping[str, object]) -> SyncModel:
    values = converted(model.parameters, given, partial(_error, model))
    make: Callable[..., SyncModel] = model
    try:
        return make(**values)
    except ValueError as error:
        raise _error(model, str(error)) from None


def _error(model: type[SyncModel], what: str) -> SpecError:
    return SpecError(f"{model.name}: {what}; allowed: {' or '.join(model.forms)}")
