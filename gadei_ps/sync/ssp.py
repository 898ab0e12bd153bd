"""Stale synchronous parallel (SSP): the fastest learner is at most s iterations ahead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from gadei_ps.sync.base import Commit, SyncModel
from gadei_ps.sync.parameters import Parameter, whole_number

# Bounded so that a grant stays far below UNBOUNDED and fits the words of shared memory.
_staleness = whole_number(0, 2**31 - 1)


class SSP(SyncModel):
    """Gradients are applied on arrival; grant = slowest clock + s + 1.

    Zhao et al. 2019, section I, where s is the 'threshold' beta; after Ho et al. 2013. An
    iteration starts only if its number is at most s above the slowest clock. Clocks count finished
    iterations, so they differ by at most s + 1. A joining learner starts at the slowest clock, so
    no grant decreases. An empty job keeps the clock of the last learner that left.
    """

    name: ClassVar[str] = "ssp"
    forms: ClassVar[tuple[str, ...]] = ("ssp:s=3", "ssp:3")
    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({"s": Parameter(_staleness)})
    on_arrival: ClassVar[bool] = True

    def __init__(self, s: int) -> None:
        """Raise ValueError unless `s`, in iterations, is a whole number from 0 to 2**31 - 1."""
        super().__init__()
        self.s = _staleness(s)
        self._slowest = 0
        # Number of members at each clock, to find the slowest clock without a scan.
        self._members_at: dict[int, int] = {}

    def _joined(self, learner: int, now: float) -> int:
        self._enter(self._slowest)
        return self._slowest

    def _left(self, learner: int, clock: int, now: float) -> list[Commit]:
        self._depart(clock)
        return []

    def _pushed(
        self, learner: int, clock: int, now: float, started: float | None, refused: bool
    ) -> list[Commit]:
        # Entered first, so that a slowest clock exists.
        self._enter(clock + 1)
        self._depart(clock)
        return []

    def _grant(self, learner: int, clock: int) -> int:
        return self._slowest + self.s + 1

    def _enter(self, clock: int) -> None:
        self._members_at[clock] = self._members_at.get(clock, 0) + 1

    def _depart(self, clock: int) -> None:
        members = self._members_at[clock] - 1
        if members:
            self._members_at[clock] = members
            return
        del self._members_at[clock]
        if clock == self._slowest and self._members_at:
            # Amortized: every remaining member has pushed once for each step.
            while self._slowest not in self._members_at:
                self._slowest += 1
            self._releases += 1
