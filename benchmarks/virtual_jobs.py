"""The jobs of the benchmark of virtual workers, for learners with optimizers of their own."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from typing import Self

from gadei_ps.benchmarks.virtual_shape import Shape
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping

MOST = 2
"""Jobs at a time."""
Key = tuple[int | None, tuple[int, int, int]]


class Jobs:
    """Starts a job where there is none for a model, and ends those that were asked for long ago."""

    def __init__(self) -> None:
        self._running: dict[Key, tuple[str, Daemon, ExitStack]] = {}
        self._numbers = itertools.count()

    def job(self, s_local: int | None, shape: Shape) -> str:
        """The name of a job under WSP with this s_local, or, if it is None, under ASP."""
        return self._of(s_local, shape)[0]

    def daemon(self, s_local: int | None, shape: Shape) -> Daemon:
        """Return the watchdog of the same job."""
        return self._of(s_local, shape)[1]

    def _of(self, s_local: int | None, shape: Shape) -> tuple[str, Daemon, ExitStack]:
        key = s_local, shape.weights
        found = self._running.pop(key, None) or self._start(s_local)
        self._running[key] = found  # the last one
        while len(self._running) > MOST:
            self._running.pop(next(iter(self._running)))[2].close()
        return found

    def _start(self, s_local: int | None) -> tuple[str, Daemon, ExitStack]:
        model = "asp" if s_local is None else f"wsp:D=1,s_local={s_local}"
        name = f"virtual-{os.getpid()}-{next(self._numbers)}"
        told = {
            "name": name,
            "history": False,
            "sync": model,
            "optimizer": {"kind": "add"},
            "standby": False,
        }
        stack = ExitStack()
        daemon = stack.enter_context(Daemon(from_mapping(told, name), silent=True))
        return name, daemon, stack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for _, _, stack in self._running.values():
            stack.close()
