"""Which learner of this process has which parameters: one at a time.

A second learner that took parameters from the first one would leave it behind in the job, where
others wait for it, and its close() would take the parameters away again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gadei_ps.errors import UsageError

# By the ids of their parameters, which live as long as they do. Each has a close().
_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def own(parameters: Iterable[torch.nn.Parameter], owner: object) -> None:
    """Notes who has them."""
    for one in parameters:
        _OWNERS[id(one)] = owner


def disown(parameters: Iterable[torch.nn.Parameter], owner: object) -> None:
    """It has them no more."""
    for one in parameters:
        if _OWNERS.get(id(one)) is owner:
            del _OWNERS[id(one)]


def end_earlier(parameters: Mapping[str, torch.nn.Parameter], kind: type[Any]) -> None:
    """Closes the owner of this kind that has exactly these parameters, if there is one."""
    owners = {id(owner): owner for one in parameters.values() if (owner := _OWNERS.get(id(one)))}
    for owner in owners.values():
        held = [number for number, one in _OWNERS.items() if one is owner]
        if type(owner) is kind and set(held) == {id(one) for one in parameters.values()}:
            owner.close()


def check_free(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raises UsageError where a parameter has an owner."""
    for name, one in parameters.items():
        if (owner := _OWNERS.get(id(one))) is not None:
            kind = type(owner).__name__
            raise UsageError(
                f"parameter {name!r} belongs to {'an' if kind[0] in 'AEIOU' else 'a'} {kind} that "
                "has not left its job: close() that one first"
            )
