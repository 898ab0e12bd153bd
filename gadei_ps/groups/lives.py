"""What a machine knows of the lives of the others: who is silent, and who is dead."""

from __future__ import annotations

from collections.abc import Collection

from gadei_ps.groups.membership import Member


class Lives:
    """Of the members of a view.

    silent: nothing is heard of these, the dead included. given_up: silent ones of which somebody
    vouches that they are dead. That counts until something is heard of them.
    """

    def __init__(self) -> None:
        self.silent: set[Member] = set()
        self.given_up: set[Member] = set()
        self._ended: set[Member] = set()

    @property
    def dead(self) -> set[Member]:
        """Those that have certainly ended, and those that are given up."""
        return self._ended | self.given_up

    def end(self, one: Member) -> None:
        """It is certain that this life has ended."""
        self._ended.add(one)
        self.given_up.discard(one)
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

    def keep(self, members: Collection[Member]) -> None:
        """Forgets all others."""
        self.silent.intersection_update(members)
        self.given_up.intersection_update(members)
        self._ended.intersection_update(members)
