"""A machine's own proposal for the next view, and who has answered it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace

from gadei_ps.groups.membership import APART, DRAWN_BYTES, Changes, Member, View, next_view
from gadei_ps.groups.messages import Accept, Ballot, Prepare, Promise


class Proposal:
    """Of one generation. phase: 0 none, 1 it asks for promises, 2 for acceptances."""

    def __init__(self) -> None:
        self.phase = 0
        self.ballot = Ballot(0, 0)
        self.chosen: View | None = None
        """What is to be accepted."""
        self.promises: dict[Member, Promise] = {}
        self.agreed: set[Member] = set()

    @property
    def answered(self) -> Collection[Member]:
        """Those that have answered the present question."""
        return self.promises if self.phase == 1 else self.agreed

    @property
    def question(self) -> Prepare | Accept:
        """What is asked in this phase."""
        if self.phase == 1:
            return Prepare(self.ballot)
        assert self.chosen is not None
        return Accept(self.ballot, self.chosen)

    def begin(self, promised: Ballot | None, place: int) -> None:
        """A new one. promised: what the machine has promised. place: its own in the view."""
        highest = max(self.ballot, promised or self.ballot)
        self.ballot = Ballot(highest.attempt + 1, place)
        self.phase, self.chosen = 1, None
        self.promises, self.agreed = {}, set()

    def give_way(self, promised: Ballot) -> None:
        """Somebody has promised a greater ballot to another one."""
        if self.phase and promised > self.ballot:
            self.phase, self.ballot = 0, promised

    def choose(self, view: View, changes: Changes, most: int, *, entrusted: bool) -> bool:
        """Makes the view that is to follow, of what a quorum has answered.

        entrusted: see is_quorum. Returns whether there is one: none where nobody has the group's
        state.
        """
        accepted = [one.accepted for one in self.promises.values() if one.accepted]
        answers = {one: promise.answer for one, promise in self.promises.items()}
        given_up = changes.given_up - answers.keys()
        if accepted:
            self.chosen = max(accepted, key=lambda one: one[0])[1]
        else:
            self.chosen = next_view(view, answers, replace(changes, given_up=given_up), most)
            if self.chosen is not None and (entrusted or given_up):
                self.chosen = _apart(view, self.chosen)
        self.phase = 2 if self.chosen is not None else 0
        return bool(self.phase)


def _apart(view: View, chosen: View) -> View:
    """Under a generation that nobody else comes to who goes on from this view with other members.

    Neither in one step, nor in several: steps that depended on places would add up to the same.
    """
    said = repr((view.generation, view.members, chosen.members)).encode()
    drawn = int.from_bytes(hashlib.blake2b(said, digest_size=DRAWN_BYTES).digest(), "big")
    return replace(chosen, generation=view.generation + APART * (1 + drawn))
