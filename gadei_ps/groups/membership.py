"""Who belongs to a group, by generation: pure decisions, without messages and without a clock.

A *view* is the membership of one generation. All machines that install a generation install the
same view, and work on its rounds together. A death, a leave or a join ends the generation: the
machines that remain answer what they hold, and `next_view` makes the next view of the answers.
`gadei_ps.groups.agreement` has the messages by which they agree on it.

A round's result is applied in two steps. A member *holds* the result when all of it has arrived and
nothing is applied yet. It applies the result when every member of its view has said that it holds
it. So if any machine has applied a round, every other member of that view holds its result. That is
why the answers of the machines that remain are enough:

- one of them holds the result of the round in hand: the next generation takes this result. Those
  that lack it fetch it from one that holds it;
- none holds it: no machine, dead or alive, has applied it, and the next generation makes the round
  again from the models of its members.

Either way each member applies each round once, and members of one generation the same results.

A machine that was counted as dead, and lives, is in no later view. It drops what it has and joins
as a new member, with a new incarnation and the state of the group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_MEMBERS = 64
"""As native/mesh.h has room for."""
APART = 1 << 20
"""Generations, at least, between a view and the next one that those make who are entrusted, or have
given up others: those may have made views, too."""
DRAWN_BYTES = 3
"""Of a digest of the old members and the new ones, which says how many times APART. Two sides that
have given up each other come to one generation once in 2^24 times."""
MOST_VACANT = 256
"""Vacant places that a view names; older ones are forgotten."""


class Member(NamedTuple):
    """One life of a machine in a group. incarnation: greater each time that the machine joins."""

    machine: str
    incarnation: int


@dataclass(frozen=True)
class View:
    """The membership of one generation.

    members: in their order, which is the order of sums and of parts. settled: number of rounds,
    from the first of all, whose results the members of this view have or fetch; it is also the
    number of the first round that this generation makes. newcomers: members that have nothing yet.
    replaced: for each newcomer that has taken the place of a member, that member. vacant: members
    that are gone, and whose places nobody has taken, in the order in which they went. given_up:
    former members for whose deaths somebody has vouched, until a later life of their machine is a
    member. Should they live, they may go on by themselves: so they are told of this view. after:
    generation of the view that it follows.
    """

    generation: int
    members: tuple[Member, ...]
    settled: int = 0
    newcomers: frozenset[Member] = frozenset()
    replaced: tuple[tuple[Member, Member], ...] = ()
    vacant: tuple[Member, ...] = ()
    given_up: tuple[Member, ...] = ()
    after: int = 0

    @property
    def rank(self) -> tuple[Any, ...]:
        """Where two views meet, the one of the greater rank remains: that of the later generation.

        Two sides that have given up each other may have made different ones of one generation, each
        of what was half agreed on before. Any order of them will do that is the same for all.
        """
        return (
            *(self.generation, self.members, self.settled, sorted(self.newcomers)),
            *(self.replaced, self.vacant, self.given_up, self.after),
        )

    @property
    def first(self) -> Member:
        """The member that decides for all what else counts in a round, such as which models of
        other groups."""
        return self.members[0]


@dataclass(frozen=True)
class Answer:
    """What a member of the old view has when it stops working under it.

    applied: number of rounds that it has applied, None for a newcomer that has no state yet. holds:
    whether it also holds the whole result of the next round.
    """

    applied: int | None
    holds: bool = False

    @property
    def reach(self) -> int:
        """Number of rounds whose results it can give to others; -1 if it has nothing."""
        return -1 if self.applied is None else self.applied + self.holds


@dataclass(frozen=True)
class Changes:
    """What a machine knows of changes that the next view has to make.

    given_up: members that have not answered, and for whose deaths somebody vouches; and former ones
    that no view names yet.
    """

    joining: tuple[Member, ...] = ()
    leaving: frozenset[Member] = field(default_factory=frozenset)
    given_up: frozenset[Member] = field(default_factory=frozenset)


def is_quorum(
    view: View,
    answered: Collection[Member],
    dead: Collection[Member],
    *,
    entrusted: bool = False,
) -> bool:
    """Whether these members may decide on the next view.

    More than half of the view's members; or half of them, if all others are known to be dead. So
    two sets that decide have a member in common, or one died before the other could decide.
    `dead` must be certain: a connection that the other machine's kernel has closed, or the word of
    a person who has looked; silence is not. A machine that hears nothing from half of its view,
    and knows of no death, waits: the others may live, and continue without it. One of three waits
    also when the others are dead: they may have taken in a newcomer first, which continues.

    entrusted: whoever has started all machines says that none has done so. Then all that are not
    dead decide, however few they are.
    """
    answers = sum(member in answered for member in view.members)
    if 2 * answers > len(view.members):
        return True
    few = 2 * answers < len(view.members)
    if not answers or (few and not entrusted):
        return False
    return all(one in answered or one in dead for one in view.members)


def can_work(me: Member, applied: int | None, view: View | None, later: View) -> bool:
    """Whether a machine can go on under a view of a greater rank, with what it has.

    applied: see Answer. view: under which it has worked until now; None: it is no member yet. A
    newcomer must have nothing. The later view was made from what its other members answered under
    the view before it: one that has gone on under another view since may have other results.
    """
    before = -1 if view is None else view.generation
    if me in later.newcomers:
        return applied is None and later.generation > before
    return me in later.members and later.after == before


def next_view(
    view: View, answers: Mapping[Member, Answer], changes: Changes, most: int | None = None
) -> View | None:
    """The view that follows. None if no member that has answered has the group's state.

    answers: of a quorum of the view's members. A member without an answer is gone. Members leave if
    one that has the group's state stays. A newcomer takes
    the place of its machine's former member, else the place that is vacant for longest, else one at
    the end. most: members that there may be; who comes beyond them is left out.
    """
    staying = [one for one in view.members if one in answers and one not in changes.leaving]
    # What a member that leaves holds alone, nobody has applied: it will not be there to give it.
    settled = max((answers[one].reach for one in staying), default=-1)
    if settled < 0:  # nobody else could continue, so nobody leaves
        staying = [one for one in view.members if one in answers]
        settled = max((answers[one].reach for one in staying), default=-1)
    if settled < 0:
        return None
    seats: list[Member] = list(view.members)
    vacant = [*view.vacant, *(one for one in seats if one not in staying)]
    replaced: list[tuple[Member, Member]] = []
    # One member for each machine: the last of its incarnations.
    joining: dict[str, Member] = {}
    for one in sorted(changes.joining):
        joining[one.machine] = one
    for one in sorted(joining.values()):
        if one in view.members or any(one.machine == other.machine for other in staying):
            continue
        if most is not None and sum(other not in vacant for other in seats) >= most:
            break
        former = [other for other in vacant if other.machine == one.machine][-1:] or vacant[:1]
        if former:
            vacant.remove(former[0])
            replaced.append((one, former[0]))
        if former and former[0] in seats:
            seats[seats.index(former[0])] = one
        else:
            seats.append(one)
    members = tuple(one for one in seats if one not in vacant)
    empty = {one for one in staying if answers[one].applied is None}
    newcomers = frozenset(empty | (set(members) - set(staying)))
    machines = {one.machine for one in members}
    given_up = [*view.given_up, *sorted(changes.given_up)]
    given_up = [one for one in given_up if one.machine not in machines]
    return View(
        view.generation + 1,
        members,
        settled,
        newcomers,
        tuple(replaced),
        tuple(vacant[-MOST_VACANT:]),
        tuple(given_up[-MOST_VACANT:]),
        view.generation,
    )


def covered(views: Sequence[View]) -> list[range]:
    """The rounds that each of these consecutive views has made; the last view's are not ended."""
    ends = [view.settled for view in views[1:]]
    return [
        range(view.settled, max(view.settled, end)) for view, end in zip(views, ends, strict=False)
    ]
