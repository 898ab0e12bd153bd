"""What a machine knows of the lives of the others: who is silent, and who is dead."""

from __future__ import annotations

from gadei_ps.groups.membership import Member, View


class Lives:
    """Of the members of a view.

    silent: nothing is heard of these, the dead included. given_up: silent ones of which somebody
    vouches that they are dead. That counts until something is heard of them. vouched: the same,
    also of those that have been heard since, and of those that are in the view no more: until a
    view names them, for what was decided without them they may not know.
    """

    def __init__(self) -> None:
        self.silent: set[Member] = set()
        self.given_up: set[Member] = set()
        self.vouched: set[Member] = set()
        self._ended: set[Member] = set()

    @property
    def dead(self) -> set[Member]:
        """Those that have certainly ended, and those that are given up."""
        return self._ended | self.given_up

    def end(self, one: Member) -> None:
        """It is certain that this life has ended."""
        self._ended.add(one)
        self.given_up.discard(one)
        self.vouched.discard(one)
        self.silent.add(one)

    def hear(self, one: Member) -> None:
        """Something is heard of it. Of one that has ended, it was under way for long."""
        if one not in self._ended:
            self.silent.discard(one)
            self.given_up.discard(one)

    def give_up(self, one: Member) -> None:
        """Somebody vouches for its death. Nothing changes for one that is heard."""
        if one in self.silent and one not in self._ended:
            self.given_up.add(one)
            self.vouched.add(one)

    def keep(self, view: View) -> None:
        """Forgets all that a new view neither has nor should name."""
        self.silent.intersection_update(view.members)
        self.given_up.intersection_update(view.members)
        self._ended.intersection_update(view.members)
        machines = {one.machine for one in view.members}
        settled = {one for one in self.vouched if one.machine in machines}.union(view.given_up)
        self.vouched.difference_update(settled - self.given_up)
