"""Loads into a model by load_state_dict() while its weights are the job's.

The values go into memory of the learner's own, where they can be evaluated. The job gets them when
the script trains on, before the next gradient. A script that only looks at the best weights at its
end leaves the job's as they are. What a learner loads before its first gradient is where training
begins: the job gets it at once, from one of the learners, for their scripts load the same (see
Client.load_weights). Buffers are the learner's own, and keep what is loaded into them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.attach import warn
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import hooks
from gadei_ps.learners.torch.backend import Backend, own_copy
from gadei_ps.learners.torch.buffers import Buffers
from gadei_ps.learners.torch.casts import copy, host
from gadei_ps.learners.torch.model import Trained

REPLACED = (
    "load_state_dict(assign=True) after Optimizer(model) would give the model other parameters, "
    "which are not the job's: leave assign=True out"
)
KEPT = (
    "load_state_dict: the job has trained with other weights, and keeps them; to go back to these, "
    "write optimizer.assign(state_dict), or load them after a step of this learner"
)
PENDING = (
    "free_gradients: what was loaded into the model is not the job's yet: write "
    "optimizer.assign(model.state_dict()) with the Optimizer that the model has"
)
OTHERS_OPEN = (
    "a part of this model has an Optimizer already, which is open: close() that one first, or give "
    "one Optimizer the whole model"
)
Tensors = dict[str, torch.Tensor]


class PreviousState(NamedTuple):
    """State that an Optimizer has left to the next one of the same model."""

    job: str
    values: Tensors
    """Loaded values by name that its job does not have."""

    def put_back(self, tensors: Tensors) -> list[str]:
        """Write the values into these of the model's tensors; return their names."""
        names = [name for name in self.values if name in tensors]
        for name in names:
            tensors[name].data.copy_(self.values[name])
        return names


