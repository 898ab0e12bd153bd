"""Deadlines of a client's waits, its calls that one thread makes at a time, and its helpers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

from gadei_ps import _native
from gadei_ps.errors import UsageError


def deadline(timeout_s: float | None) -> float | None:
    """Return when a time limit that begins now ends; None for no limit."""
    return None if timeout_s is None else time.monotonic() + timeout_s


class OneThread:
    """A call of several parts, which one thread makes at a time: others get a UsageError.

    An interrupt may come at any instant. Python looks for one after a call of C, and where a
    function of Python begins; so `__exit__` is C, which has left before an interrupt can come.
    """

    def __init__(self, learner: _native.Learner, kind: int) -> None:
        self._learner = learner
        self._kind = kind
        self._leave = functools.partial(learner.leave, kind)

    def __enter__(self) -> None:
        try:
            self._learner.enter(self._kind)
        except ValueError as error:
            raise UsageError(str(error)) from None
        except BaseException:  # an interrupt, once it has entered
            self._leave()
            raise

    @property
    def __exit__(self) -> Callable[..., None]:
        return self._leave


class AsyncPublisher(Protocol):
    """Publishes gradients while the client does other things: a device's link."""

    def flush(self) -> None:
        """Wait until what is in flight is published."""

    def check(self) -> None:
        """Raise if what is in flight will never arrive."""

    def close(self) -> None:
        """Flush, and release the client's memory."""


class Owner(Protocol):
    """An object around a client, such as an Optimizer."""

    def close(self) -> None:
        """Detach the client, after what has to be done before."""
