"""Times of the passes of a stage, by the clock of its device."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class StageTimes:
    """Passes that a stage has computed since its start, and how long it was busy with them.

    Seconds of wall time on the host, and of the device's events on a GPU. What is brought from one
    device to another is not in them.
    """

    forward: int
    forward_s: float
    backward: int
    backward_s: float


class Stopwatch:
    """Adds up the passes of a stage. Started and stopped by its thread, read by any."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._counts = [0, 0]
        self._seconds = [0.0, 0.0]
        self._lock = threading.Lock()
        # A GPU computes on while its thread continues: its events are read once they have come.
        self._pending: deque[tuple[int, Any, Any]] = deque()

    def start(self) -> Any:
        """Return the time before a pass, for stop()."""
        return self._event() if self._cuda else time.perf_counter()

    def stop(self, kind: int, begun: Any) -> None:
        """Record the end of a pass. kind: FORWARD or BACKWARD."""
        if not self._cuda:
            seconds = time.perf_counter() - begun
            with self._lock:
                self._counts[kind] += 1
                self._seconds[kind] += seconds
            return
        with self._lock:
            self._pending.append((kind, begun, self._event()))
            while self._pending and self._pending[0][2].query():
                self._settle()

    def times(self) -> StageTimes:
        """Return the times so far; waits for what a GPU still computes."""
        with self._lock:
            while self._pending:
                self._pending[0][2].synchronize()
                self._settle()
            forward, backward = zip(self._counts, self._seconds, strict=True)
            return StageTimes(*forward, *backward)

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _settle(self) -> None:
        kind, begun, ended = self._pending.popleft()
        self._counts[kind] += 1
        self._seconds[kind] += begun.elapsed_time(ended) / 1e3  # of ms