class PendingLoads:
    """Values that were loaded into a model and are not the job's yet.

    close: gives that of the Optimizer, which this does not keep alive.
    """

    def __init__(
        self,
        client: Client,
        trained: Trained,
        backend: Backend,
        buffers: Buffers,
        close: Callable[[], Callable[[], None] | None],
    ) -> None:
        self.trained = trained
        self._close = close
        self._client = client
        self._backend = backend
        self._buffers = buffers
        self._names = {id(one): name for name, one in trained.parameters.items()}
        self._places = {id(one): f"{name}." for name, one in trained.module.named_modules() if name}
        self._before: Tensors | None = None  # values before the first load
        self._loaded: set[str] = set()
        self._fixed: set[str] = set()  # names of parameters in the current load, frozen ones too
        self._fresh: Tensors = {}  # buffers as loaded; forward() may have changed them since
        self._errors: list[str] = []  # of the current load
        self._undo = contextlib.ExitStack()
        for module in trained.module.modules():
            frozen = any(not one.requires_grad for one in module.parameters(recurse=False))
            if module is trained.module or any(self._own(module)) or frozen:
                me = weakref.ref(self)
                before = functools.partial(module.register_load_state_dict_pre_hook, _before)
                after = functools.partial(module.register_load_state_dict_post_hook, _after)
                self._undo.callback(hooks.add(module, me, hooks.PRE, before))
                self._undo.callback(hooks.add(module, me, hooks.POST, after))

    def resume(self, earlier: PreviousState) -> None:
        """Continue with what the Optimizer before has left."""
        if earlier.job == self._client.job:
            self._client.is_successor = True
        tensors = self._tensors()
        if names := [name for name in earlier.values if name in tensors]:
            self._begin(names)
            earlier.put_back(tensors)
            self._note_buffers(names)

    def _tensors(self) -> Tensors:
        """Return the model's, as they are now."""
        return {**self.trained.parameters, **self._buffers.current()}

    def _own(self, module: torch.nn.Module) -> Iterator[tuple[str, str]]:
        """Yield the job's tensors that the module itself has: its name for them, and the job's."""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in self._names:
                yield name, self._names[id(parameter)]
        place = self._places.get(id(module), "")
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            if place + name in self.trained.buffers:
                yield name, place + name

    @property
    def pending(self) -> bool:
        """Whether something was loaded that the job does not have."""
        return self._before is not None

    def begin(
        self, module: torch.nn.Module, state: Any, prefix: str, metadata: Any, errors: list[str]
    ) -> None:
        """Prepare the load of a module's part. errors: torch's list. Raises UsageError."""
        self._errors = errors
        fixed = module.named_parameters(recurse=False)
        place = self._places.get(id(module), "")
        self._fixed |= {place + name for name, _ in fixed if prefix + name in state}
        loaded = [known for name, known in self._own(module) if prefix + name in state]
        if not loaded:
            return
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(REPLACED)
        self._begin(loaded)

    def _begin(self, names: Iterable[str]) -> None:
        if self._before is None:
            if not self._client.is_new:
                self._buffers.write()  # what was trained, and not what is loaded
            self._backend.own()
            self._before = {name: one.detach().clone() for name, one in self._tensors().items()}
        self._loaded.update(names)

    def finish(self, module: torch.nn.Module) -> None:
        """Finish the load of a module's part."""
        self._note_buffers(known for _, known in self._own(module) if known in self._loaded)
        if module is self.trained.module:
            self._buffers.warn_of_frozen(self._fixed)
            self._fixed = set()
        if module is self.trained.module and self._client.is_new and not self._errors:
            self.write()

    def _note_buffers(self, names: Iterable[str]) -> None:
        now = self._buffers.current()
        self._fresh |= {name: now[name].detach().clone() for name in names if name in now}

    def write(self) -> None:
        """Give the job what was loaded; the model has the job's weights again. Warns, or raises
        what Client.assign raises; then it may be called again."""
        if self._before is None:
            return
        tensors, before = self._tensors(), self._before
        now = {
            name: self._fresh.get(name, tensors[name].detach())
            for name in self._loaded
            if name in tensors
        }
        changed = {name for name, one in now.items() if not _same(one, before[name])}
        kept = False
        if self._client.is_new and changed:
            kinds = {tensor.name: tensor.dtype for tensor in self._client.model.tensors}
            values = {name: copy(one, kinds[name]) for name, one in now.items()}
            kept = not self._client.load_weights(values)
            if kept:
                warn(KEPT)
        elif changed := changed & self.trained.parameters.keys():
            self._client.assign({name: host(now[name]) for name in changed})
        self._before = None
        self._loaded, self._fresh = set(), {}
        self._backend.follow()
        if kept:
            self._buffers.load(now)

    def end_optimizer(self) -> PreviousState:
        """End the Optimizer, for the model gets another one."""
        names, tensors = self._loaded, self._tensors()
        if (close := self._close()) is not None:
            close()
        values = {name: tensors[name].detach().clone() for name in names if name in tensors}
        return PreviousState(self._client.job, values)

    def close(self) -> None:
        self._undo.close()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare to the last bit, so that a NaN is the same as itself."""
    bytes_of = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bytes_of)


def of(module: torch.nn.Module) -> PendingLoads | None:
    """Return the loads of the Optimizer that the module's weights belong to."""
    found: PendingLoads | None = hooks.owner(module)
    return found


def end_previous(module: torch.nn.Module, *, free_gradients: bool) -> PreviousState | None:
    """End the Optimizer that the model has. Raises UsageError, and changes nothing, if a part of it
    has one, or if something was loaded that free_gradients of the next one does not take."""
    found = [loads for one in module.modules() if (loads := of(one))]
    if not found:
        return None
    if any(loads.trained.module is not module for loads in found):
        raise UsageError(OTHERS_OPEN)
    if free_gradients and found[0].pending:
        raise UsageError(PENDING)
    return found[0].end_optimizer()


def _before(
    module: torch.nn.Module,
    state: Any,
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: Any,
    unexpected: Any,
    errors: list[str],
) -> None:
    if loads := of(module):
        loads.begin(module, state, prefix, metadata, errors)
    else:  # the Optimizer is gone without close()
        for one in module._parameters.values():
            if one is not None:
                one.data = own_copy(one)


def _after(module: torch.nn.Module, _: object) -> None:
    if loads := of(module):
        loads.finish(module)
