"""The compiled code of a server, loaded for the optimizer and the synchronization model of its job.

The learner that brings the model may bring its optimizer, too. Until then a server only knows the
default. The synchronization model may change while the job runs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from gadei_ps import _native, sync
from gadei_ps.errors import ControlError, in_words
from gadei_ps.job import paths, sync_change
from gadei_ps.kernels import cache, loaded, sharing
from gadei_ps.kernels.unit import Unit
from gadei_ps.machine import log
from gadei_ps.memory.layout import CONTROL, ServerState
from gadei_ps.memory.segment import Segment
from gadei_ps.server import loading, units

AGAIN_S = 10.0


def spare_home() -> Path:
    """Return the directory for code if the user's cache cannot be written. Raises ControlError."""
    return paths.directory() / ".cache"


def set_up() -> None:
    """Make this process, its forks and its helpers keep their code where all of them find it.

    Otherwise each server would compile for itself, and one that is killed would leave its files.
    Numba, if one of them imports it, does not optimize what LLVM optimizes as a whole afterwards.
    """
    os.environ["NUMBA_OPT"] = "0"
    if not cache.is_lasting():
        with contextlib.suppress(ControlError, OSError):
            os.environ["NUMBA_CACHE_DIR"] = str(spare_home())


def load_kept(optimizer: int, model: str) -> None:
    """Load the kept code for an optimizer and a synchronization model; never compile.

    Forks of this process then have the code. Code in a temporary directory is not loaded.
    """
    if not cache.is_lasting():
        return
    for unit in [*units.units([optimizer]), *sync.parse(model).units()]:
        loaded.load_kept(unit.name)
    loaded.give_back()


class _Loading(threading.Thread):
    """A thread that loads the code of a synchronization model while the manager works."""

    def __init__(self, number: int, units: list[Unit], bell: int) -> None:
        """number: of the model. bell: address of the manager's, rung at the end."""
        super().__init__(name=f"loading-{number}", daemon=True)
        self.number = number
        self.error: Exception | None = None
        self._units = units
        self._bell = bell

    def run(self) -> None:
        try:
            sharing.load(self._units)
        except Exception as error:
            self.error = error
        _native.bell(self._bell)


class Code:
    """The code of one server."""

    def __init__(self, segment: Segment, number: int) -> None:
        """segment: the job's record. number: of the server's line in it."""
        self._segment = segment
        self._control = segment.view(CONTROL)
        self._line = self._control["server"][number]
        self._kinds: set[int] = set()
        self._model = -1  # number of the synchronization model whose code is loaded
        self._loading: _Loading | None = None
        self._again_at = 0.0

    def load(self, logs: bool) -> None:
        """Load or compile the code at the server's start. `logs`: see loading.load()."""
        set_up()
        kind = int(self._control["optimizer"])
        number = sync_change.requested(self._segment)
        loading.load([*units.units([kind]), *self._units(number)], log.get(), logs)
        self._kinds.add(kind)
        self._model = number

    def _units(self, number: int) -> list[Unit]:
        return sync.parse(sync_change.text(self._segment, number)).units()

    def follow(self) -> int:
        """Return the number of the synchronization model whose code is loaded.

        If another one is requested, a thread loads its code: compiling takes seconds, in which the
        manager must send heartbeats. If that fails, as for lack of memory, the job keeps its model
        and the next attempt is made after AGAIN_S.
        """
        wanted = sync_change.requested(self._segment)
        if wanted == self._model or time.monotonic() < self._again_at:
            return self._model
        if self._loading is None:
            missing = self._units(wanted)
            if not missing:
                self._model = wanted
                return wanted
            bell = self._segment.word(CONTROL, "manager_bell")
            self._loading = _Loading(wanted, missing, bell)
            self._loading.start()
        elif not self._loading.is_alive():
            done, self._loading = self._loading, None
            if done.error is None:
                self._model = done.number
            else:
                self._again_at = time.monotonic() + AGAIN_S
                log.get().error(
                    "the synchronization model's code cannot be loaded; trying again",
                    reason=in_words(done.error),
                )
        return self._model

    def is_ready(self, active: bool) -> bool:
        """Load the code of the model's optimizer, and return whether model and code are there.

        Compiling takes seconds, in which the server sends no heartbeats: it counts as starting. A
        standby waits until the active server has compiled the code.
        """
        if not int(self._control["model_ready"]):
            return False
        kind = int(self._control["optimizer"])
        if kind not in self._kinds:
            self._line["state"] = ServerState.STARTING
            if not active and not int(self._control["lease_shards"]):
                return False
            units.load([kind])
            self._kinds.add(kind)
        return True
