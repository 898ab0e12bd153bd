"""Who asks a machine's group to be taken in, and who asks to be left out."""

from __future__ import annotations

from collections.abc import Collection

from gadei_ps.groups.membership import Changes, Member, View


class Wishes:
    """As far as this machine has heard of them. A view that is installed ends what it fulfils, and
    all wishes to leave, which are said again."""

    def __init__(self) -> None:
        self.joining: set[Member] = set()
        self.leaving: set[Member] = set()

    def keep(self, view: View) -> None:
        """Forgets all who need not ask any more: of each machine, no life up to its member's."""
        self.leaving.clear()
        self.joining = {
            one
            for one in self.joining
            if not any(one.machine == it.machine and one <= it for it in view.members)
        }

    def ask(self, view: View, most: int) -> bool:
        """Whether they ask for another view than this. most: members that there may be."""
        joins = self.joining and len(view.members) < most
        return bool(joins) or not self.leaving.isdisjoint(view.members)

    def changes(self, given_up: Collection[Member]) -> Changes:
        """All that the next view is to change. given_up: see Changes."""
        return Changes(tuple(self.joining), frozenset(self.leaving), frozenset(given_up))
