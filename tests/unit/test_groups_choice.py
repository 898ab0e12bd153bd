"""The choice of models of other groups: the same on all, of what all have, whatever comes when."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.groups.choice import Choosing, newest
from gadei_ps.groups.membership import Member, View
from gadei_ps.groups.messages import Aim, Model, Offer, Reply


@dataclass
class Machine:
    """A machine: what it has, and the messages to it that are under way."""

    choosing: Choosing
    held: list[Model] = field(default_factory=list)
    letters: list[tuple[Member, Reply]] = field(default_factory=list)


class Group:
    """Machines of one view; what happens next is drawn."""

    def __init__(self, size: int, *, takes_all: bool) -> None:
        members = [Member(str(one), 0) for one in range(size)]
        self.takes_all = takes_all
        self.machines = {one: Machine(Choosing(one, takes_all=takes_all)) for one in members}
        self.view = View(0, tuple(members))
        self.number = 1

    def change(self, gone: Member) -> None:
        """A view without this member; letters of the one before are dropped."""
        left = tuple(one for one in self.view.members if one != gone)
        self.view = View(self.view.generation + 1, left)
        for one in self.machines.values():
            one.letters.clear()

    def enter(self, me: Member) -> Machine:
        self.machines[me].choosing.enter(self.view)
        return self.machines[me]

    def send(self, sender: Member, to: Member, body: Reply | None) -> None:
        if body is not None and sender != to:
            self.machines[to].letters.append((sender, body))

    def say(self, me: Member) -> None:
        """Repeats all that is due."""
        machine, first = self.enter(me), self.view.first
        if me != first:
            self.send(me, first, Offer(tuple(machine.held)))
            self.send(me, first, machine.choosing.mine)
            return
        aim = machine.choosing.aim(self.view, machine.held)
        assert set(aim.models) <= set(machine.held)
        for one in self.view.members:
            self.send(me, one, aim)
            self.send(me, one, machine.choosing.choose(self.view, self.number))

    def offer(self, me: Member) -> None:
        machine = self.enter(me)
        if not machine.choosing.has_offered(self.number):
            machine.choosing.offer(self.number, machine.held)

    def deliver(self, me: Member, place: int, *, keep: bool) -> None:
        machine = self.enter(me)
        sender, body = machine.letters[place] if keep else machine.letters.pop(place)
        self.send(me, sender, machine.choosing.hear(sender, self.view, body))

    def end_round(self) -> None:
        """All make their offers and hear of the choice; then it is in the weights of all."""
        for _ in range(3):
            for me in self.view.members:
                self.offer(me)
                self.say(me)
                while self.machines[me].letters:
                    self.deliver(me, 0, keep=False)
        machines = [self.machines[one] for one in self.view.members]
        chosen = {one.choosing.chosen(self.number) for one in machines}
        assert len(chosen) == 1
        (models,) = chosen
        assert models is not None
        for one in machines:
            assert one.choosing.mine is not None
            assert set(models) <= set(one.choosing.mine.models)
            latest = newest(models)
            one.held = [it for it in one.held if it.version > latest.get(it.group, 0)]
        assert len(latest) == len(models) <= (2 if self.takes_all else 1)
        self.number += 1


@settings(max_examples=60)
@given(st.integers(1, 4), st.booleans(), st.data())
def test_all_take_the_same(size: int, takes_all: bool, data: st.DataObject) -> None:
    group = Group(size, takes_all=takes_all)
    for version in range(1, 40):
        me = data.draw(st.sampled_from(group.view.members))
        machine = group.machines[me]
        what = data.draw(st.sampled_from(["get", "get", "offer", "say", "hear", "end", "die"]))
        if what == "get":
            machine.held = [*machine.held, Model(data.draw(st.integers(1, 2)), version)][-4:]
        elif what == "offer":
            group.offer(me)
        elif what == "say":
            group.say(me)
        elif what == "hear" and machine.letters:
            place = data.draw(st.integers(0, len(machine.letters) - 1))
            group.deliver(me, place, keep=data.draw(st.booleans()))
        elif what == "die" and len(group.view.members) > 1:
            group.change(me)
        elif what == "end":
            group.end_round()


def test_machines_of_unequal_speed_take_what_all_have() -> None:
    """The first member names one version until all have it, so they do not miss one another."""
    group = Group(3, takes_all=True)
    first, *others = (group.machines[one] for one in group.view.members)
    under_way: list[tuple[int, int]] = [(0, 0), (0, 0)]  # a version, and when it will be there
    taken = 0
    for now in range(1, 101):
        kept = [one for one in first.held if one.version == first.choosing.aims.get(1)]
        first.held = list(dict.fromkeys([*kept, *first.held[-1:], Model(1, now)]))
        for place, one in enumerate(others):
            version, ends = under_way[place]
            aim = first.choosing.aims.get(1, 0)
            if version and now >= ends:
                one.held = [*one.held, Model(1, version)][-2:]
                under_way[place] = (0, 0)
            elif not version and aim and Model(1, aim) not in one.held:
                under_way[place] = (aim, now + (7, 11)[place])
        group.end_round()
        taken += len(first.choosing.chosen(group.number - 1) or ())
    assert taken >= 6


def test_the_last_model_that_all_have_is_kept_while_the_next_one_comes() -> None:
    group = Group(2, takes_all=True)
    first, other = (group.machines[one] for one in group.view.members)
    first.held, other.held = [Model(1, 1)], [Model(1, 1)]
    for me in reversed(group.view.members):
        group.say(me)
    group.deliver(first.choosing.me, 0, keep=False)
    first.held.append(Model(1, 2))
    group.say(first.choosing.me)
    assert first.choosing.led == {Model(1, 1), Model(1, 2)}
    group.end_round()
    assert other.choosing.chosen(1) == (Model(1, 1),)


def test_only_the_first_member_decides() -> None:
    group = Group(3, takes_all=True)
    first, second, third = group.view.members
    choosing = group.enter(third).choosing
    choosing.hear(second, group.view, Aim((Model(1, 1),)))
    assert choosing.aims == {}
    choosing.hear(first, group.view, Aim((Model(1, 1),)))
    assert choosing.aims == {1: 1}
