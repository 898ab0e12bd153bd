"""Groups of parameters as a script gives them, by the names that the job knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch.model import Trained


def named(groups: Iterable[Mapping[str, Any]], trained: Trained) -> list[Mapping[str, Any]]:
    """The same groups, whose `params` are names and patterns.

    groups: their params are parameters of the model, modules, names or patterns, or several of
    these. Parameters that require no gradient are left out. Raises UsageError.
    """
    if isinstance(groups, Mapping) or not isinstance(groups, Iterable):
        raise UsageError("groups: give a list of dicts, as [{'params': '*.bias', 'lr': 0.1}]")
    name_of = {id(one): name for name, one in trained.parameters.items()}
    name_of |= {id(one): "" for one in trained.frozen.values()}
    return [
        dict(group) | {"params": [*filter(None, _names(number, group["params"], name_of))]}
        if isinstance(group, Mapping) and "params" in group
        else group
        for number, group in enumerate(groups)
    ]


def _names(number: int, given: Any, name_of: Mapping[int, str]) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, torch.Tensor):
        if id(given) not in name_of:
            raise UsageError(
                f"groups[{number}]: a parameter of shape {list(given.shape)} is none of the model"
            )
        yield name_of[id(given)]
    elif isinstance(given, torch.nn.Module):
        yield from _names(number, list(given.parameters()), name_of)
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        yield from _names(number, given[1], name_of)  # as named_parameters() has them
    elif isinstance(given, Iterable):
        for one in given:
            yield from _names(number, one, name_of)
    else:
        raise UsageError(
            f"groups[{number}]: params has {given!r}: give parameters, modules, or names"
        )
