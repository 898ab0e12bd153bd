"""A run whose learners the command brings along, and which the command follows to its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from gadei_ps.errors import ClusterError
from gadei_ps.machine import interrupts
from gadei_ps.memory.weights import FloatArray
from gadei_ps.replicas import commands
from gadei_ps.replicas.commands import Say
from gadei_ps.replicas.config import Run
from gadei_ps.replicas.program import Program

END_S, POLL_S = 120.0, 0.2

Rows = list[dict[str, Any]]


class ProgramRun:
    """The replicas of a run, from their start to their end, which is at the latest that of the
    `with` block."""

    def __init__(
        self, run: Run, file: Path, address: str | None, program: Program, data: str, say: Say
    ) -> None:
        """Prepare a run.

        file: of the run, for messages. address: of a cluster; None: one of this host's own.
        data: path of the file that learners are given.
        """
        self._what = run, file, address, say
        self._program, self._data = program, data
        self.rows: Rows = []
        """Status of each replica, as in `group status`."""
        self.summary: dict[str, Any] | None = None
        """Result of the run, once it has ended."""
        self._following: Any = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start the run. Raises GadeiError."""
        run, file, address, say = self._what
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(commands.cluster_of(run, file, address, say))
            from gadei_ps.replicas.following import Following

            following = Following(run, found, [], "/", say, self._program)
            commands.begin(following, np.fromfile(self._data, np.uint8))
            self._following, self._stack = following, stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with interrupts.held(), self._stack:
            if self.summary is None:
                with contextlib.suppress(ClusterError):  # it is lost, or a replica is away
                    self.stop()

    def look(self) -> None:
        """Wait a moment, and update the status. Raises GadeiError if the run has failed."""
        time.sleep(POLL_S)
        has_ended = self._following.look()
        self.rows = [row for row in self._following.rows.values() if row["ended"] is None]
        if has_ended:
            self.rows = list(self._following.rows.values())
            self.summary = self._following.summary()

    def weights(self, replicas: Sequence[int]) -> dict[str, FloatArray] | None:
        """Return a copy of the weights of the first of these replicas that has one.

        The keys are the names of the tensors; None if no replica has a copy.
        """
        found: dict[str, FloatArray] | None = self._following.copy(replicas)
        return found

    def stop(self) -> dict[str, Any]:
        """End all replicas; return how the run has ended. Raises GadeiError."""
        self._following.stops = True
        until = time.monotonic() + END_S
        while self.summary is None:
            if time.monotonic() > until:
                raise ClusterError(f"its replicas have not ended in {END_S:g} s")
            self.look()
        return self.summary
