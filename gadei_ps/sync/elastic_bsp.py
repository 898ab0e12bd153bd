"""ElasticBSP: plans each barrier, a superstep ahead, for the time that costs the least waiting."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_high
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np

from gadei_ps.sync import zipline
from gadei_ps.sync.base import Commit, SyncModel
from gadei_ps.sync.parameters import Parameter, whole_number

_ahead = whole_number(1, 4096)

RECENT: Final = 5
"""The median of so many last intervals of a learner predicts its next ones: the paper's 'most
recent intervals'. With a median, one outlier changes nothing."""

SHORTEST: Final = 1e-9
"""Shortest interval, in seconds. With 0, any number of iterations would end at the same time."""


@dataclass(slots=True)
class _Member:
    grant: int
    began: float
    """Start of the current iteration: at the barrier, or with the previous push."""
    is_new: bool
    """True: the learner joined in this superstep, so no length was planned for it."""
    left: int = 0
    """Number of iterations that may still be added to a joining learner's grant."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class ElasticBSP(SyncModel):
    """Gradients are applied on arrival; grant = clock at the barrier + the learner's length.

    Zhao et al. 2019, sections II to IV. At a barrier, the next R end times of each learner are
    predicted from its recent intervals. ZipLine chooses one end time for each learner, such that
    the chosen times lie closest together. The place of the chosen time, 1 to R, is the learner's
    length: its number of iterations in this superstep. The next barrier is due at the last of the
    chosen times.

    The paper leaves these cases open:

    - At first nothing is known of a learner; its length is one. A joining learner takes part at
      once, unless a learner already waits at the barrier. It gets one iteration after the other
      until the barrier is due.
    - If a prediction fails, early learners wait. A late learner arrives with its first push after
      the barrier was due. The rest of its length stays granted and counts in its next superstep. So
      no learner waits longer than one iteration of a late one.
    - The barrier does not wait for a learner that has left. The others' lengths stay.

    Between two barriers a learner has 1 to R iterations. So clocks move apart by at most R - 1 in a
    superstep (section II, where R bounds the difference in a period).
    """

    name: ClassVar[str] = "elastic-bsp"
    forms: ClassVar[tuple[str, ...]] = ("elastic-bsp", "elastic-bsp:R=30", "elastic-bsp:30")
    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType(
        {"R": Parameter(_ahead, required=False)}
    )
    on_arrival: ClassVar[bool] = True

    def __init__(self, R: int = 15) -> None:
        """Raise ValueError unless `R`, in iterations, is a whole number from 1 to 4,096."""
        super().__init__()
        self.R = _ahead(R)
        self._members: dict[int, _Member] = {}
        self._arrived: set[int] = set()
        self._due = math.nan  # planned time of the barrier; NaN before the first plan

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
            return []  # it still has the rest of its length
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
        """Begin the next superstep if all learners have arrived."""
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
        """Set the lengths of the superstep for `known`: learners that have recent intervals."""
        members = [self._members[learner] for learner in known]
        began = np.array([member.began for member in members])
        intervals = np.array([max(median_high(member.recent), SHORTEST) for member in members])
        ends = began[:, None] + intervals[:, None] * np.arange(1.0, self.R + 1.0)
        # A learner in the middle of an iteration may be later than predicted.
        ends += np.maximum(now - ends[:, :1], 0.0)
        chosen, _ = zipline.plan(ends)
        self._due = float(ends[np.arange(len(known)), chosen].max())
        for learner, member, index in zip(known, members, chosen.tolist(), strict=True):
            member.grant = max(member.grant, self._clocks[learner] + index + 1)
