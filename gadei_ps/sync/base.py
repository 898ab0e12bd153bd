"""The interface that every synchronization model has, for the server and for the simulator.

A model is a state machine without clocks, threads or output. Its only input is a file that its
parameters may name. Its driver reports which learner joined, left or pushed, and at what time; the
model answers with two words.

- **grant**: a learner may start its iteration of number `clock` iff `clock < grant`.
- **commit**: which collected gradients are reduced and applied now, and which are dropped.

What the driver owes the model
------------------------------
1. Every granted iteration ends in one push, or in the learner's leaving. A learner that gives an
   iteration up, as it may where `wanted` is above it, publishes an empty frame, which is reported
   as `refused`.
2. A learner's gradients are reported in the order of its ring, and only while its clock is below
   its grant; whatever it published beyond that stays in its ring, unreported, until granted.
3. An on-arrival model is told of a push once the gradient has been applied (or refused). A
   collecting model's commits are carried out, in the order of the list, before the grants that
   hold after the call are published. So a learner that sees a grant and then pulls has every
   gradient that the grant stands on. The bounds of SSP and WSP on the version pulled rest on this.
4. Before `leave`, what the learner had published and been granted is reported. Its ring is kept
   until commits have named every gradient in it: see `leave`.
5. `now` and `started` are seconds of one monotonic clock; `now` never decreases.

Take-over: models are not persisted. The next server makes a new one; all former members join it.
An on-arrival model is told of as many pushes as each was ahead of the slowest; a collecting one is
told again of what lies unconsumed in the rings. Then the dead leave. Clocks start anew, so a driver
publishes a grant as 'so many iterations more than the clock'.

Cost: every call is O(1) or O(log n) amortized over n members. A driver that waits for grants
needs no scan per event either: it looks at its waiting learners again when `releases` changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import KeysView, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

from gadei_ps.sync.parameters import Parameter

UNBOUNDED: Final = 2**62
"""The grant of a learner that never waits; no clock gets there, and it fits a signed word."""


class LearnerError(KeyError):
    """A driver named a learner that the model cannot accept; the model is unchanged."""

    def __init__(self, learner: int, why: str) -> None:
        super().__init__(learner, why)
        self.learner = learner

    def __str__(self) -> str:
        # KeyError would print the tuple of its arguments.
        return f"learner {self.learner} {self.args[1]}"


class UnknownLearner(LearnerError):
    """The learner is not a member: it never joined, or it has left."""


class AlreadyJoined(LearnerError):
    """The learner is a member already."""


class NotGranted(LearnerError):
    """A push was reported of a learner whose clock had reached its grant."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What the server does with collected gradients.

    The gradients of `apply` are reduced by their mean and applied once, as one superstep; those
    of `drop` are consumed without being applied. Each id stands for that learner's oldest
    unconsumed gradient and occurs once in a commit, in either tuple. With an empty `apply`
    nothing is applied and no superstep is counted.
    """

    apply: tuple[int, ...]
    drop: tuple[int, ...] = ()


class SyncModel(ABC):
    """A synchronization model; members and their clocks are kept here, the rules in subclasses.

    Every method that takes a learner raises `UnknownLearner` if it is not a member (`join`:
    `AlreadyJoined` if it is). Not safe for threads: one thread drives a model.
    """

    name: ClassVar[str]
    """The word that `parse` knows it by."""

    forms: ClassVar[tuple[str, ...]]
    """Examples of what `parse` accepts, for its error messages."""

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({})
    """The constructor's keyword arguments, each also an attribute; `name:value` means the first."""

    on_arrival: ClassVar[bool]
    """True: the server consumes every gradient as it arrives, and no commit is ever returned.
    False: gradients are held until a commit names them."""

    uses_pushes: ClassVar[bool] = True
    """False: the server need not report pushes at all; `clock` then counts only reported ones."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}
        self._releases = 0

    def __str__(self) -> str:
        """The text that `parse` makes an equal model of."""
        given = [(key, getattr(self, key)) for key in self.parameters]
        listed = ",".join(f"{key}={value}" for key, value in given if value is not None)
        return f"{self.name}:{listed}" if listed else self.name

    @property
    def wave(self) -> int:
        """Mini-batches that a learner aggregates and pushes as one gradient."""
        return 1

    def check(self, learners: int | None) -> None:  # noqa: B027 (most models fit any number)
        """Checks that the model can be used, by this number of learners if it is known.

        Also looks at files that the parameters name. Raises SpecError, in one line.
        """

    @property
    def learners(self) -> KeysView[int]:
        """The members in the order in which they joined, as a live view."""
        return self._clocks.keys()

    @property
    def releases(self) -> int:
        """How often grants were raised for others than the learner of the call.

        While it stays the same, no other member's `grant` or `wanted` has changed.
        """
        return self._releases

    def join(self, learner: int, now: float) -> int:
        """Makes `learner` a member and returns the clock it starts at.

        An id may join again as soon as it has left, even while its gradients are still held.
        """
        if learner in self._clocks:
            raise AlreadyJoined(learner, "has joined already")
        clock = self._joined(learner, now)
        self._clocks[learner] = clock
        return clock

    def leave(self, learner: int, now: float) -> list[Commit]:
        """Ends a membership, by death, detaching or having nothing left to do.

        Nobody waits for the learner any more, so a barrier may complete. What it had pushed stays
        where it is and is named by the commit of its superstep, in this call or a later one.
        """
        clock = self._clocks.pop(learner, None)
        if clock is None:
            raise UnknownLearner(learner, "is not a member")
        return self._left(learner, clock, now)

    def push(
        self, learner: int, now: float, *, started: float | None = None, refused: bool = False
    ) -> list[Commit]:
        """Counts the learner's next gradient, which raises its clock by one.

        `started` is when it began that iteration, None where unknown. A `refused` gradient (a bad
        or an empty frame) counts as arrived and is never named in `apply`: a collecting model
        names it in `drop`. Raises `NotGranted` where the clock had reached the grant.
        """
        clock = self.clock(learner)
        if clock >= self._grant(learner, clock):
            raise NotGranted(learner, f"pushed iteration {clock} without a grant")
        self._clocks[learner] = clock + 1
        return self._pushed(learner, clock, now, started, refused)

    def grant(self, learner: int) -> int:
        """The clock up to which the learner may go on; never decreases during a membership."""
        return self._grant(learner, self.clock(learner))

    def mini_batches(self, learner: int) -> int:
        """How many mini-batches, of all its waves, a learner that runs a pipeline may start.

        These are the mini-batches of the waves that are granted, and all but the last one of the
        next wave. With waves of one mini-batch it is the grant.
        """
        return self.grant(learner) * self.wave + self.wave - 1

    def clock(self, learner: int) -> int:
        """The learner's finished iterations, counted from the clock that it joined at."""
        try:
            return self._clocks[learner]
        except KeyError:
            raise UnknownLearner(learner, "is not a member") from None

    def wanted(self, learner: int) -> int:
        """The learner's gradients of iterations below this number will be dropped.

        A learner at such an iteration may give it up. Never decreases during a membership, and
        is never above the grant.
        """
        self.clock(learner)
        return 0

    @abstractmethod
    def _joined(self, learner: int, now: float) -> int:
        """Takes a newcomer in, before it is a member, and returns the clock it starts at."""

    @abstractmethod
    def _left(self, learner: int, clock: int, now: float) -> list[Commit]:
        """Lets go of a learner that was at `clock` and is no longer a member."""

    @abstractmethod
    def _pushed(
        self, learner: int, clock: int, now: float, started: float | None, refused: bool
    ) -> list[Commit]:
        """Takes the gradient of iteration `clock`; the learner's own clock has gone on by one."""

    @abstractmethod
    def _grant(self, learner: int, clock: int) -> int:
        """The grant of a member that is at `clock`."""
