"""Learners that a command has started, and the counts of their gradients."""

from __future__ import annotations

import os
from collections.abc import Collection, Set

import numpy as np

from gadei_ps.machine import process
from gadei_ps.memory.layout import REPLICA
from gadei_ps.memory.totals import COUNTED, named


class OwnLearners:
    """Read from the job's control segment; its mapping outlives the job.

    Learners of other commands are those that were attached before, and those that neither are in a
    process group of ours nor descend from a process of ours. What a learner has counted is added to
    the job's past counts when it is gone, so the past counts without those of others are ours. To
    be made before our learners start.
    """

    def __init__(self, control: np.void) -> None:
        self._control = control
        self._past = self._past_counts()
        self._others: dict[int, np.ndarray] = {}  # counts by generation, as last seen
        self._replicas: set[int] = set()  # generations of the job's replica
        self._own: dict[int, int] = {}  # by generation, the process that our command has started
        self._applied: set[int] = set()  # such processes
        self._seen = int(control["roster"]["generation"].max())
        self.look(())

    @property
    def joined(self) -> bool:
        """Whether one of our learners has attached."""
        return bool(self._own)

    @property
    def attached(self) -> int:
        """Number of our learners that are attached."""
        return self._count(self._own.keys())

    def has_applied(self, pid: int) -> bool:
        """Return whether a gradient was applied of a process that the command has started."""
        return pid in self._applied

    def look(self, pids: Collection[int]) -> None:
        """Read the roster; call it often. pids: of all learners that the command has started."""
        for row in self._control["roster"].copy():
            generation = int(row["generation"])
            there = generation != int(row["retired"])
            if not (generation in self._own or there or generation > self._seen):
                continue
            if generation not in self._own and generation not in self._others:
                started = _started(int(row["pid"]), pids)
                if started is not None:
                    self._own[generation] = started
            if generation not in self._own:
                counts = self._counts_of(row)
                self._others[generation] = np.maximum(counts, self._others.get(generation, 0))
                self._replicas |= {generation} if row["name"] == REPLICA else set()
            elif row["applied"]:
                self._applied.add(self._own[generation])

    def counts(self) -> dict[str, int]:
        """Return the counts of gradients and samples, under the names of status."""
        while True:  # a learner that leaves is moved from the roster to the past counts
            past, rows = self._past_counts(), self._control["roster"].copy()
            if (self._past_counts() == past).all():
                break
        counts = past - self._past
        there = rows[rows["generation"] != rows["retired"]]
        for row in there:
            if int(row["generation"]) in self._own:
                counts += self._counts_of(row)
        gone = self._others.keys() - set(there["generation"].tolist())
        counts -= sum(self._others[generation] for generation in gone)
        return named(np.maximum(counts, 0).tolist())

    @property
    def others(self) -> int:
        """Number of attached learners of other commands."""
        return self._count(self._others.keys() - self._replicas)

    @property
    def alone(self) -> bool:
        """Whether there were no other learners."""
        return not self._others

    def _count(self, generations: Set[int]) -> int:
        rows = self._control["roster"]
        there = rows["generation"][rows["generation"] != rows["retired"]].tolist()
        return len(generations & set(there))

    def _past_counts(self) -> np.ndarray:
        return np.array([int(self._control[f"past_{what}"]) for what in COUNTED])

    @staticmethod
    def _counts_of(row: np.void) -> np.ndarray:
        return np.array([int(row[what]) for what in COUNTED])


def _started(pid: int, pids: Collection[int]) -> int | None:
    """Find the one of these processes to which a learner belongs; 0 if the learner has ended.

    It is the learner itself, the leader of its group, or an ancestor: a launcher may have put the
    learner into a session of its own. None: it is a learner of another command.
    """
    if pid in pids or not pids:
        return pid if pids else None
    try:
        group = os.getpgid(pid)
    except ProcessLookupError:
        return 0
    return next((one for one in (group, *process.ancestors(pid)) if one in pids), None)
