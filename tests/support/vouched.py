"""Groups of which somebody gives up machines for dead, rightly or wrongly."""

from __future__ import annotations

from dataclasses import dataclass

from gadei_ps.groups.membership import Member, View
from gadei_ps.groups.messages import Accept
from support.agreeing import Machine, Parted, Result


class GivenUp(Parted):
    """A person may give up machines. Those that are lost have died, and nothing tells it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.given_up: set[Member] = set()

    def known(self) -> list[Machine]:
        return [one for one in self.living() if one.me not in self.given_up]

    def entrust(self) -> None:
        """Nothing is decided while one does not answer that nobody has given up."""
        if self.lost <= self.given_up:
            super().entrust()

    def give_up(self, *gone: Member) -> None:
        """All are told who hear nothing of these."""
        self.given_up.update(gone)
        for one in self.living():
            for other in gone:
                self.carry_out(one, one.agreement.give_up(other.machine))

    def step(self, what: str, places: frozenset[int]) -> None:
        living = self.living()
        chosen = [living[place].me for place in sorted(places) if place < len(living)]
        if what == "lose" and len(chosen) < len(living):
            for me in chosen:
                self.die(self.machines[me])
                self.lost.add(me)
        elif what == "bury":
            self.give_up(*self.lost)
        super().step(what, places)

    def come_together(self) -> None:
        """The network is whole, what is lost is given up, and who is expelled comes back."""
        self.away.clear()
        for _ in range(10):
            self.give_up(*self.lost)
            self.settle()
            self.return_()
            self.entrust()
        for one in self.living():  # those that had come back are known again
            self.given_up.discard(one.me)
        for _ in range(10):
            self.settle()
            self.return_()
            self.entrust()

    def return_(self) -> None:
        """Machines that are expelled join again. All addresses are known to them."""
        for one in list(self.machines.values()):
            if one.alive and one.agreement.expelled:
                self.join(one)
        for one in self.living():
            if one.agreement.view is None:
                self.carry_out(one, one.agreement.join(self.machines))

    def goes_on(self) -> bool:
        """Whether all that live make rounds, all the same ones."""
        self.check()
        living = self.living()
        before = [len(one.history) for one in living]
        self.settle()
        self.check()
        assert len({one.agreement.view for one in living}) <= 1, "two groups"
        return all(len(one.history) > old for one, old in zip(living, before, strict=True))


@dataclass(frozen=True)
class Half:
    """A proposal of one machine, all by their places among those that live.

    Only these promise, and only these of them accept, besides itself. leave: want to leave, and
    only the proposer hears of it. gives_up: whether the proposer is told that all others are dead.
    """

    proposer: int
    promise: frozenset[int]
    accept: frozenset[int] = frozenset()
    leave: frozenset[int] = frozenset()
    gives_up: bool = False


class Wrongly(GivenUp):
    """Machines are given up that live: for a time, there may be two lines of results."""

    def install(self, view: View) -> None:
        """Each side may make one of its own of a generation."""
        self.views[view.generation] = view

    def compare(self, number: int, result: Result) -> None:
        pass

    def step(self, what: str, places: frozenset[int]) -> None:
        living = self.living()
        if what == "give up":
            self.give_up(*(living[place].me for place in places if place < len(living)))
        elif what == "return":
            self.return_()
        super().step(what, places)

    def propose(self, half: Half) -> None:
        """Some hear of this proposal, and nothing else is heard."""
        living = self.living()
        if half.proposer >= len(living):
            return
        proposer = living[half.proposer]
        accept = [living[place].me for place in half.accept if place < len(living)]
        there = [one for place, one in enumerate(living) if place in {half.proposer, *half.promise}]
        names = [one.me for one in there]
        for place in sorted(half.leave):
            if place < len(living) and living[place].agreement.view is not None:
                self.carry_out(living[place], living[place].agreement.leave())
        self.say(lambda to, _: to == proposer.me)
        for place, one in enumerate(there):
            for other in self.machines:
                # Who comes before it would be the one to propose.
                hears = other in names and (one is not proposer or names.index(other) >= place)
                if other != one.me:
                    event = one.agreement.heard if hears else one.agreement.silent
                    self.carry_out(one, event(other))
                if other not in names and half.gives_up:
                    self.carry_out(one, one.agreement.give_up(other.machine))
        for _ in range(2):  # it may have to give way to an earlier one first
            self.carry_out(proposer, proposer.agreement.again())
            self.say(
                lambda to, said: (
                    {to, said.sender} <= {*names}
                    and (to in accept or not isinstance(said.body, Accept))
                )
            )
        for other in names:
            self.carry_out(proposer, proposer.agreement.heard(other))
        for _ in range(3):
            for one in there:
                self.get(one)
                self.work(one)
            self.say(lambda to, said: {to, said.sender} <= {*names})
