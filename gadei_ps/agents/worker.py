"""A thread that carries out one order at a time, and tells how each has ended."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gadei_ps.agents import threads
from gadei_ps.errors import GadeiError


@dataclass(frozen=True)
class Done:
    """An order has ended. tag: as it was given. Either a result, or an error."""

    tag: Any
    result: Any
    error: GadeiError | OSError | MemoryError | None


class Worker:
    """busy: whether an order is under way; for the thread that gives orders, and hears of ends."""

    def __init__(self, name: str, tell: Callable[[Done], None]) -> None:
        self.busy = False
        self.tag: Any = None
        """Of the order under way, or of the last one."""
        self._tell = tell
        self._orders: queue.SimpleQueue[tuple[Any, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threads.start(name, self._run)

    def order(self, tag: Any, what: Callable[[], Any]) -> None:
        """Begins an order. `ended` is to be called when it has been heard that it has ended."""
        assert not self.busy
        self.busy, self.tag = True, tag
        self._orders.put((tag, what))

    def ended(self) -> None:
        """The order's end has been heard of."""
        self.busy = False

    def close(self, wait_s: float = 0.0) -> bool:
        """No more orders; returns whether the thread has ended.

        wait_s: for the order under way. One that does not end then is left to the process' end.
        """
        self._orders.put(None)
        self._thread.join(wait_s if self.busy else None)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            tag, what = order
            result: Any = None
            error: GadeiError | OSError | MemoryError | None = None
            try:
                result = what()
            except (GadeiError, OSError, MemoryError) as raised:
                error = raised
            self._tell(Done(tag, result, error))
