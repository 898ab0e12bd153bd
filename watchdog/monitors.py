"""Processes that show a job elsewhere: its metrics, and its curves.

Each reads the job's memory or its history. It ends with its standard input, so with the watchdog,
and is started again when it ends before that. A line that it prints is a problem. Training does not
depend on any of them.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence
from typing import Any

from gadei_ps.errors import in_words
from gadei_ps.job.config import JobConfig
from gadei_ps.machine import process
from gadei_ps.machine.child import Child
from gadei_ps.watchdog.durations import MONITORS_KILL_S

RESTART_S = 5.0  # between two starts of a process; twice as long after each that ends at once
MOST_RESTART_S = 300.0


def commands(config: JobConfig) -> dict[str, list[str]]:
    """Return the command of each process that the job file asks for, by what it does."""
    found = {}
    if config.metrics is not None:
        found["metrics"] = process.module_command(
            "gadei_ps.monitoring.web", config.name, config.metrics.listen
        )
    for name, place in config.curves.places().items():
        found[f"curves.{name}"] = process.module_command(
            "gadei_ps.monitoring.curves",
            config.name,
            str(config.history_file()),
            name,
            place,
            repr(time.time()),
        )
    return found


class Monitors:
    """The processes of one job."""

    def __init__(self, config: JobConfig, selector: selectors.BaseSelector, log: Any) -> None:
        self._selector = selector
        self._log = log
        self._all = [_Monitor(what, one, self) for what, one in commands(config).items()]

    def look(self, now: float) -> None:
        """Start what is not running. Once a second; raises nothing."""
        for one in self._all:
            one.look(now)

    def finish(self) -> None:
        """Let all write the rest, and end."""
        for one in self._all:
            one.wait(0.0)

    def end(self, timeout_s: float) -> None:
        """Wait until all have ended; kill those that are there after `timeout_s`."""
        until = time.monotonic() + timeout_s
        for one in self._all:
            one.end(max(0.0, until - time.monotonic()))


class _Monitor:
    def __init__(self, what: str, command: Sequence[str], of: Monitors) -> None:
        self._what, self._command = what, command
        self._selector, self._log = of._selector, of._log
        self._child: Child | None = None
        self._started_at = float("-inf")
        self._restart_s = RESTART_S
        self._problem = ""

    def look(self, now: float) -> None:
        if self._child is not None or now - self._started_at < self._restart_s:
            return
        lasted = now - self._started_at > 2 * self._restart_s
        self._restart_s = RESTART_S if lasted else min(2 * self._restart_s, MOST_RESTART_S)
        self._started_at = now
        try:
            self._child = Child(self._selector, self._command, self._warn, self._ended, how=None)
        except OSError as error:
            self._warn(in_words(error).encode())

    def _warn(self, line: bytes) -> None:
        """Log a problem, once: it may come again with each start."""
        problem = line.decode(errors="replace")
        if problem != self._problem:
            self._problem = problem
            self._log.warning(f"{self._what}: {problem}; training continues")

    def _ended(self, _: int) -> None:
        self._child = None

    def wait(self, timeout_s: float) -> bool:
        return self._child is None or self._child.wait(timeout_s)

    def end(self, timeout_s: float) -> None:
        if not self.wait(timeout_s) and self._child is not None:
            self._log.warning(f"{self._what}: killed before all was written")
            self._child.end(0.0, MONITORS_KILL_S)
            self._child = None
