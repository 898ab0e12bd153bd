"""What a driver hears of, and why a life of an agent is over."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeGuard

from gadei_ps.agents.handshake import Verdict
from gadei_ps.agents.letters import Letter
from gadei_ps.agents.worker import Done
from gadei_ps.errors import CallRefused, GadeiError, JobStopped, UsageError, in_words
from gadei_ps.groups.agreement import Agreement
from gadei_ps.groups.membership import Member
from gadei_ps.groups.messages import Decision, Model
from gadei_ps.sync.parameters import short_repr

EXPELLED = "the group goes on without this machine: it was silent for too long"
GIVEN_UP = "the group goes on without this machine: somebody has said that it is dead"
LOST = "no machine that can be reached has the state of the group"
JOB_ENDED = "the job cannot go on"
TRAINED = "the training has ended"
LEFT = "has left its group"
"""Why a life is over."""
MOST_WAITING = 256
"""Letters that wait for the driver."""


class Wish(enum.Enum):
    """What a person or a program asks of an agent."""

    LEAVE = enum.auto()


@dataclass(frozen=True)
class GoOn:
    """See Agreement.go_on."""

    generation: int

    def tell(self, agreement: Agreement) -> list[Decision]:
        """What follows."""
        return agreement.go_on(self.generation)


@dataclass(frozen=True)
class GiveUp:
    """See Agreement.give_up. number: of the machine."""

    number: int

    def tell(self, agreement: Agreement) -> list[Decision]:
        """What follows."""
        return agreement.give_up(str(self.number))


Event = Letter | Member | Model | Done | Wish | GoOn | GiveUp
"""What a driver hears of; a Member: this life has certainly ended; a Model: it has come."""


class Mistake(str):
    """Why a life is over after which another one would end as well, until a person acts."""


def without(agreement: Agreement) -> str:
    """Why a life is over that its group goes on without. A later view may say that a person has
    vouched for its death."""
    view = agreement.view
    return GIVEN_UP if view is not None and agreement.me in view.given_up else EXPELLED


def why(error: BaseException) -> str:
    """Why a life is over that this has ended."""
    is_mistake = isinstance(error, UsageError) or is_other_size(error)
    return Mistake(in_words(error)) if is_mistake else in_words(error)


def of_job(error: BaseException) -> str:
    """Why a life is over whose job raises this."""
    if isinstance(error, UsageError):
        return why(error)
    return TRAINED if isinstance(error, JobStopped) else f"{JOB_ENDED}: {in_words(error)}"


def not_alike(mine: str, number: int, theirs: str) -> str:
    """Why a life is over that has other settings than its group."""
    return (
        f"this machine has {mine}, but machine {number} has {short_repr(theirs)}: give all "
        "machines of a group the same"
    )


_MISTAKES = (Verdict.VERSION, Verdict.TOKEN, Verdict.JOB, Verdict.SIZE)


def is_final(error: BaseException | None) -> TypeGuard[GadeiError]:
    """Whether another try would fail as well, until a person changes something."""
    if isinstance(error, CallRefused):
        return error.verdict in _MISTAKES
    return isinstance(error, UsageError)


def is_other_size(error: BaseException | None) -> bool:
    """Whether another machine has refused a call for its model has another size."""
    return isinstance(error, CallRefused) and error.verdict == Verdict.SIZE
