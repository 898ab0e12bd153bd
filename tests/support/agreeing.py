"""Machines of a group and the letters between them, without processes: what tests let happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gadei_ps.groups.agreement import Agreement
from gadei_ps.groups.membership import Member, View
from gadei_ps.groups.messages import Apply, Expelled, Fetch, Install, Lost, Message, Send

Result = tuple[View, int]  # the view and the number of the round that made it


class Machine:
    """A machine around its agreement: what it has applied, and what it holds."""

    def __init__(self, me: Member, view: View | None) -> None:
        self.agreement = Agreement(me, view)
        self.me = me
        self.alive = True
        self.history: list[Result] = []
        self.held: Result | None = None
        self.fetch: Member | None = None


class Group:
    """Machines and the messages between them. Everything that happens is a method."""

    def __init__(self, size: int) -> None:
        view = View(0, tuple(Member(f"m{k}", 0) for k in range(size)))
        self.machines = {one: Machine(one, view) for one in view.members}
        self.flying: list[tuple[Member, Message]] = []
        self.contributed: dict[Result, set[Member]] = {}
        self.begun: dict[Result, list[Result]] = {}
        """What has been applied by those that make a round."""
        self.views = {0: view}
        self.results: dict[int, Result] = {}
        self.applied = 0
        self.entrusted = False

    def carry_out(self, machine: Machine, decisions: list[Any]) -> None:
        for one in decisions:
            if isinstance(one, Send):
                self.flying.append((one.to, one.message))
            elif isinstance(one, Install):
                self.install(one.view)
                machine.fetch = None
                if len(machine.history) + (machine.held is not None) > one.view.settled:
                    raise AssertionError("a held result is given up, though it is here")
            elif isinstance(one, Fetch):
                machine.fetch = one.source
            elif isinstance(one, Apply):
                assert machine.held is not None
                assert one.round == len(machine.history), "a round twice, or left out"
                machine.history.append(machine.held)
                # Whoever applies a round, dead ones included, applies the same result.
                self.compare(one.round, machine.held)
                machine.held = None
                self.applied += 1
            elif isinstance(one, Expelled):
                machine.fetch = None
            elif isinstance(one, Lost):
                self.die(machine)  # so does an agent

    def install(self, view: View) -> None:
        """A machine works under this view from now on."""
        assert self.views.setdefault(view.generation, view) == view, "two views of one generation"

    def compare(self, number: int, result: Result) -> None:
        """A machine applies the result of a round."""
        assert self.results.setdefault(number, result) == result

    def living(self) -> list[Machine]:
        return [one for one in self.machines.values() if one.alive and not one.agreement.expelled]

    def deliver(self, place: int, *, keep: bool = False) -> None:
        to, message = self.flying[place] if keep else self.flying.pop(place)
        machine = self.machines.get(to)
        if machine is not None and machine.alive:
            self.carry_out(machine, machine.agreement.receive(message))

    def say(self, arrives: Callable[[Member, Message], bool], most: int = 100) -> None:
        """Messages go about, of which only those arrive of which this holds, and at most so many.

        While one holds another for silent that answers, there is no end of proposals.
        """
        left = iter(range(most))
        while self.flying:
            to, message = self.flying.pop(0)
            if arrives(to, message) and next(left, None) is not None:
                self.flying.insert(0, (to, message))
                self.deliver(0)

    def work(self, machine: Machine, *, ends: bool = True) -> None:
        """Gives its model to the round in hand; and takes the result, if all have given theirs."""
        agreement = machine.agreement
        if agreement.view is None or agreement.applied is None or agreement.expelled:
            return
        number, view = agreement.applied, agreement.view
        if agreement.holds or number < view.settled:
            return
        made = (view, number)
        given = self.contributed.setdefault(made, set())
        if not agreement.frozen:
            agreement.begin()
            given.add(machine.me)
            begun = self.begun.setdefault(made, list(machine.history))
            assert begun == machine.history, "members of one view go on from other results"
        if ends and given == set(view.members):  # the last part may arrive at any time
            decisions = agreement.complete(view.generation, number)
            if agreement.holds or any(isinstance(one, Apply) for one in decisions):
                machine.held = made
            self.carry_out(machine, decisions)

    def get(self, machine: Machine) -> None:
        """Carries out a fetch, if the other one still has it."""
        view, source = machine.agreement.view, machine.fetch
        if view is None or source is None or not self.machines[source].alive:
            return
        other = self.machines[source]
        has = [*other.history, *([other.held] if other.held else [])]
        if len(has) < view.settled or machine.agreement.frozen:
            return
        if machine.agreement.lacks:
            machine.history, machine.held = has[: view.settled][:-1], None
            if view.settled:
                machine.held = has[view.settled - 1]
            self.carry_out(machine, machine.agreement.fetched(view.generation))

    def entrust(self) -> None:
        """What whoever has started the machines does where fewer than half of a group live.

        Rounds that only dead machines have applied are not in what the living continue.
        """
        views = {
            one.me: one.agreement.view for one in self.known() if one.agreement.view is not None
        }
        newest = max((view.generation for view in views.values()), default=-1)
        ours = [self.machines[one] for one, view in views.items() if view.generation == newest]
        stands = any(one.agreement.stands for one in ours)
        trains = any(one.agreement.applied and not one.agreement.frozen for one in ours)
        for one in self.known():
            if one in ours and stands:
                longest = max((other.history for other in ours), key=len)
                self.results, self.entrusted = dict(enumerate(longest)), True
                self.carry_out(one, one.agreement.go_on(newest))
            elif one not in ours and trains and not stands:
                self.carry_out(one, one.agreement.go_on(newest))

    def known(self) -> list[Machine]:
        """Those that whoever has started the machines can ask."""
        return self.living()

    def die(self, machine: Machine) -> None:
        machine.alive = False

    def join(self, machine: Machine) -> Machine:
        """The same machine with its next incarnation."""
        machine.alive = False
        me = Member(machine.me.machine, machine.me.incarnation + 1)
        new = self.machines[me] = Machine(me, None)
        highest = self.views[max(self.views)]
        contacts = [one for one in highest.members if self.machines[one].alive]
        self.carry_out(new, new.agreement.join(contacts))
        return new

    def heal(self) -> None:
        """No more losses, all deaths are known, and few may go on: rounds must end again."""
        start = self.applied
        for _ in range(60):
            for machine in self.living():
                for other in self.machines.values():
                    lives = other.alive and not other.agreement.expelled
                    event = machine.agreement.heard if lives else machine.agreement.dead
                    self.carry_out(machine, event(other.me))
                self.carry_out(machine, machine.agreement.again())
            while self.flying:
                self.deliver(0)
            self.entrust()
            for machine in self.living():
                self.get(machine)
                self.work(machine)
            if self.applied >= start + 2 * len(self.living()):
                return
        able = [one for one in self.living() if one.history or one.agreement.applied is not None]
        assert not able, "the group stands still"


class Parted(Group):
    """Machines of which some are cut off from the others. All deaths become known to all, but of
    those that are lost with their hosts."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.away: set[Member] = set()
        self.lost: set[Member] = set()
        self._names = iter(range(100))

    def hear(self, one: Member, other: Member) -> bool:
        return (one in self.away) == (other in self.away)

    def news(self, one: Machine, other: Machine) -> Callable[[Member], list[Any]]:
        """What one machine learns of the other's life."""
        agreement, lives = one.agreement, other.alive and not other.agreement.expelled
        if other.me in self.lost or (lives and not self.hear(one.me, other.me)):
            return agreement.silent
        return agreement.heard if lives else agreement.dead

    def step(self, what: str, places: frozenset[int]) -> None:
        """Something happens to the living machines at these places, or to all."""
        living = self.living()
        chosen = [living[place] for place in sorted(places) if place < len(living)]
        if what == "part":
            self.away = {one.me for one in chosen}
        elif what == "entrust":
            self.entrust()
        elif what == "kill" and len(chosen) < len(living):
            for one in chosen:
                self.die(one)
        elif what == "join":
            for one in chosen:
                new = Machine(Member(f"n{next(self._names)}", 0), None)
                self.machines[new.me] = new
                if one.me in self.away:
                    self.away.add(new.me)
                self.carry_out(new, new.agreement.join([one.me]))
        self.settle()

    def settle(self) -> None:
        """All is heard that can be heard, and rounds are made where they can be made."""
        for _ in range(3):
            for one in self.living():
                for other in self.machines.values():
                    if other is not one:
                        self.carry_out(one, self.news(one, other)(other.me))
                self.carry_out(one, one.agreement.again())
            while self.flying:
                self.flying = [(to, said) for to, said in self.flying if self.hear(to, said.sender)]
                if self.flying:
                    self.deliver(0)
            for one in self.living():
                self.get(one)
                self.work(one)

    def check(self) -> None:
        """Those that live have one line. `carry_out` has compared them with the dead, too."""
        lines = [one.history for one in self.living()]
        longest = max(lines, key=len, default=[])
        assert all(longest[: len(one)] == one for one in lines)
