"""Which models of other groups a round takes: the same ones on all machines of a group.

Models arrive on each machine in its own time. So the first member of the view leads the others: it
names one model of each neighbour that all are to get, and a newer one when all have it. In each
round every member offers what it has, and keeps that until the round is over. When all have
offered, the first member chooses, of each neighbour, the newest model that all have. A neighbour of
which they have none in common is left out: nobody waits for models.

The first round takes no models. Its choice is the version with which this group's own begin, from
a clock: so a group that has died and begins anew goes on with greater ones.

A choice belongs to one round under one generation. If the membership changes, it is made anew,
unless a member holds the result of the round already; then the others get that result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gadei_ps.groups.membership import Member, View
from gadei_ps.groups.messages import Aim, Choice, Model, Offer, Reply


class Choosing:
    """One machine's part in it. Messages that it is given are of the present generation."""

    def __init__(self, me: Member, *, takes_all: bool) -> None:
        """takes_all: as the rule's."""
        self.me = me
        self.aims: dict[int, int] = {}
        """The version of each neighbour's model that all are to get."""
        self._common: dict[int, int] = {}
        self._takes_all = takes_all
        self._generation = -1
        self._offers: dict[Member, Offer] = {}
        self._has: dict[Member, frozenset[Model]] = {}
        self._choice: Choice | None = None

    def enter(self, view: View) -> Choosing:
        """This view is the present one; what belongs to an earlier one is forgotten."""
        if view.generation != self._generation:
            self._generation = view.generation
            self._offers, self._has, self._choice = {}, {}, None
        return self

    @property
    def mine(self) -> Offer | None:
        """This machine's last offer under this generation, which it keeps to."""
        return self._offers.get(self.me)

    def has_offered(self, number: int) -> bool:
        """Whether this machine has made its offer for this round under this generation."""
        return self.mine is not None and self.mine.round == number

    def offer(self, number: int, held: Iterable[Model]) -> None:
        """What this machine has for a round, from the model that came first to the last.

        Once for each round and generation.
        """
        assert not self.has_offered(number)
        self._offers[self.me] = Offer(tuple(held), number)

    def chosen(self, number: int) -> tuple[Model, ...] | None:
        """The models that the round takes, from the oldest to the newest; None: not known yet."""
        choice = self._choice
        return choice.models if choice is not None and choice.round == number else None

    def hear(self, sender: Member, view: View, body: Reply) -> Choice | None:
        """A message of another member. Returns what is to be sent back."""
        if isinstance(body, Offer):
            self._has[sender] = frozenset(body.models)
            if body.round is not None:
                self._offers[sender] = body
                if self.me == view.first and self.chosen(body.round) is not None:
                    return self._choice
        elif sender == view.first and isinstance(body, Choice):
            self._choice = body
        elif sender == view.first and isinstance(body, Aim):
            self.aims = newest(body.models)
        return None

    @property
    def led(self) -> set[Model]:
        """What the first member is to keep: what all are to get, and the last that all have got."""
        return {Model(*one) for known in (self.aims, self._common) for one in known.items()}

    def choose(self, view: View, number: int) -> Choice | None:
        """On the first member, once all have made their offers for a round: what it takes."""
        if self.me != view.first or self.chosen(number) is not None:
            return None
        offers = [self._offers.get(one) for one in view.members]
        made = [one for one in offers if one is not None and one.round == number]
        if len(made) < len(offers):
            return None
        common = set.intersection(*(set(one.models) for one in made))
        latest = newest(common)
        mine = self._offers[self.me].models  # in the order in which they came
        models = [one for one in mine if one in common and latest[one.group] == one.version]
        if not number:
            models = list(mine)
        self._choice = Choice(tuple(models if self._takes_all else models[-1:]), number)
        return self._choice

    def aim(self, view: View, held: Collection[Model]) -> Aim:
        """What all are to get of what the first member has: its newest, once all have the last."""
        others = [one for one in view.members if one != self.me]
        aims = newest(held)
        for group, version in self.aims.items():
            model = Model(group, version)
            if model not in held:
                continue
            if any(model not in self._has.get(one, ()) for one in others):
                aims[group] = version
            else:
                self._common[group] = version
        self.aims = aims
        return Aim(tuple(Model(*one) for one in sorted(aims.items())))


def newest(models: Iterable[Model]) -> dict[int, int]:
    """The newest version of each group among these."""
    found: dict[int, int] = {}
    for group, version in models:
        found[group] = max(version, found.get(group, 0))
    return found
