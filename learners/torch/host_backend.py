"""A model on the CPU: its parameters are views of the weights segment, or of a copy of it.

Parameters of other types than float32 have memory of their own, into which that copy is cast.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import sys
import warnings
from multiprocessing import util
from typing import Any

import numpy as np
import torch

from gadei_ps import _native
from gadei_ps.errors import UsageError
from gadei_ps.learners.attach import warn
from gadei_ps.learners.client import UNTOUCHED, Client, Where
from gadei_ps.learners.torch import casts, products
from gadei_ps.learners.torch.backend import (
    Backend,
    Places,
    own_copy,
    wait_for_last,
    wait_for_own,
)
from gadei_ps.learners.torch.hooks import weakly
from gadei_ps.learners.torch.model import Trained
from gadei_ps.learners.torch.products import PRODUCTS, gradient_at
from gadei_ps.learners.torch.writes import Writes
from gadei_ps.memory import layout

SECOND = (
    "a second backward() before step() or zero_grad(): with free_gradients each gradient leaves as "
    "soon as it is computed, and nothing can be added to it"
)

SHARED = (
    "the model is shared with other processes (share_memory): they see the job's weights when this "
    "learner has ended, and not before"
)

LOADED = (
    "load_state_dict after Optimizer(model, free_gradients=True): write "
    "optimizer.assign(state_dict), or load before Optimizer(model) or after optimizer.close()"
)

WRITTEN = (
    "the script has written to parameter {!r} after Optimizer(model, free_gradients=True): write "
    "optimizer.assign({{name: values}}) instead"
)

TRIES = 10  # while others train on


def check(module: torch.nn.Module, *, view: bool) -> None:
    """Raise UsageError for a layer that writes to weights which can only be read."""
    if view and any(getattr(one, "max_norm", None) for one in module.modules()):
        raise UsageError(
            "an embedding with max_norm writes to its weight, which learners can only read: use "
            "view=False"
        )


class HostBackend(Backend):
    """See Backend. view, free_gradients: see Optimizer.

    view: not for a model with parameters of other types than float32.
    """

    def __init__(
        self,
        client: Client,
        trained: Trained,
        *,
        view: bool,
        wait: bool,
        free_gradients: bool,
        skip_unused: bool,
    ) -> None:
        super().__init__(client, trained, wait=wait, skip_unused=skip_unused)
        self._view = view
        self._closed = False
        self._loaded = False  # the parameters have other values than the job
        self._undo = contextlib.ExitStack()
        self._flat = client.flat if view else client.pull()
        views = client.model.views(self._flat)
        self._views: list[tuple[torch.nn.Parameter, np.ndarray]] = []
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, parameter in trained.parameters.items():
            if casts.differs(parameter):
                self._casts.append((parameter, torch.from_numpy(views[name])))
            else:
                self._views.append((parameter, views[name]))
        self._separate_from_others()
        self._show()
        casts.copy_to_parameters(self._casts)
        self._places = Places(trained)
        self._writes = None if view else Writes(trained)
        if self._writes is not None:
            self._writes.note()
        if view:
            # A write to the shared weights ends the process; the traceback shows where it was.
            if not faulthandler.is_enabled() and sys.stderr is not None:
                faulthandler.enable()
            _native.tell_of_stores(client.place.weights.address, client.place.weights.size)
            self._undo.callback(_native.tell_of_stores, client.place.weights.address, 0)
        for tensor, aside in zip(self._ordered, self._aside, strict=True):
            if tensor is not None:
                setattr(tensor, PRODUCTS, aside)
        self._payload = 0  # where freed gradients are written; 0 before the first of a step
        self._written: set[int] = set()  # numbers of the freed gradients
        self._frees = free_gradients
        if free_gradients:
            self._free_gradients()
        self._ending: util.Finalize | None = None
        if self._shows:
            # A process of multiprocessing ends by these, and not by those of atexit. Those come
            # before the client's own, which leaves the job.
            self._ending = util.Finalize(None, self.close, kwargs={"keep": True}, exitpriority=0)
            atexit.register(self.close, keep=True)

    def _separate_from_others(self) -> None:
        """Find the tensors that other processes see; the learner gets memory of its own."""
        self._shared = [
            (one, one.data)
            for one, _ in self._views
            if one.is_shared()  # type: ignore[no-untyped-call]
        ]
        """Parameters that other processes see, and the memory in which they do."""
        # Those of other types have memory of their own, which the others see all the time.
        others = any(one.is_shared() for one, _ in self._casts)  # type: ignore[no-untyped-call]
        self._shows = others or bool(self._shared)
        if self._shared:
            warn(SHARED)
        self._statistics = [
            (name, buffer, buffer.data)
            for name, buffer in self._trained.buffers.items()
            if buffer.is_shared()  # type: ignore[no-untyped-call]
        ]
        """The same of buffers: each learner has its own."""
        for _, buffer, memory in self._statistics:
            buffer.data = memory.clone()

    def _show(self) -> None:
        """Make the parameters views of the weights.

        Of a tensor of their own each time: torch moves one that it sends to another process.
        """
        with torch.inference_mode(False):
            for parameter, view in self._views:
                parameter.data = _tensor(view)

    def _address_aside(self, tensor: torch.Tensor, aside: list[Any], kept: list[Any]) -> Where:
        return products.product_of(tensor, aside, kept)

    def loss(self, loss: torch.Tensor) -> float:
        return float(loss.detach())

    def push(self, loss: float | torch.Tensor, *, samples: int, rate_scale: _native.Scales) -> None:
        kept: list[Any] = []
        where = self._addresses(kept)
        loss = float(loss)
        if not self._payload:
            self._client.push_from(where, loss=loss, samples=samples, rate_scale=rate_scale)
            return
        for number in range(len(self._ordered)):
            one = where[4 * number : 4 * number + 4]
            if one != [*UNTOUCHED] and any(one):
                if number in self._written:
                    raise UsageError(SECOND)
                self._client.append(self._payload, number, (one[0], one[1], one[2], one[3]))
        self._client.publish(loss=loss, samples=samples, rate_scale=rate_scale)

    def forget(self) -> None:
        self._payload = 0
        super().forget()

    # -- free_gradients -------------------------------------------------------------------------

    def _free_gradients(self) -> None:
        """Have backward() write each gradient into the ring and free it."""
        for module in self._trained.module.modules():
            if type(module) is torch.nn.Linear:
                module.forward = functools.partial(products.forward, module)  # type: ignore[method-assign]
                self._undo.callback(delattr, module, "forward")
        for number, tensor in enumerate(self._ordered):
            if tensor is not None:
                write = weakly(self._write, number)
                hook = tensor.register_post_accumulate_grad_hook(write)  # type: ignore[no-untyped-call]
                self._undo.callback(hook.remove)

    def _write(self, number: int, parameter: torch.Tensor) -> None:
        """Write the gradient of parameter `number`, which is complete."""
        if parameter.grad is None or self._aside[number]:
            return  # products are complete by now; step() adds the two
        if not self._payload:
            self._payload = self._client.claim() + layout.PAYLOAD_AT
            self._written.clear()
        if number in self._written:
            raise UsageError(SECOND)
        self._written.add(number)
        kept: list[Any] = []
        self._client.append(self._payload, number, gradient_at(parameter.grad, kept))
        parameter.grad = None

    # -- weights --------------------------------------------------------------------------------

    def refresh(self) -> None:
        if self._wait:
            wait_for_own(self._client)
            self._client.mark_current()
        self._pull()

    def _pull(self) -> None:
        if not self._view:
            self._client.pull(self._flat)
            casts.copy_to_parameters(self._casts)
            if self._writes is not None:
                self._writes.note()

    def assigned(self) -> None:
        self._pull()

    def own(self) -> None:
        if self._frees:
            raise UsageError(LOADED)
        self._loaded = True
        if self._view:
            for parameter in self._trained.parameters.values():
                parameter.data = own_copy(parameter)
            self._places.note()

    def follow(self) -> None:
        self._loaded = False
        self._show()
        self._places.note()
        self._pull()

    def written(self) -> dict[str, torch.Tensor]:
        moved = self._places.moved
        found = self._places.given(self._client)
        if self._writes is not None:
            parameters = self._trained.parameters
            found |= {name: parameters[name].detach() for name in self._writes.names()}
        if found and self._frees:
            raise UsageError(WRITTEN.format(next(iter(found))))
        if moved and not found:  # sent to another process
            self._show()
            self._places.note()
        return found

    def close(self, *, keep: bool) -> None:
        self._undo.close()
        if self._closed:
            return
        if not keep:
            wait_for_last(self._client)
            if self._places.moved:
                self._show()
            self._pull()
        if self._shows:
            self._show_others()
        shared = {id(parameter) for parameter, _ in self._shared}
        for parameter in self._trained.parameters.values():
            if id(parameter) not in shared:
                parameter.data = own_copy(parameter)
        for tensor in self._ordered:
            if tensor is not None:
                vars(tensor).pop(PRODUCTS, None)
        self._places.note()
        self._closed = True  # an interrupt before this leaves the rest for another call
        if self._ending is not None:
            self._ending.cancel()
            atexit.unregister(self.close)

    def _show_others(self) -> None:
        """Write the weights where other processes see them; the parameters are there again.

        A learner that ends beside this one does so, too. Who has read weights that have changed
        since reads them again, or they could be written over newer ones, and stay.
        """
        if not self._loaded:
            wait_for_last(self._client)
        for _ in range(TRIES):
            before = self._client.writes
            if not self._loaded:
                self._pull()
            for parameter, memory in self._shared:
                memory.copy_(parameter.data)
            if self._loaded or self._client.writes == before:
                break
        for parameter, memory in self._shared:
            parameter.data = memory
        for name, buffer, memory in self._statistics:
            if (own := self._trained.buffer(name)) is not None and own.shape == memory.shape:
                memory.copy_(own.data)
                self._trained.replace(name, buffer)
                buffer.data = memory


def _tensor(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        # Torch warns that the memory is read-only, which is intended.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
