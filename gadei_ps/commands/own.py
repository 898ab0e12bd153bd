"""Which learners of a job a command has started, and what became of their gradients."""

from __future__ import annotations

import os
from collections.abc import Collection

import numpy as np

from gadei_ps.memory.totals import COUNTED, named


class OwnLearners:
    """Read from the job's control segment; its mapping outlives the job.

    Learners of other commands are those that were attached before, and those in other process
    groups than ours. What a learner has counted is added to the job's past counts when it is gone,
    so the past counts without those of others are ours. To be made before our learners start.
    """

    def __init__(self, control: np.void) -> None:
        self._control = control
        self._past = self._past_counts()
        self._others: dict[int, np.ndarray] = {}  # counts by generation, as last seen
        self._own: set[int] = set()
        self._seen = int(control["roster"]["generation"].max())
        self.look(())

    @property
    def joined(self) -> bool:
        """Whether one of our learners has attached."""
        return bool(self._own)

    def look(self, pids: Collection[int]) -> None:
        """To be called often. pids: of all learners that the command has started."""
        for row in self._control["roster"].copy():
            generation = int(row["generation"])
            there = generation != int(row["retired"])
            if generation in self._own or not (there or generation > self._seen):
                continue
            if generation not in self._others and _is_own(int(row["pid"]), pids):
                self._own.add(generation)
            else:
                counts = self._counts_of(row)
                self._others[generation] = np.maximum(counts, self._others.get(generation, 0))

    def counts(self) -> dict[str, int]:
        """Of gradients and samples, under the names of status."""
        rows = self._control["roster"].copy()
        counts = self._past_counts() - self._past
        there = rows[rows["generation"] != rows["retired"]]
        for row in there:
            if int(row["generation"]) in self._own:
                counts += self._counts_of(row)
        gone = self._others.keys() - set(there["generation"].tolist())
        counts -= sum(self._others[generation] for generation in gone)
        return named(np.maximum(counts, 0).tolist())

    @property
    def others(self) -> int:
        """How many learners of other commands are attached."""
        rows = self._control["roster"]
        there = rows["generation"][rows["generation"] != rows["retired"]].tolist()
        return len(set(there) & self._others.keys())

    @property
    def alone(self) -> bool:
        """Whether there were no other learners."""
        return not self._others

    def _past_counts(self) -> np.ndarray:
        return np.array([int(self._control[f"past_{what}"]) for what in COUNTED])

    @staticmethod
    def _counts_of(row: np.void) -> np.ndarray:
        return np.array([int(row[what]) for what in COUNTED])


def _is_own(pid: int, pids: Collection[int]) -> bool:
    """Whether the process is one of these, is in the group of one, or has ended meanwhile."""
    try:
        return pid in pids or os.getpgid(pid) in pids
    except ProcessLookupError:
        return bool(pids)
