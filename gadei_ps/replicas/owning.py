"""The weights of a job that trains a part of each pass, as the group has divided it.

A copy is exact: all batches that the job was given are in it, except those that it names. So the
coordinator has after each commit what is in the group's weights (`groups/shares.py`).

A replica that joins withdraws the batches of its job, waits until learners have answered those that
they have, and begins with the group's weights.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from gadei_ps.errors import GadeiError, UsageError
from gadei_ps.groups.parts import Floats
from gadei_ps.groups.shares import CopyReport, Span, Work, without
from gadei_ps.learners.assigned_batches import AssignedBatches
from gadei_ps.memory import owned
from gadei_ps.replicas.training import LEAST_LOOK_S, JobTraining

IDLE_S = 0.05
"""Least time of a round of a replica without batches (s)."""


class OwningTraining(JobTraining):
    """The parameters of a job that owns a part of the batches."""

    def __init__(
        self,
        job: str,
        every: int,
        overlap: bool,
        patience_s: float,
        noted: Callable[[str], None],
        is_over: Callable[[], bool],
    ) -> None:
        """See JobTraining. is_over: whether the replica ends and must not wait any longer."""
        super().__init__(job, every, overlap, patience_s, noted)
        if not owned.is_on(self._control):
            self._client.detach()
            raise UsageError(
                f"job {job!r} hands out all batches, but the group divides them: write "
                "`owned = true` into its job file"
            )
        self._patience_s, self._is_over = patience_s, is_over
        self._owned = AssignedBatches(self._client)
        self._idle_since = time.monotonic()
        self._given: list[Span] = []
        self._rest: list[Span] = []
        """Batches for which the job had no room."""

    def rejoin(self) -> None:
        """See JobTraining; withdraw all batches, since other replicas have them."""
        super().rejoin()
        self._owned.take_back()
        self._given, self._rest = [], []

    def begin(self) -> None:
        """See JobTraining; wait until no learner has an earlier batch."""
        self._await_work()
        copy = np.empty(self.values, np.float32)
        while self._owned.copy(copy).unanswered and not self._is_over():
            self._idle_since = time.monotonic()
            self._await(self._is_idle)

    def is_trained(self) -> bool:
        """See JobTraining. Without batches, a round is over soon."""
        self._refill()
        return super().is_trained() or self._is_idle()

    def write(self, weights: Floats) -> None:
        """See JobTraining. After a copy that does not count, others have its batches."""
        if self.copied is not None and not self.copied.samples:
            self.resume()
            self._owned.take_back()
            self._given, self._rest = [], []
            self.begin()
        super().write(weights)
        self._idle_since = time.monotonic()

    def own(self, spans: Sequence[Span], done: int) -> None:
        """See JobTraining; give the job the new batches."""
        self._rest += without(spans, self._given)
        self._given = list(spans)
        self._refill()
        self._owned.finish(done)

    def close(self) -> None:
        """See JobTraining."""
        with contextlib.suppress(GadeiError, OSError):
            self._owned.take_back()
        self._owned.close()
        super().close()

    def work(self) -> Work:
        """Return the batches that the job hands out."""
        return Work(*(int(self._control[name]) for name in ("batches", "epochs", "seed")))

    def _refill(self) -> None:
        if self._rest:
            self._rest = [Span(*one) for one in self._owned.give(self._rest)]

    def _is_idle(self) -> bool:
        """Return whether no batch has been left for a while. A hint: the state may change."""
        control = self._control
        if self._rest or owned.left(control) or owned.is_awaited(control):
            self._idle_since = time.monotonic()
        return time.monotonic() - self._idle_since > IDLE_S

    def _copy(self, into: Floats) -> tuple[int, CopyReport | None]:
        """See JobTraining; also note the batches that are not in the copy."""
        copied = self._owned.copy(into)
        before = self._counted
        self._counted = copied.version, copied.samples
        trained = (copied.samples - before[1]) or (copied.version - before[0])
        samples = self._count(into, trained)
        left = [*(Span(*one) for one in copied.unanswered), *self._rest]
        done = max(int(self._control["epochs_done"]), int(self._control["owned_passes"]))
        unanswered = tuple(without(left, []))
        return samples, CopyReport(self.work(), unanswered, done, bool(samples))

    def _await_work(self) -> None:
        """Wait until a learner has reported how many batches there are; note it if it is long."""
        until = time.monotonic() + self._patience_s

        def is_known() -> bool:
            nonlocal until
            if self.work().batches > 0:
                return True
            if time.monotonic() > until:
                until = math.inf
                self._noted(
                    f"no learner of job {self._client.job!r} has asked for batches yet, which the "
                    "group divides; the group waits"
                )
            return False

        self._await(is_known)

    def _await(self, is_done: Callable[[], bool]) -> None:
        while not (is_done() or self._is_over()):
            self.check()
            time.sleep(LEAST_LOOK_S)
