"""ElasticBSP: barriers at the times that cost the least waiting, planned a superstep ahead."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np

from gadei_ps.sync.base import Commit, SyncModel
from gadei_ps.sync.parameters import Parameter, whole

_ahead = whole(1, 4096)

RECENT: Final = 5
"""Intervals of a learner that its next ones are predicted from, by their median: the paper's 'most
recent intervals', so that one hiccup moves nothing."""

SHORTEST: Final = 1e-9
"""Seconds of an interval: of none at all, any number of iterations would end at one time."""


@dataclass(slots=True)
class _Member:
    grant: int
    began: float
    """When the iteration in hand began: at the barrier, or with the push before."""
    is_new: bool
    """Of the superstep that runs: nothing was planned for it."""
    left: int = 0
    """Iterations that may yet be added to a newcomer's grant."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class ElasticBSP(SyncModel):
    """Gradients are applied on arrival; a grant is the clock at the barrier + a length of its own.

    Zhao et al. 2019, sections II to IV. At a barrier the next R end times of each learner are
    predicted from its recent intervals, and ZipLine chooses one for each, such that they lie
    closest together: so many iterations, 1 to R, has the learner in this superstep, and the last of
    the chosen times is when the next barrier is due.

    What the paper leaves open:

    - Nothing is known of a learner at first: it has one iteration. A newcomer takes part at once
      unless somebody waits at the barrier already, and goes on, one by one, until the barrier is
      due.
    - Where a prediction fails, early ones wait. A late one has arrived with its first push after
      the barrier was due, whatever is left of its length: that stays granted and counts in its next
      superstep. So nobody waits longer than for one iteration of the late.
    - A learner that leaves is waited for no more; the others' lengths stay.

    Between two barriers a learner has 1 to R iterations, so clocks move apart by at most R - 1 in a
    superstep (section II, where R bounds the difference in a period).
    """

    name: ClassVar[str] = "elastic-bsp"
    forms: ClassVar[tuple[str, ...]] = ("elastic-bsp", "elastic-bsp:R=30", "elastic-bsp:30")
    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType(
        {"R": Parameter(_ahead, required=False)}
    )
    on_arrival: ClassVar[bool] = True

    def __init__(self, R: int = 15) -> None:
        """Raises ValueError unless `R`, in iterations, is a whole number from 1 to 4,096."""
        super().__init__()
        self.R = _ahead(R)
        self._members: dict[int, _Member] = {}
        self._arrived: set[int] = set()
        self._due = math.nan  # when the barrier was planned for; before the first plan, never

    def _joined(self, learner: int, now: float) -> int:
        waits = bool(self._arrived)
        self._members[learner] = _Member(0 if waits else 1, now, not waits, self.R - 1)
        if waits:
            self._arrived.add(learner)
        return 0

    def _left(self, learner: int, clock: int, now: float) -> list[Commit]:
        del self._members[learner]
        self._arrived.discard(learner)
        if not self._members:
            self._due = math.nan
        self._try_barrier(now)
        return []

    def _pushed(
        self, learner: int, clock: int, now: float, started: float | None, refused: bool
    ) -> list[Commit]:
        member = self._members[learner]
        interval = now - member.began
        member.recent.append(interval)
        member.began = now
        if learner in self._arrived:
            return []  # what was left of its length
        at_end = clock + 1 == member.grant
        if at_end and member.is_new and member.left and now + interval <= self._due:
            member.grant += 1
            member.left -= 1
        elif at_end or now >= self._due:
            self._arrived.add(learner)
            self._try_barrier(now)
        return []

    def _grant(self, learner: int, clock: int) -> int:
        return self._members[learner].grant

    def _try_barrier(self, now: float) -> None:
        """Begins the next superstep once everybody has arrived."""
        if not self._arrived or len(self._arrived) < len(self._members):
            return
        self._arrived.clear()
        self._releases += 1
        self._due = math.nan
        known: list[int] = []
        for learner, member in self._members.items():
            clock = self._clocks[learner]
            member.is_new = False
            if member.grant == clock:
                member.began = now
                member.grant = clock + 1
            if member.recent:
                known.append(learner)
        if known:
            self._plan(known, now)

    def _plan(self, known: list[int], now: float) -> None:
        """Sets the lengths of the superstep, for the learners that something is known of."""
        from gadei_ps.sync import zipline  # Numba: not for the processes that only read a name

        members = [self._members[learner] for learner in known]
        began = np.array([member.began for member in members])
        intervals = np.array([max(_median(member.recent), SHORTEST) for member in members])
        ends = began[:, None] + intervals[:, None] * np.arange(1.0, self.R + 1.0)
        # One that is in the middle of an iteration may have been expected to end it earlier.
        ends += np.maximum(now - ends[:, :1], 0.0)
        chosen, _ = zipline.plan(ends)
        self._due = float(ends[np.arange(len(known)), chosen].max())
        for learner, member, index in zip(known, members, chosen.tolist(), strict=True):
            member.grant = max(member.grant, self._clocks[learner] + index + 1)


def _median(values: deque[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
