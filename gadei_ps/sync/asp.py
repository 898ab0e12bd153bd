"""Asynchronous parallel (ASP): no learner ever waits for another."""

from __future__ import annotations

from typing import ClassVar

from gadei_ps.sync.base import UNBOUNDED, Commit, SyncModel


class ASP(SyncModel):
    """No synchronization at all (Zhao et al. 2019, section I; GaDei section 2.1, equation 3).

    Each gradient is applied on arrival, staleness has no bound, and a new learner starts at 0.
    """

    name: ClassVar[str] = "asp"
    forms: ClassVar[tuple[str, ...]] = ("asp",)
    on_arrival: ClassVar[bool] = True
    uses_pushes: ClassVar[bool] = False

    def _joined(self, learner: int, now: float) -> int:
        return 0

    def _left(self, learner: int, clock: int, now: float) -> list[Commit]:
        return []

    def _pushed(
        self, learner: int, clock: int, now: float, started: float | None, refused: bool
    ) -> list[Commit]:
        return []

    def _grant(self, learner: int, clock: int) -> int:
        return UNBOUNDED
