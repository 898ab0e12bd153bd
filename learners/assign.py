"""Writes to the job's weights that are no gradients: values that replace them, or are added."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gadei_ps import _native
from gadei_ps.errors import ModelMismatch, PushTimeout, UsageError
from gadei_ps.learners.frame import NONE, UNKNOWN, Frames, whole_at
from gadei_ps.learners.waits import OnlyOne, limit
from gadei_ps.memory import layout
from gadei_ps.memory.layout import NO_BATCH, SAME_STEPS, FrameKind, Role
from gadei_ps.memory.weights import F32, FloatArray, Tensor

Values = Mapping[str, npt.ArrayLike]
Checked = tuple[list[int], list[FloatArray]]
"""Addresses for the native half, and the arrays that they are of."""
NO_SLOT = "no slot came free: does the server apply gradients?"


class Assigns(Frames):
    """The part of a client that assigns."""

    refuses_nonfinite: bool
    assigned = 0
    """Of the frames published so far: how many were assignments."""
    _pushing: OnlyOne

    @property
    @abstractmethod
    def hyper(self) -> npt.NDArray[np.float64]:
        """The job's optimizer, packed."""

    @property
    @abstractmethod
    def current_version(self) -> int:
        """Of the weights."""

    @abstractmethod
    def wait_applied(self, sequence: int | None = None, timeout_s: float | None = None) -> None:
        """Waits until a frame is in the weights."""

    @abstractmethod
    def _land(self) -> None:
        """Waits until what a device brings is published."""

    @abstractmethod
    def _wait(
        self,
        wait: Callable[..., int],
        arguments: tuple[int, ...],
        timeout_s: float | None,
        what: str,
        until: float | None = None,
    ) -> int:
        """Repeats a native wait."""

    def assign(
        self,
        values: Values,
        *,
        reset: bool = False,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> None:
        """Replaces weights of the job by these values; returns when they are in all shards.

        values: by name, each of its tensor's shape; tensors that are not named stay as they are.
        What this learner has pushed before is applied before. The server makes it exactly once,
        as a gradient. reset: the optimizer's momentum and moments of these tensors become zero;
        otherwise they stay. It answers no batch and waits for no turn. wait: if false, it returns
        when the values are published, as push() does. Raises ModelMismatch for another name or
        shape, UsageError for a NaN or an infinity in a parameter that the job refuses; then nothing
        is changed. Raises what push() raises; then it may be made yet.
        """
        where, kept = self._checked(values)
        if kept:
            self._assign(where, timeout_s, reset=reset, wait=wait)

    def add(self, values: Values, *, timeout_s: float | None = None, wait: bool = True) -> None:
        """Adds these values to weights of the job; as assign() in all else.

        The optimizer has no part in it: no rate, no momentum, no step. So what others push
        meanwhile stays, and comes before or after it, in each shard.
        """
        where, kept = self._checked(values)
        for tensor in self.model.tensors:
            if tensor.name in values and tensor.dtype != F32:
                raise ModelMismatch(f"{tensor.name!r} is {tensor.dtype}: assign() takes it")
        if kept:
            self._assign(where, timeout_s, adds=True, wait=wait)

    def _checked(self, values: Values) -> Checked:
        """Raises ModelMismatch, UsageError."""
        if not isinstance(values, Mapping):
            raise ModelMismatch(f"assign takes arrays by name, not a {type(values).__name__}")
        known = {tensor.name for tensor in self.model.tensors}
        for name in values:
            if name not in known:
                raise ModelMismatch(f"the job's model has no tensor {name!r}")
        where: list[int] = []
        kept: list[FloatArray] = []
        for tensor in self.model.tensors:
            if tensor.name not in values:
                where += NONE
                continue
            found = _numbers(tensor.name, values[tensor.name])
            if found.shape != tensor.shape:
                raise ModelMismatch(
                    f"{tensor.name!r} was given values of shape {list(found.shape)}, "
                    f"the tensor has shape {list(tensor.shape)}"
                )
            if tensor.dtype != F32:
                kept.append(_words(tensor, found))
                where += whole_at(_native.address(kept[-1]))
                continue
            with np.errstate(over="ignore"):
                array = np.ascontiguousarray(found, np.float32)
            refuses = self.refuses_nonfinite and tensor.role is Role.PARAMETER
            if refuses and not np.isfinite(array).all():
                beyond = found.dtype.kind == "f" and np.isfinite(found).all()
                what = "a number beyond float32's range" if beyond else "a NaN or an infinity"
                raise UsageError(
                    f"assign: {tensor.name!r} holds {what}, which the job refuses; nothing is "
                    "changed"
                )
            kept.append(array)
            where += whole_at(_native.address(array))
        return where, kept

    def _assign(
        self,
        where: list[int],
        timeout_s: float | None,
        *,
        stream: int = 0,
        reset: bool = False,
        adds: bool = False,
        steps: int = SAME_STEPS,
        until: float | None = None,
        wait: bool = True,
    ) -> None:
        """until: when timeout_s is over; by default counted from now."""
        self.check_process()
        self._land()
        if self._learner.kind in (FrameKind.DENSE, FrameKind.ROWS):
            raise UsageError("assign: a gradient is begun and not pushed yet: push it first")
        learner, facts = self._learner, (self._learner.version, NO_BATCH, 0, 1.0, UNKNOWN)
        started: Any = learner.started
        until = limit(timeout_s) if until is None else until
        with self._pushing:
            slot = self._wait(learner.claim, (), timeout_s, NO_SLOT, until)
            try:
                flags = (layout.RESET if reset else 0) | (layout.ADD if adds else 0)
                learner.assign(slot + layout.PAYLOAD_AT, where, stream, flags, steps)
                sequence = learner.publish(facts)
            except ValueError as error:
                raise self._wrong(error) from None
        if sequence < 0:
            raise self._evicted() if sequence == _native.PS_EVICTED else self._ended()
        self.assigned += 1
        learner.started = started  # the iteration in hand goes on
        if not wait:
            return
        rest = None if until is None else max(0.0, until - time.monotonic())
        try:
            self.wait_applied(sequence, rest)
        except PushTimeout:
            raise PushTimeout(f"the assignment was not made within {timeout_s} s") from None


def _words(tensor: Tensor, values: npt.NDArray[Any]) -> FloatArray:
    """The elements that hold these values."""
    made = np.zeros(max(tensor.count, 1), np.float32)
    replace(tensor, start=0).of(made)[...] = values
    return made


def _numbers(name: str, given: npt.ArrayLike) -> npt.NDArray[Any]:
    """Raises ModelMismatch for what cannot be numbers of float32."""
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise ModelMismatch(f"{name!r}: give numbers to assign: {why}") from None
    if found.dtype.kind not in "biuf" and not np.can_cast(found.dtype, np.float32):
        raise ModelMismatch(f"{name!r}: give numbers to assign, not {found.dtype}")
    return found
