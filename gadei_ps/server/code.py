"""The compiled code of a server, loaded for the optimizer of its job.

The learner that brings the model may bring its optimizer, too. Until then a server only knows the
default.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gadei_ps.errors import ControlError
from gadei_ps.job import paths
from gadei_ps.kernels import cache
from gadei_ps.memory.layout import CONTROL, ServerState
from gadei_ps.memory.segment import Segment
from gadei_ps.server import loading, units


def spare_home() -> Path:
    """Return the directory for code if the user's cache cannot be written. Raises ControlError."""
    return paths.directory() / ".cache"


def set_up() -> None:
    """Make this process, its forks and its compilers keep code where all of them find it.

    Otherwise each server would compile for itself, and one that is killed would leave its files.
    Numba, if one of them imports it, does not optimize what LLVM optimizes as a whole afterwards.
    """
    os.environ["NUMBA_OPT"] = "0"
    if not cache.is_lasting():
        with contextlib.suppress(ControlError, OSError):
            os.environ["NUMBA_CACHE_DIR"] = str(spare_home())


def load_kept(optimizer: int) -> None:
    """Load the kept code for an optimizer, for forks of this process; never compile."""
    loading.load_all([unit for unit in units.units([optimizer]) if unit.is_kept()])


class Code:
    """The code of one server."""

    def __init__(self, segment: Segment, number: int) -> None:
        """segment: the job's record. number: of the server's line in it."""
        self._control = segment.view(CONTROL)
        self._line = self._control["server"][number]
        self._kinds: set[int] = set()

    def load(self, logs: bool) -> None:
        """Load or compile the code at the server's start. `logs`: see loading.load()."""
        set_up()
        kind = int(self._control["optimizer"])
        loading.load(units.units([kind]), logs)
        self._kinds.add(kind)

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
            loading.load(units.units([kind]), logs=False)
            self._kinds.add(kind)
        return True
