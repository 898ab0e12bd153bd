"""Binding of a model's parameters to the job's weights, for an Optimizer; a file for each kind.

A GPU's moves weights and gradients by a link (gadei_ps.learners.devices). On the CPU there
is nothing to move: parameters are the weights segment, and push() copies gradients into the ring in
the thread that trains, where a link would hand them to another one.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any

import torch

from gadei_ps import _native
from gadei_ps.errors import GadeiError, JobStopped, UsageError
from gadei_ps.learners.attach import warn
from gadei_ps.learners.client import DETACHED, NONE, UNTOUCHED, Client, Where
from gadei_ps.learners.torch import casts
from gadei_ps.learners.torch.model import Trained
from gadei_ps.learners.torch.products import gradient_at

LAST_GRADIENT_S = 10.0  # for the last gradient of a learner that closes its optimizer

MOVED = (
    "parameter {!r} is {} of shape {} on {} now, since model.to(), half(), an assignment to its "
    "`data` or the like: do that before Optimizer(model)"
)
GIVEN = (
    "parameter {!r} was given other memory (an assignment to its `data`, vector_to_parameters): "
    "step() assigns its values to the job; what other learners push between the reading and the "
    "step is overwritten, as by optimizer.assign (shown once)"
)
SENT = (
    "parameter {!r} was sent to another process, which has its values as they were then: send it "
    "again to show newer ones (shown once)"
)


class Backend(ABC):
    """One model's weights and gradients, where the model computes.

    Making a backend points the model's parameters to the job's weights. All calls are made by the
    thread that trains. wait, skip_unused: see Optimizer.
    """

    def __init__(self, client: Client, trained: Trained, *, wait: bool, skip_unused: bool) -> None:
        self._client, self._trained, self._wait = client, trained, wait
        self._absent = UNTOUCHED if skip_unused else NONE
        self._ordered = trained.in_order_of(client.model)
        self._aside: list[list[Any]] = [[] for _ in self._ordered]
        """Parts of each tensor's gradient that backward() has not put into `parameter.grad`."""

    def _addresses(self, kept: list[Any]) -> list[int]:
        """Return the gradients for push_from(). kept: takes the copies that are made.

        Between backward() and this the caches hold the model, not the interpreter: each call of
        torch or NumPy takes microseconds, as long as it takes to copy thousands of values.
        """
        where: list[int] = []
        for tensor, aside in zip(self._ordered, self._aside, strict=True):
            if tensor is None:
                where += NONE
            elif aside:
                where += self._address_aside(tensor, aside, kept)
            elif tensor.grad is not None:
                where += gradient_at(tensor.grad, kept)
            else:
                where += self._absent
        return where

    @abstractmethod
    def _address_aside(self, tensor: torch.Tensor, aside: list[Any], kept: list[Any]) -> Where:
        """Return the gradient of a tensor for which backward() has left something aside."""

    @abstractmethod
    def loss(self, loss: torch.Tensor) -> float | torch.Tensor:
        """Return a reported loss in the form that push() takes. Does not wait for a GPU."""

    @abstractmethod
    def push(self, loss: float | torch.Tensor, *, samples: int, rate_scale: _native.Scales) -> None:
        """Publish what backward() has left.

        Waits for a free slot. Raises what Client.push raises.
        """

    def forget(self) -> None:
        """Drop what backward() has left outside of `parameter.grad`."""
        for aside in self._aside:
            aside.clear()

    @abstractmethod
    def refresh(self) -> None:
        """Pull weights for the next step."""

    @abstractmethod
    def assigned(self) -> None:
        """Pull what was assigned to the job."""

    @abstractmethod
    def own(self) -> None:
        """Let the script write to the parameters, until follow(). Raises UsageError."""

    @abstractmethod
    def follow(self) -> None:
        """Make the parameters the job's weights again, as these are now."""

    @abstractmethod
    def written(self) -> dict[str, torch.Tensor]:
        """Return the values that the script has written to parameters, or given them, by name;
        follow() ends it. Raises UsageError for what cannot be followed."""

    @abstractmethod
    def close(self, *, keep: bool) -> None:
        """Publish what was pushed; give the model its own memory, with the job's current weights
        or, if `keep`, with what it has."""


def wait_for_own(client: Client) -> None:
    """Wait until the learner's last gradient is in the weights or dropped, or the job ends."""
    with contextlib.suppress(JobStopped):  # the next push raises it
        client.wait_applied()


def wait_for_last(client: Client) -> None:
    """Wait until what the learner has pushed is in the weights that close() leaves in the model.

    Not without end: under BSP that needs the other learners, and nobody may serve the job.
    """
    with contextlib.suppress(GadeiError):
        client.wait_applied(timeout_s=LAST_GRADIENT_S)


class Places:
    """Addresses of a model's parameters, by which a step detects that the script has moved them."""

    def __init__(self, trained: Trained) -> None:
        # Those of other types have memory of their own anyway.
        self._names = [name for name, one in trained.parameters.items() if not casts.differs(one)]
        self._parameters = [trained.parameters[name] for name in self._names]
        self._kinds = [_kind(one) for one in self._parameters]
        self._shown: set[str] = set()
        self.note()

    def note(self) -> None:
        """Record that the parameters are where they belong."""
        self._at = [one.data_ptr() for one in self._parameters]

    @property
    def moved(self) -> bool:
        """Whether a parameter lies elsewhere."""
        return [one.data_ptr() for one in self._parameters] != self._at

    def given(self, client: Client) -> dict[str, torch.Tensor]:
        """Return values of the parameters that the script has given other memory; warns once.

        Those that torch has moved to shared memory, as it sends them to another process, have the
        values that they had. Raises UsageError for another type, shape or device; where the client
        has left, another learner may have moved them.
        """
        found: dict[str, torch.Tensor] = {}
        if not self.moved:
            return found
        if client.left:
            raise UsageError(DETACHED)
        for name, one, at, kind in zip(
            self._names, self._parameters, self._at, self._kinds, strict=True
        ):
            if one.data_ptr() == at:
                continue
            if _kind(one) != kind:
                raise UsageError(MOVED.format(name, one.dtype, list(one.shape), one.device))
            sent = one.device.type == "cpu" and one.is_shared()  # type: ignore[no-untyped-call]
            if not sent:
                found[name] = one.detach()
            line = SENT if sent else GIVEN
            if line not in self._shown:
                self._shown.add(line)
                warn(line.format(name))
        return found


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    """Return the properties of a parameter that must not change."""
    return tensor.dtype, tensor.device, tensor.shape


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the values that can be trained even if inference_mode() is on here."""
    with torch.inference_mode(False):
        return tensor.data.clone()
