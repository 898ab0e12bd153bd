"""What machines of a group say to each other to agree, and what an agreement decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gadei_ps.groups.membership import Answer, Member, View


class Ballot(NamedTuple):
    """The number of a proposal; the greater one wins. place: of the proposer among the members."""

    attempt: int
    place: int


@dataclass(frozen=True)
class Prepare:
    """A proposer asks for a promise and an answer."""

    ballot: Ballot


@dataclass(frozen=True)
class Promise:
    """The member hears no lesser ballot from now on. accepted: the last that it has accepted."""

    ballot: Ballot
    answer: Answer
    accepted: tuple[Ballot, View] | None


@dataclass(frozen=True)
class Refused:
    """The member has promised this greater ballot."""

    promised: Ballot


@dataclass(frozen=True)
class Accept:
    """A proposer asks to accept this view."""

    ballot: Ballot
    view: View


@dataclass(frozen=True)
class Accepted:
    """The member has accepted the view of this ballot."""

    ballot: Ballot


@dataclass(frozen=True)
class Ready:
    """The sender holds the results of this many rounds, from the first of all."""

    rounds: int


@dataclass(frozen=True)
class Join:
    """A machine asks to become a member."""

    member: Member


@dataclass(frozen=True)
class Leave:
    """A member asks to be left out of the next view."""

    member: Member


@dataclass(frozen=True)
class Notice:
    """Carries nothing but the sender's view. wanted: and asks for a proposal."""

    wanted: bool = False


class Model(NamedTuple):
    """A model of a group. version: grows with each of its rounds, also when it begins anew."""

    group: int
    version: int


@dataclass(frozen=True)
class Offer:
    """The sender has these models, from the one that came first to the last.

    round: and keeps them until it is over. None: it may drop them.
    """

    models: tuple[Model, ...]
    round: int | None = None


@dataclass(frozen=True)
class Choice:
    """The first member says which models this round takes, from the oldest to the newest."""

    models: tuple[Model, ...]
    round: int


@dataclass(frozen=True)
class Aim:
    """The first member has these models, and all others are to get them."""

    models: tuple[Model, ...]


Body = Prepare | Promise | Refused | Accept | Accepted | Ready | Join | Leave | Notice
Reply = Offer | Choice | Aim
"""Of models of other groups; see choice.py. The agreement itself has no part in them."""


@dataclass(frozen=True)
class Message:
    """What goes from one machine to another. view: the sender's; None if it is no member yet."""

    sender: Member
    view: View | None
    body: Body | Reply


@dataclass(frozen=True)
class Send:
    """Send a message; it may be lost."""

    to: Member
    message: Message


@dataclass(frozen=True)
class Install:
    """Work under this view. fetch: the results of its settled rounds are not all here yet.

    What has arrived of a round under an earlier view is dropped, except the held result.
    """

    view: View
    fetch: bool


@dataclass(frozen=True)
class Fetch:
    """Get the weights and the rule's state after the view's settled rounds from this member."""

    source: Member


@dataclass(frozen=True)
class Apply:
    """Apply the held result of this round: exactly once, and every member of the view will."""

    round: int


@dataclass(frozen=True)
class Expelled:
    """The group continues without this machine: drop all, and join with a new incarnation.

    The view of the agreement is then the group's. It is to answer messages until the machine ends.
    """


@dataclass(frozen=True)
class Lost:
    """No machine that is heard has the group's state. If none lives that has it, the group begins
    from another group's model or from a checkpoint."""


Decision = Send | Install | Fetch | Apply | Expelled | Lost
