"""Plans the stages of a virtual worker, for layers and a sample in a module of the user's.

The module is imported as `python -m` would find it, and may print: to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gadei_ps import sync
from gadei_ps.commands import quantities
from gadei_ps.errors import UsageError
from gadei_ps.learners.torch.model import Make
from gadei_ps.learners.virtual import plan
from gadei_ps.learners.virtual.activations import problem
from gadei_ps.learners.virtual.plan import Plan
from gadei_ps.learners.virtual.profiler import Sample

OPTIMIZERS: dict[str, tuple[str, Make]] = {
    "sgd": ("torch.optim.SGD(p, lr=0.01)", lambda p: torch.optim.SGD(p, lr=0.01)),
    "momentum": (
        "torch.optim.SGD(p, lr=0.01, momentum=0.9)",
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    ),
    "adagrad": ("torch.optim.Adagrad(p, lr=0.01)", lambda p: torch.optim.Adagrad(p, lr=0.01)),
    "adam": ("torch.optim.Adam(p)", lambda p: torch.optim.Adam(p)),
    "adamw": ("torch.optim.AdamW(p)", lambda p: torch.optim.AdamW(p)),
    "rmsprop": ("torch.optim.RMSprop(p)", lambda p: torch.optim.RMSprop(p)),
}
SERVERS = "none"  # the worker has no optimizer, and the job's server has one


@dataclass(frozen=True)
class Found:
    """A name of the user's: what it stands for, and its expression in a script."""

    value: Any
    expression: str


def partition(
    layers: str,
    sample: str,
    devices: str,
    memory: str | None,
    spec: str,
    optimizer: str,
    repeats: int,
) -> tuple[Plan, str]:
    """The plan, and the line that makes its worker; all as on the command line.

    Raises UsageError.
    """
    try:
        in_flight = sync.parse(spec).wave
    except sync.SpecError as error:
        raise UsageError(f"--sync: {error}") from None
    limits = None if memory is None else [quantities.size(one) for one in memory.split(",")]
    with contextlib.redirect_stdout(sys.stderr):
        modules = found("", layers)
        chosen, make = _optimizer(optimizer)
        made = plan.make(
            _layers(layers, modules.value),
            _sample(sample, found("--sample", sample).value),
            [one.strip() for one in devices.split(",")],
            in_flight=in_flight,
            limits=limits,
            optimizer=make,
            repeats=repeats,
        )
    shown = ", ".join(f'"{one}"' for one in made.devices)
    arguments = [modules.expression, f"devices=[{shown}]"]
    arguments += [f"cuts={made.cuts}"] if made.cuts else []
    arguments += [f"optimizer={chosen}"] if make is not None else []
    return made, f"VirtualWorker({', '.join(arguments)})"


def found(option: str, text: str, *, call: bool = True) -> Found:
    """Import the object of MODULE:NAME; call it if it is a function. Raises UsageError."""
    what = f"{option} {text}".strip()
    module, colon, name = text.partition(":")
    parts = name.split(".")
    if module.endswith(".py"):
        raise UsageError(f"{what}: write the module's name without .py, as in my_model:layers")
    if not colon or not all(one.isidentifier() for one in (*module.split("."), *parts)):
        raise UsageError(f"{what}: write MODULE:NAME, as in my_model:layers")
    value: Any = _imported(what, module)
    for number, one in enumerate(parts):
        try:
            value = getattr(value, one)
        except AttributeError:
            where = ".".join((module, *parts[:number]))
            raise UsageError(f"{what}: {where} has no {one!r}") from None
    if not call or isinstance(value, torch.nn.Module | list | tuple) or not callable(value):
        return Found(value, name)
    return Found(_called(what, value), f"{name}()")


def _imported(what: str, name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise UsageError(
                f"{what}: there is no module {missing!r} in this directory or on PYTHONPATH"
            ) from None
        raise UsageError(f"{what}: the module {missing!r} that it imports is missing") from None
    except SyntaxError as error:
        raise UsageError(f"{what}: {error.filename}:{error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what}: the import raised {_raised(error)}") from None


def _called(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what}() raised {_raised(error)}") from None


def _raised(error: BaseException) -> str:
    name, text = type(error).__name__, problem(error)
    return name if name == text else f"{name}: {text}"


def _layers(text: str, value: Any) -> Sequence[torch.nn.Module]:
    what = "give a list of modules, or an nn.Sequential"
    if isinstance(value, torch.nn.Sequential | torch.nn.ModuleList | list | tuple):
        layers = list(value)
    elif isinstance(value, torch.nn.Module):
        raise UsageError(f"{text} is one layer, of type {type(value).__name__}: {what}")
    else:
        raise UsageError(f"{text} is of type {type(value).__name__}: {what}")
    for number, one in enumerate(layers):
        if not isinstance(one, torch.nn.Module):
            raise UsageError(f"{text}: entry {number} is of type {type(one).__name__}: {what}")
    if not layers:
        raise UsageError(f"{text} has no layers: {what}")
    return layers


def _sample(text: str, value: Any) -> Sample:
    if not isinstance(value, tuple | list) or len(value) != 3:
        many = f" and has {len(value)} entries" if isinstance(value, tuple | list) else ""
        raise UsageError(
            f"--sample {text} is of type {type(value).__name__}{many}: give (inputs, targets, "
            "loss_function), as VirtualWorker.train takes them"
        )
    if not callable(value[2]):
        raise UsageError(
            f"--sample {text}: its loss function is of type {type(value[2]).__name__}: give a "
            "function of the last layer's output and the targets"
        )
    return Sample(*value)


def _optimizer(text: str) -> tuple[str, Make | None]:
    """Return the optimizer's name in a script, and its constructor; None for the server's."""
    if text == SERVERS:
        return "", None
    if ":" in text:
        name = found("--optimizer", text, call=False)
        if not callable(name.value):
            raise UsageError(
                f"--optimizer {text} is of type {type(name.value).__name__}: give a function that "
                "makes the optimizer"
            )
        return name.expression, name.value
    if text not in OPTIMIZERS:
        raise UsageError(
            f"--optimizer {text!r}: give one of {', '.join(OPTIMIZERS)}, {SERVERS}, or MODULE:NAME"
        )
    expression, make = OPTIMIZERS[text]
    return f"lambda p: {expression}", make
