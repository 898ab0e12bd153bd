"""A run whose learners the command brings along, and which the command follows to its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from gadei_ps.cluster import copies
from gadei_ps.cluster.config import Run
from gadei_ps.cluster.orders import Driven, Say, answered, to_run
from gadei_ps.cluster.program import Program
from gadei_ps.memory.weights import FloatArray

END_S = 120.0
"""For all machines to end, once the command does not follow them any more."""

Rows = list[dict[str, Any]]


class Training:
    """The machines of a run, from their start to their end, which is at the latest that of the
    `with` block."""

    def __init__(
        self, run: Run, file: Path, address: str | None, program: Program, data: str, say: Say
    ) -> None:
        """file: of the run, for messages. address: of a cluster; None: one of this host's own.

        data: path of the file that learners are given. Raises UsageError.
        """
        order = to_run(run, file, address)
        order |= {"command": [], "directory": "/", "program": program.told(), "data": data}
        self.rows: Rows = []
        """What each machine is doing, as `group status` has it."""
        self.summary: dict[str, Any] | None = None
        """How the run has ended, once it has."""
        self._driven = Driven(order, say, END_S)
        self._copied: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._driven.__exit__()

    def look(self) -> None:
        """Hears what is new; waits for it a moment. Raises GadeiError if the run has failed."""
        told = self._driven.hear()
        while told is not None:
            self._take(told)
            told = self._driven.hear(0.0) if self.summary is None else None

    def _take(self, told: dict[str, Any]) -> None:
        if "rows" in told:
            self.rows = told["rows"]
        elif "copied" in told:
            self._copied = told
        else:
            self.summary = answered(told)

    def weights(self, machines: Sequence[int]) -> dict[str, FloatArray] | None:
        """A copy of the weights of the first of these machines that can give one, by the names of
        its tensors; None if none can. Raises GadeiError if the run has failed."""
        file = os.memfd_create("gadei-ps-copy", os.MFD_CLOEXEC)
        try:
            path = f"/proc/{os.getpid()}/fd/{file}"
            self._copied = None
            self._driven.tell({"copy": path, "machines": list(machines)})
            while self._copied is None and self.summary is None:
                self.look()
            table = self._copied["copied"] if self._copied is not None else None
            return None if table is None else copies.read(Path(path), table)
        finally:
            os.close(file)

    def stop(self) -> dict[str, Any]:
        """Ends all machines; returns how the run has ended. Raises GadeiError."""
        self._driven.tell({"stop": True})
        while self.summary is None:
            self.look()
        return self.summary
