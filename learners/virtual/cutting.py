"""Cuts a chain of layers into the stages of a virtual worker."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import cast

import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch.model import Trained
from gadei_ps.learners.virtual.stage_devices import StageDevice
from gadei_ps.learners.virtual.stages import Layers, Stage
from gadei_ps.show.counts import counted


def cut(model: Trained, where: Sequence[StageDevice], cuts: Sequence[int] | None) -> list[Stage]:
    """Cut into the stages of a chain of layers, one for each place.

    model: of an nn.Sequential. cuts: the first layer of each stage but the first; None: see
    even_cuts(). Raises UsageError for a model that cannot be a pipeline, and for cuts that do not
    fit.
    """
    layers = list(cast(torch.nn.Sequential, model.module))  # one that stands twice, twice
    check_count(layers, where)
    if cuts is None:
        cuts = even_cuts(sizes(layers), len(where))
    cuts = _numbers(cuts)
    bounds = [0, *cuts, len(layers)]
    if len(cuts) != len(where) - 1 or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise UsageError(
            f"cuts {cuts}: for {len(where)} devices and {len(layers)} layers give "
            f"{counted(len(where) - 1, 'number')}, ascending, above 0 and below {len(layers)}"
        )
    made: list[Stage] = []
    for (first, end), place in zip(itertools.pairwise(bounds), where, strict=True):
        part = Layers(*layers[first:end])
        part.first = first
        made.append(Stage(len(made), part, place))
    for before, after in itertools.pairwise(made):
        before.after, after.before = after, before
    check_model(model)
    _check_shared(model, made)
    return made


def modules(layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the layers. Raises UsageError unless they are modules."""
    chain = torch.nn.Sequential | torch.nn.ModuleList
    if isinstance(layers, torch.nn.Module) and not isinstance(layers, chain):
        layers = ()
    try:
        found = list(layers)
    except TypeError:
        found = []
    if not found:
        raise UsageError("layers: give a list of modules of torch, in their order")
    for number, one in enumerate(found):
        if not isinstance(one, torch.nn.Module):
            raise UsageError(f"layer {number} is a {type(one).__name__}: give modules of torch")
    return found


def sizes(layers: Iterable[torch.nn.Module]) -> list[int]:
    """Return parameters of each layer, frozen ones included."""
    return [sum(one.numel() for one in layer.parameters()) for layer in layers]


def _numbers(cuts: Sequence[int]) -> list[int]:
    """Return the numbers. Raises UsageError unless they are integers."""
    try:
        return [operator.index(one) for one in cuts]
    except TypeError:
        raise UsageError(
            f"cuts {cuts!r}: give a list of numbers of layers, such as [2, 5]"
        ) from None


def check_count(layers: Sequence[torch.nn.Module], where: Sequence[StageDevice]) -> None:
    """Raise UsageError if there are more places than layers."""
    if len(layers) < len(where):
        raise UsageError(
            f"devices: {len(where)} for {len(layers)} layers: give at most one for each layer"
        )


def _check_shared(trained: Trained, parts: Sequence[Stage]) -> None:
    """Raise UsageError if stages share a parameter or a buffer, such as one module."""
    whole, stage_of = trained.module, dict[int, int]()
    names = {id(one): f"the parameter {name!r}" for name, one in whole.named_parameters()}
    names |= {id(one): f"the buffer {name!r}" for name, one in whole.named_buffers()}
    for stage in parts:
        for one in itertools.chain(stage.module.parameters(), stage.module.buffers()):
            if stage_of.setdefault(id(one), stage.number) != stage.number:
                raise UsageError(
                    f"stages {stage_of[id(one)]} and {stage.number} share {names[id(one)]}: put "
                    "the layers that use it into one stage with cuts="
                )


def even_cuts(sizes: Sequence[int], stages: int) -> list[int]:
    """Cut a chain of layers so that the largest stage is as small as can be.

    sizes: of each layer; at least `stages` of them. Returns the first layer of each stage but the
    first. Of equal cuts it takes the later ones, so that a layer without parameters stays with the
    one before.
    """
    before = [0, *itertools.accumulate(sizes)]
    best: dict[int, tuple[int, list[int]]] = {  # of the first layers: the largest stage, the cuts
        end: (before[end], []) for end in range(1, len(sizes) + 1)
    }
    for stage in range(2, stages + 1):
        best = {
            end: min(
                (
                    (max(best[cut][0], before[end] - before[cut]), [*best[cut][1], cut])
                    for cut in range(end - 1, stage - 2, -1)  # min() takes the first of equal ones
                ),
                key=lambda one: one[0],
            )
            for end in range(stage, len(sizes) + 1)
        }
    return best[len(sizes)][1]


def check_model(model: Trained) -> None:
    """Raise UsageError for a model that cannot be a pipeline, however it is cut."""
    if model.device.type != "cpu":
        raise UsageError(
            f"the layers are on {model.device}: leave them on the CPU, and the worker moves "
            "each to its stage's device"
        )
    for name, layer in model.module.named_modules():
        if getattr(layer, "running_mean", None) is not None:
            raise UsageError(
                f"layer {name!r} ({type(layer).__name__}) keeps running statistics, which have no "
                "version of each mini-batch's own: give it track_running_stats=False, or take "
                "GroupNorm or LayerNorm"
            )
