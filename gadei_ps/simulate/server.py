"""The parameter server in virtual time. It follows the model, as server/driver.py does.

If the cost is zero, every gradient is applied at once. If not, gradients on arrival queue for the
server, and the model is notified of each after it was applied. Commits are carried out one after
the other, and grants wait until all are carried out (`sync/base.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from gadei_ps.simulate.descent import Descent
from gadei_ps.simulate.outcome import Outcome
from gadei_ps.sync import Commit, SyncModel


class Server:
    """Consumes gradients and keeps count in an outcome."""

    def __init__(
        self,
        model: SyncModel,
        outcome: Outcome,
        capacity: int,
        cost_s: float,
        schedule: Callable[[float, int], None],
        training: Descent | None = None,
    ) -> None:
        """schedule(time, learner): asks for a call of `finish` at that time; -1 for a commit."""
        self.version = 0
        self._model = model
        self._outcome = outcome
        self._cost_s = cost_s
        self._schedule = schedule
        self._training = training
        self._on_arrival = model.on_arrival
        self._at_once = model.on_arrival and not cost_s
        self._hears = model.uses_pushes
        # By learner, its gradients that are neither applied nor dropped, the oldest first: version
        # pulled, start and end of the iteration.
        self._held: list[list[tuple[int, float, float]]] = [[] for _ in range(capacity)]
        self._commits: deque[Commit] = deque()
        self._working = False
        self._free_at = 0.0

    def held(self, learner: int) -> int:
        """Return the number of the learner's gradients that are neither applied nor dropped."""
        return len(self._held[learner])

    @property
    def in_flight(self) -> int:
        """The same of all learners."""
        return sum(map(len, self._held))

    @property
    def busy(self) -> bool:
        """True while a commit is under way. No grant is published until it is finished."""
        return self._working

    def publish(
        self, learner: int, now: float, pulled: int, started: float, refused: bool = False
    ) -> None:
        """Take a learner's gradient, or the empty frame of an iteration that it abandoned."""
        outcome = self._outcome
        outcome.pushed += 1
        if self._training is not None:
            self._training.publish(learner)
        if self._at_once and not refused:
            outcome.applied += 1
            outcome.updates += 1
            outcome.staleness.add(self.version - pulled)
            self.version += 1
            if self._training is not None:
                self._training.apply((learner,), on_arrival=True)
            if self._hears:
                self._model.push(learner, now)
            return
        self._held[learner].append((pulled, started, now))
        if not self._on_arrival:
            self._take(self._model.push(learner, now, started=started, refused=refused), now)
        elif refused:
            self._drop(learner)
            self._model.push(learner, now, refused=True)
        else:
            self._free_at = max(self._free_at, now) + self._cost_s
            self._schedule(self._free_at, learner)

    def finish(self, learner: int, now: float) -> None:
        """Finish what took time: the learner's oldest gradient, or for -1 the oldest commit."""
        if learner >= 0:
            self._apply((learner,))
            if self._hears:
                self._model.push(learner, now)
            return
        self._working = False
        self._carry_out(self._commits.popleft())
        self._go_on(now)

    def join(self, learner: int, now: float) -> int:
        """Make the learner a member. Returns the clock at which it starts."""
        return self._model.join(learner, now)

    def leave(self, learner: int, now: float) -> None:
        """End a membership. Under an on-arrival model, the learner's `held` must be 0."""
        self._take(self._model.leave(learner, now), now)

    def _take(self, commits: Sequence[Commit], now: float) -> None:
        if commits:
            self._commits.extend(commits)
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Carry out commits until none is left or one takes time."""
        while self._commits and not self._working:
            if self._cost_s and self._commits[0].apply:
                self._working = True
                self._schedule(now + self._cost_s * len(self._commits[0].apply), -1)
            else:
                self._carry_out(self._commits.popleft())

    def _carry_out(self, commit: Commit) -> None:
        if commit.apply:
            self._apply(commit.apply)
        for learner in commit.drop:
            self._drop(learner)

    def _apply(self, learners: Sequence[int]) -> None:
        outcome = self._outcome
        for learner in learners:
            pulled, _, _ = self._held[learner].pop(0)
            outcome.staleness.add(self.version - pulled)
        outcome.applied += len(learners)
        outcome.updates += 1
        self.version += len(learners)
        if self._training is not None:
            self._training.apply(learners, on_arrival=self._on_arrival)

    def _drop(self, learner: int) -> None:
        self._outcome.dropped += 1
        _, started, ended = self._held[learner].pop(0)
        self._outcome.lost_s += ended - started
        if self._training is not None:
            self._training.drop((learner,))
