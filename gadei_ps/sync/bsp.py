"""Bulk synchronous parallel (BSP): a barrier after each iteration, the mean of all gradients."""

from __future__ import annotations

from typing import ClassVar

from gadei_ps.sync.base import Commit, SyncModel


class BSP(SyncModel):
    """Supersteps of one iteration; grant = superstep + 1.

    Zhao et al. 2019, section I and figure 1 with k = 1; GaDei, section 2.1, equation 2. When
    the last learner of a superstep has pushed, one commit applies the mean of all its gradients.
    It names them in ascending order, so the sum does not depend on the order of arrival.

    The first arrival closes a superstep. A learner that joins before the first arrival takes part,
    at the clock `superstep`. A learner that joins later waits for the next superstep, at
    `superstep + 1`, as if it had pushed. So joining learners cannot delay a barrier without end,
    and a returning learner has at most one gradient in a superstep.

    If a learner leaves before its push, the barrier no longer waits for it. If it leaves after its
    push, its gradient stays part of the mean. A refused gradient is dropped at once and counts as
    arrived. If all gradients of a superstep are refused, the superstep ends without applying any.

    Between `await_others` and `start`, the superstep takes in every learner that joins, and does
    not end. So the first superstep has all learners, however long one takes to join.
    """

    name: ClassVar[str] = "bsp"
    forms: ClassVar[tuple[str, ...]] = ("bsp",)
    on_arrival: ClassVar[bool] = False
    awaits_paused: ClassVar[bool] = True
    awaits_start: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._awaits = False
        self._superstep = 0
        self._computing = 0
        self._closed = False
        self._held: list[int] = []

    def await_others(self) -> None:
        self._awaits = True

    def start(self) -> list[Commit]:
        self._awaits = False
        return self._barrier()

    def _joined(self, learner: int, now: float) -> int:
        if self._closed and not (self._awaits and learner not in self._held):
            return self._superstep + 1
        self._computing += 1
        return self._superstep

    def _left(self, learner: int, clock: int, now: float) -> list[Commit]:
        if clock == self._superstep:
            self._computing -= 1
        return self._barrier()

    def _pushed(
        self, learner: int, clock: int, now: float, started: float | None, refused: bool
    ) -> list[Commit]:
        self._computing -= 1
        self._closed = True
        if refused:
            return [Commit((), (learner,)), *self._barrier()]
        self._held.append(learner)
        return self._barrier()

    def _grant(self, learner: int, clock: int) -> int:
        return self._superstep + 1

    def _barrier(self) -> list[Commit]:
        """End the superstep if it has begun and no learner is computing it any more."""
        if self._computing or not self._closed or self._awaits:
            return []
        self._superstep += 1
        self._closed = False
        # All remaining learners stand at the new superstep's clock now.
        self._computing = len(self._clocks)
        self._releases += 1
        held, self._held = self._held, []
        return [Commit(tuple(sorted(held)))] if held else []
