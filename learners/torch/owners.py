"""Which learner of this process has which parameters: one at a time.

A second learner that took parameters from the first one would leave it behind in the job, where
others wait for it, and its close() would take the parameters away again.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client

# By the ids of their parameters, which live as long as they do. Each has a close().
_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# Layers of all models that have joined a job, by process and job. Not parameters: torch does not
# swap those that have weak references.
_JOINED: dict[tuple[int, bytes], list[weakref.ref[torch.nn.Module]]] = {}
ANOTHER = (
    "another model of this process has trained in job {0!r}, and this one would begin with its "
    "weights: give it a job of its own (k-fold, sweeps: `with gadei_ps.serve('{0}-2') as job:` and "
    "Optimizer(model, job.name), or a `gadei-ps run` for each model), or name the job to continue "
    "from its weights: Optimizer(model, {0!r})"
)


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


def check_same(
    module: torch.nn.Module,
    values: Mapping[str, np.ndarray],
    client: Client,
    *,
    named: bool,
) -> None:
    """Raises UsageError if another model of this process has joined the job before, which would
    give its weights to this one without a word.

    values: of its parameters, before they are the job's. named: whether the script names the job.
    """
    job = os.getpid(), client.place.control.header["job_id"].tobytes()
    joined = _JOINED.get(job)
    living = [one for one in joined or () if one() is not None]
    ours = {id(one) for one in module.parameters()}
    held = (
        one for layer in living if (known := layer()) for one in known.parameters(recurse=False)
    )
    is_another = joined is not None and not named and not any(id(one) in ours for one in held)
    if is_another and any(
        not np.array_equal(client.weights[name], one) for name, one in values.items()
    ):
        raise UsageError(ANOTHER.format(client.job))
    _JOINED[job] = [*living, *map(weakref.ref, module.modules())]
