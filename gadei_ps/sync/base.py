"""The interface that every synchronization model has, for the server and for the simulator.

A model is a state machine without clocks or threads. It reads nothing except a file that its
parameters may name, and writes nothing. Its driver reports which learner joined, left or pushed,
and at what time. The model answers with grants and commits.

- **grant**: a learner may start its iteration of number `clock` iff `clock < grant`.
- **commit**: which collected gradients are reduced and applied now, and which are dropped.

What the driver owes the model
------------------------------
1. Every granted iteration ends with one push, or the learner leaves. A learner may abandon an
   iteration whose number is below `wanted`. It then publishes an empty frame, which the driver
   reports as `refused`.
2. The driver reports a learner's gradients in the order of its ring, and only while the learner's
   clock is below its grant. Gradients beyond the grant stay in the ring, unreported, until granted.
3. The driver reports a push to an on-arrival model after the gradient was applied or refused. It
   carries out a collecting model's commits, in the order of the list, before it publishes the
   grants that hold after the call. So a learner that sees a grant and then pulls has every gradient
   on which the grant depends. The bounds of SSP and WSP on the version pulled depend on this.
4. Before `leave`, the driver reports what the learner has published and been granted. It keeps the
   ring until commits have named every gradient in it: see `leave`.
5. `now` and `started` are seconds of one monotonic clock; `now` never decreases.

Failover: models are not persisted. The next server makes a new model, and all former members join
it. To an on-arrival model the driver reports, for each member, as many pushes as the member was
ahead of the slowest. To a collecting model it reports again what lies unconsumed in the rings. Then
the dead learners leave. Clocks start at 0 again, so the driver publishes a grant as a number of
iterations beyond the clock.

Cost: every call takes O(1) or O(log n), amortized over n members. A driver that waits for grants
need not scan after each event: it looks at its waiting learners again when `releases` has changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import KeysView, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

from gadei_ps.sync.parameters import Parameter

UNBOUNDED: Final = 2**62
"""The grant of a learner that never waits. No clock reaches it, and it fits a signed word."""


class LearnerError(KeyError):
    """The driver named a learner that the model cannot accept. The model is unchanged."""

    def __init__(self, learner: int, why: str) -> None:
        super().__init__(learner, why)
        self.learner = learner

    def __str__(self) -> str:
        # KeyError would print the tuple of its arguments.
        return f"learner {self.learner} {self.args[1]}"


class NotGranted(LearnerError):
    """The driver reported a push of a learner whose clock had reached its grant."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Treatment of collected gradients by the server.

    The mean of the gradients in `apply` is applied once, as one superstep. The gradients in `drop`
    are consumed without being applied. Each id means that learner's oldest unconsumed gradient, and
    occurs once in a commit, in one of the tuples. If `apply` is empty, nothing is applied and no
    superstep is counted.
    """

    apply: tuple[int, ...]
    drop: tuple[int, ...] = ()


class SyncModel(ABC):
    """A synchronization model. This class keeps members and clocks; subclasses have the rules.

    Every method that takes a learner raises `LearnerError` if it is not a member; `join`, if it is
    one. Not safe for threads: one thread drives a model.
    """

    name: ClassVar[str]
    """The word by which `parse` finds the model."""

    forms: ClassVar[tuple[str, ...]]
    """Examples of what `parse` accepts, for its error messages."""

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({})
    """The constructor's keyword arguments, each also an attribute. `name:value` sets the first."""

    on_arrival: ClassVar[bool]
    """True: the server consumes every gradient as it arrives, and no commit is ever returned.
    False: gradients are held until a commit names them."""

    awaits_paused: ClassVar[bool] = False
    """True: others wait for a member that says that it computes no gradient now. False: the driver
    reports that it leaves, and joins again."""

    awaits_start: ClassVar[bool] = False
    """True: a driver that knows how many learners are to come calls `await_others` first."""

    uses_pushes: ClassVar[bool] = True
    """False: the server need not report pushes. `clock` counts reported pushes only."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}
        self._releases = 0

    def __str__(self) -> str:
        """The text from which `parse` makes an equal model."""
        given = [(key, getattr(self, key)) for key in self.parameters]
        listed = ",".join(f"{key}={value}" for key, value in given if value is not None)
        return f"{self.name}:{listed}" if listed else self.name

    @property
    def wave(self) -> int:
        """Number of mini-batches that a learner aggregates and pushes as one gradient."""
        return 1

    def check(self, learners: int | None) -> None:  # noqa: B027 (most models fit any number)
        """Check that the model fits `learners`, if given, and that files it names are usable.

        Raises SpecError, in one line.
        """

    def await_others(self) -> None:  # noqa: B027 (most models do not wait)
        """Let the first superstep not end before `start`. Called before any learner joins."""

    def start(self) -> list[Commit]:
        """All learners that are to begin together have joined, or the others are not awaited."""
        return []

    @property
    def learners(self) -> KeysView[int]:
        """The members in the order in which they joined, as a live view."""
        return self._clocks.keys()

    @property
    def releases(self) -> int:
        """Number of calls that raised grants of learners other than the one the call named.

        While this number stays the same, no other member's `grant` or `wanted` changes.
        """
        return self._releases

    def join(self, learner: int, now: float) -> int:
        """Make `learner` a member and return the clock at which it starts.

        An id may join again as soon as it has left, even while its gradients are still held.
        """
        if learner in self._clocks:
            raise LearnerError(learner, "has joined already")
        clock = self._joined(learner, now)
        self._clocks[learner] = clock
        return clock

    def leave(self, learner: int, now: float) -> list[Commit]:
        """End a membership: the learner died, detached, or has nothing left to do.

        No member waits for the learner any more, so a barrier may complete. Gradients that it had
        pushed stay in its ring. The commit of their superstep names them, in this call or later.
        """
        clock = self._clocks.pop(learner, None)
        if clock is None:
            raise LearnerError(learner, "is not a member")
        return self._left(learner, clock, now)

    def push(
        self, learner: int, now: float, *, started: float | None = None, refused: bool = False
    ) -> list[Commit]:
        """Count the learner's next gradient, which raises its clock by one.

        `started` is the time when it began that iteration, None if unknown. A `refused` gradient (a
        bad or an empty frame) counts as arrived. A collecting model names it in `drop`, never in
        `apply`. Raises `NotGranted` if the clock had reached the grant.
        """
        clock = self.clock(learner)
        if clock >= self._grant(learner, clock):
            raise NotGranted(learner, f"pushed iteration {clock} without a grant")
        self._clocks[learner] = clock + 1
        return self._pushed(learner, clock, now, started, refused)

    def grant(self, learner: int) -> int:
        """The clock up to which the learner may continue. Never decreases during a membership."""
        return self._grant(learner, self.clock(learner))

    def mini_batches(self, learner: int) -> int:
        """Number of mini-batches, over all its waves, that a learner with a pipeline may start.

        These are the mini-batches of the granted waves, and all except the last one of the next
        wave. If a wave has one mini-batch, this is the grant.
        """
        return self.grant(learner) * self.wave + self.wave - 1

    def clock(self, learner: int) -> int:
        """The clock at which the learner joined, plus the iterations that it has finished since."""
        try:
            return self._clocks[learner]
        except KeyError:
            raise LearnerError(learner, "is not a member") from None

    def obsolete_below(self, learner: int) -> int:
        """The number below which the learner's iterations are no longer wanted.

        Gradients of such iterations will be dropped, so the learner may give them up. Never
        decreases during a membership, and is never above the grant.
        """
        self.clock(learner)
        return 0

    @abstractmethod
    def _joined(self, learner: int, now: float) -> int:
        """Admit a joining learner, not yet a member. Returns the clock at which it starts."""

    @abstractmethod
    def _left(self, learner: int, clock: int, now: float) -> list[Commit]:
        """Forget a learner that was at `clock` and is no longer a member."""

    @abstractmethod
    def _pushed(
        self, learner: int, clock: int, now: float, started: float | None, refused: bool
    ) -> list[Commit]:
        """Take the gradient of iteration `clock`. The learner's clock is already `clock + 1`."""

    @abstractmethod
    def _grant(self, learner: int, clock: int) -> int:
        """The grant of a member that is at `clock`."""
