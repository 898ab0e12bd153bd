"""A learner that counts (counting.py), as the test that has started it sees it."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass

import numpy as np
from counting import COUNTS
from support import eventually


@dataclass
class Counted:
    """A learner and what may be in the weights of it once it is dead."""

    lane: int
    process: subprocess.Popen[str]
    counts: np.ndarray
    session: bool
    low: int = 0
    high: int = 0
    dead: bool = False

    def __getitem__(self, name: str) -> int:
        return int(self.counts[COUNTS.index(name)])

    def bury(self) -> None:
        """It has been killed. A shutdown stops processes first, and nsenter stops with its own."""

        def over() -> bool:
            self.process.send_signal(signal.SIGCONT)
            return self.process.poll() is not None

        eventually(over)
        self.dead = True
        self.low, self.high = self["returned"], self["begun"]
