"""The compiled code of a server's shards, loaded for the optimizer of its job.

The learner that brings the model may bring its optimizer, too. Until then a server only knows the
default.
"""

from __future__ import annotations

import threading

import numpy as np

from gadei_ps import _native
from gadei_ps.memory.layout import CONTROL, ServerState
from gadei_ps.memory.segment import Segment
from gadei_ps.server import shard


class Code:
    """The code of one server, for the thread of its manager. line: the server's in control."""

    def __init__(self, control: Segment, line: np.void) -> None:
        self._control = control.view(CONTROL)
        self._bell = control.word(CONTROL, "manager_bell")
        self._line = line
        self._kinds: set[int] = set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def _kind(self) -> int:
        return int(self._control["optimizer"])

    def load(self) -> None:
        """Loads the code from the cache, or compiles it."""
        kind = self._kind
        shard.load([kind])
        self._kinds.add(kind)

    def is_ready(self, active: bool) -> bool:
        """Whether the model is there, and the code of its optimizer; if not, that is loaded.

        In a thread, for compiling takes seconds, in which the server must show that it lives. It
        counts as starting meanwhile. A standby waits until the active server has compiled it.
        Raises what the thread has met.
        """
        if not int(self._control["model_ready"]):
            return False
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._error is not None:
            raise self._error
        if self._thread is None and self._kind in self._kinds:
            return True
        self._line["state"] = ServerState.STARTING
        if self._thread is None and (active or int(self._control["lease_shards"])):
            self._thread = threading.Thread(target=self._load, daemon=True, name="code")
            self._thread.start()
        return False

    def _load(self) -> None:
        try:
            self.load()
        except BaseException as error:
            self._error = error
        _native.bell(self._bell)
