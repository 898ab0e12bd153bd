"""A job whose machine trains a part of each pass, as the group has divided it.

A copy of its weights is exact: all batches that it was given are in it, except those that this
machine tells the others. So all of them know after a round what is in the group's weights
(groups/shares.py).

A new agent takes back what the job was given, waits until learners have answered what they have,
and begins with the group's weights: what the job has trained alone is not in them, and others have
its batches.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence

from gadei_ps.agents import said
from gadei_ps.agents.plan import Floats
from gadei_ps.agents.training import LOOK_S, JobTraining, StandingTraining
from gadei_ps.errors import AgentError, GadeiError, UsageError
from gadei_ps.groups.membership import Member
from gadei_ps.groups.shares import Said, Shares, Span, Work, without
from gadei_ps.learners.assigned_batches import AssignedBatches
from gadei_ps.memory import layout, owned

IDLE_S = 0.05
"""A round of a machine that has no batches takes at least so long."""


class OwningTraining(JobTraining):
    """The weights of a job that owns a part of the batches, and trains on meanwhile."""

    def __init__(
        self,
        job: str,
        every: int,
        patience_s: float,
        told: Callable[[int, int], None],
        noted: Callable[[str], None],
        me: Member,
        shares: Shares,
    ) -> None:
        """As JobTraining. me: this life of the machine. shares: before the first round.

        Raises UsageError, too, where the job hands out all batches.
        """
        super().__init__(job, every, patience_s, told, noted)
        self._me, self.shares, self._patience_s = me, shares, patience_s
        if not owned.is_on(self._control):
            self._client.detach()
            raise UsageError(
                f"job {job!r} hands out all batches, but the group divides them: write "
                "`owned = true` into its job file"
            )
        self._owned = AssignedBatches(self._client)
        self._owned.take_back()
        self._is_empty = False
        self._given: list[Span] = []
        self._rest: list[Span] = []
        """What there was no room for."""
        self.said = b""
        """What this machine says of its last copy."""

    def copy(self, number: int, into: Floats) -> int:
        """See Training."""
        self._empty()
        return super().copy(number, into)

    def write(self, rounds: int, weights: Floats, constants: Sequence[str]) -> None:
        """See Training. After a copy that does not count, others have what this machine had."""
        if self._is_copied and not self._is_finite:
            self._let_go()
            self._owned.take_back()
            self._is_empty = self._is_copied = False
            self._given, self._rest = [], []
        self._empty()
        super().write(rounds, weights, constants)

    def own(self, shares: Shares) -> None:
        """Gives the job what has become its own. After a write, in the same thread.

        Raises UsageError where the job has other work than the group.
        """
        if shares.work is not None and shares.work != self._work():
            raise UsageError(
                f"the group divides {shares.work}, but the job of this machine has "
                f"{self._work()}: give all machines the same data, batch size, epochs and seed"
            )
        new = without(shares.of(self._me), self._given)
        self._given = shares.of(self._me)
        self._rest += new
        self._refill()
        self._owned.finish(shares.done)

    def close(self) -> None:
        """Leaves the job, which answers what its learners have. No other call may follow."""
        with contextlib.suppress(GadeiError, OSError):
            self._owned.take_back()
        self._owned.close()
        super().close()

    def _refill(self) -> None:
        if self._rest:
            self._rest = [Span(*one) for one in self._owned.give(self._rest)]

    def _is_trained(self) -> bool:
        self._refill()
        return super()._is_trained() or self._is_idle()

    def _is_idle(self) -> bool:
        """Whether no batch is left, and that for a while. A hint: the words change meanwhile."""
        control = self._control
        left = self._rest or owned.left(control) or int(control["requeued"])
        if left or (control["roster"]["outstanding"] != layout.NO_BATCH).any():
            self._idle_since = time.monotonic()
        return time.monotonic() - self._idle_since > IDLE_S

    def _train(self) -> None:
        self._idle_since = time.monotonic()
        super()._train()

    def _copy(self, into: Floats) -> int:
        """See JobTraining. Also notes what is not in the copy."""
        copied = self._owned.copy(into)
        self._look_at(into)
        self._keep(into)
        left = [*(Span(*one) for one in copied.unanswered), *self._rest]
        done = max(int(self._control["epochs_done"]), int(self._control["owned_passes"]))
        unanswered = tuple(without(left, []))
        told = Said(self._me, self._work(), unanswered, done, self._is_finite)
        self.said = said.encode(told)
        trained = (copied.samples - self._samples) or (copied.version - self._counted)
        self._counted, self._samples = copied.version, copied.samples
        return max(0, trained)

    def _empty(self) -> None:
        """At first: until nothing is left of what the agent before has given."""
        if self._is_empty:
            return
        self._await_work()
        while self._owned.copy(self._snapshot).unanswered:
            self._idle_since = time.monotonic()
            self._await(self._is_idle)
        self._is_empty = True

    def _work(self) -> Work:
        return Work(*(int(self._control[name]) for name in ("batches", "epochs", "seed")))

    def _await_work(self) -> None:
        """Until a learner has said how many batches there are. Says so if that takes long."""
        until = time.monotonic() + self._patience_s

        def is_known() -> bool:
            nonlocal until
            if time.monotonic() > until:
                until = math.inf
                print(
                    f"gadei-ps: no learner of job {self._client.job!r} has asked for batches yet, "
                    "which the group divides; the group waits",
                    file=sys.stderr,
                    flush=True,
                )
            return self._work().batches > 0

        self._await(is_known)

    def _await(self, what: Callable[[], bool]) -> None:
        while not what():
            self._client.check_job()
            if self._interrupted.wait(LOOK_S):
                raise AgentError("the agent ends")


class StandingOwner(OwningTraining, StandingTraining):
    """The same, where learners stand still from the copy until the weights are assigned."""
