"""Learners that begin with the same mini-batch, because they draw the same random numbers."""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gadei_ps.learners.attach import LEARNER_VARIABLE, warn
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import hooks

SAME = (
    "another learner has the same seed as this one, {seed}, and has begun with the same "
    "mini-batch: two learners with the same mini-batches are worth little more than one. Give each "
    "a part of the data by {variable} and {variable}S, or take the mini-batches from "
    "optimizer.sampler(dataset), or add int(os.environ.get({variable!r}, 0)) to the seed"
)
PRE_FORWARD = "_forward_pre_hooks"
MOST = 1 << 16  # values of a tensor that are compared


class FirstBatch:
    """First mini-batch of a model, by a hook that compiled models do not have."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._digest: int | None = None
        self.remove: Callable[[], None] = lambda: None
        """Removes the hook."""
        if not isinstance(model, torch.jit.ScriptModule):
            look = functools.partial(model.register_forward_pre_hook, self._look, with_kwargs=True)
            self.remove = hooks.add(model, weakref.ref(self), PRE_FORWARD, look)

    def _look(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.remove()
        with contextlib.suppress(RuntimeError, TypeError):  # tensors without data, as of functorch
            self._digest = _digest((args, kwargs), zlib.crc32(b"%d" % torch.initial_seed()))

    def compare(self, client: Client) -> None:
        """Warn if another learner has begun with the same mini-batch and the same seed."""
        if self._digest is not None and client.shares_first_batch(self._digest):
            text = SAME.format(seed=torch.initial_seed(), variable=LEARNER_VARIABLE)
            warn(text)


def _digest(value: Any, digest: int) -> int:
    """Return a digest of the tensors in a value, which may lie in lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return digest
        values = value.detach().reshape(-1)[:MOST].cpu().contiguous()
        return zlib.crc32(values.view(torch.uint8).numpy().data, digest)
    if isinstance(value, Mapping):
        value = list(value.values())
    for one in value if isinstance(value, list | tuple) else ():
        digest = _digest(one, digest)
    return digest
