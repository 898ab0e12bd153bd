"""The compiled code of a server's shards, loaded for the optimizer of its job.

The learner that brings the model may bring its optimizer, too. Until then a server only knows the
default.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gadei_ps.memory.layout import ServerState
from gadei_ps.server import loading, shard


class Code:
    """The code of one server. control, line: the job's record and the server's line in it."""

    def __init__(self, control: np.void, line: np.void) -> None:
        self._control = control
        self._line = line
        self._kinds: set[int] = set()

    def load(self, log: Any, tells: bool) -> None:
        """At the server's start. log, tells: see loading.load()."""
        kind = int(self._control["optimizer"])
        loading.load(kind, log, tells)
        self._kinds.add(kind)

    def is_ready(self, active: bool) -> bool:
        """Whether the model is there, and the code of its optimizer; if not, that is loaded now.

        Compiling takes seconds, in which the server does not beat: it counts as starting. A standby
        waits until the active server has compiled it.
        """
        if not int(self._control["model_ready"]):
            return False
        kind = int(self._control["optimizer"])
        if kind not in self._kinds:
            self._line["state"] = ServerState.STARTING
            if not active and not int(self._control["lease_shards"]):
                return False
            shard.load([kind])
            self._kinds.add(kind)
        return True
