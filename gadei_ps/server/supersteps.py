"""Execution of the synchronization model's decisions, one superstep after the other.

A commit names learners whose oldest gradients are applied as one mean, and others whose oldest ones
are dropped. The shards do that; the manager publishes the next commit when all have done the last.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable

import numpy as np

from gadei_ps import _native
from gadei_ps.memory.layout import CONTROL, Action, Reason
from gadei_ps.memory.segment import Segment
from gadei_ps.sync import Commit


class Supersteps:
    """Supersteps of the manager of the active server."""

    def __init__(self, control: Segment, state: np.void, shards: int) -> None:
        """state: STATE."""
        self._segment = control
        self._control = control.view(CONTROL)
        self._state = state
        self._shards = shards
        self._commits: collections.deque[Commit] = collections.deque()
        self._refusals: dict[tuple[int, int], int] = {}  # (row, sequence) -> reason

    @property
    def due(self) -> bool:
        """Whether there are commits that are not published yet."""
        return bool(self._commits)

    def add(self, commits: Iterable[Commit]) -> None:
        """They are carried out after those that are due."""
        self._commits.extend(commits)

    def refuse(self, row: int, sequence: int, reason: int) -> None:
        """The commit that drops this frame refuses it."""
        self._refusals[row, sequence] = reason

    def clear(self) -> None:
        """Forget the commits of a model that is not in force any more."""
        self._commits.clear()
        self._refusals.clear()

    def carry_out(self, rows: Iterable[int]) -> None:
        """Publish the next superstep if every shard is done with the previous one.

        rows: of all learners.
        """
        if not self._commits or not self.done() or self._paused():
            return
        commit = self._commits.popleft()
        action, upto = self._control["superstep_action"], self._control["superstep_upto"]
        action[:] = Action.SKIP
        tail = {row: int(self._state["applied"][0, row]) for row in rows}
        for row in commit.apply:
            action[row] = Action.APPLY
            upto[row] = tail[row] + 1
        for row in commit.drop:
            reason = self._refusals.pop((row, tail[row]), Reason.OK)
            good = reason in (Reason.OK, Reason.GIVEN_UP)
            action[row] = Action.DROP if good else Action.REFUSE
            self._control["superstep_reason"][row] = reason
            upto[row] = tail[row] + 1
        number = int(self._control["superstep"]) + 1
        _native.store(self._segment.word(CONTROL, "superstep"), number)  # SYNC POINT: superstep
        _native.bell(self._segment.word(CONTROL, "shard_bell"))

    def _paused(self) -> bool:
        """True while a checkpoint is taken. The next superstep waits for its end."""
        return _native.load(self._segment.word(CONTROL, "pause")) > time.monotonic_ns()

    def done(self) -> bool:
        """Return whether every shard is done with the last one that was published."""
        done = self._state["record"]["supersteps"][: self._shards]
        finished = bool((done == self._control["superstep"]).all())
        if finished:
            self._control["supersteps_done"] = self._control["superstep"]
        return finished
