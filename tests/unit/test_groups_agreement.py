"""Agreement of a group's machines: model-checked under deaths, delays, losses and partitions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gadei_ps.groups.agreement import Agreement
from gadei_ps.groups.membership import Member, View
from gadei_ps.groups.messages import Apply, Expelled, Fetch, Install, Message, Send

Result = tuple[int, int]  # the generation and the number of the round that made it


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
        self.views = {0: view}
        self.results: dict[int, Result] = {}
        self.applied = 0

    def carry_out(self, machine: Machine, decisions: list[Any]) -> None:
        for one in decisions:
            if isinstance(one, Send):
                self.flying.append((one.to, one.message))
            elif isinstance(one, Install):
                known = self.views.setdefault(one.view.generation, one.view)
                assert known == one.view, "two views of one generation"
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
                assert self.results.setdefault(one.round, machine.held) == machine.held
                machine.held = None
                self.applied += 1
            elif isinstance(one, Expelled):
                machine.fetch = None

    def living(self) -> list[Machine]:
        return [one for one in self.machines.values() if one.alive and not one.agreement.expelled]

    def deliver(self, place: int, *, keep: bool = False) -> None:
        to, message = self.flying[place] if keep else self.flying.pop(place)
        machine = self.machines.get(to)
        if machine is not None and machine.alive:
            self.carry_out(machine, machine.agreement.receive(message))

    def work(self, machine: Machine, *, ends: bool = True) -> None:
        """Gives its model to the round in hand; and takes the result, if all have given theirs."""
        agreement = machine.agreement
        if agreement.view is None or agreement.applied is None:
            return
        number, view = agreement.applied, agreement.view
        if agreement.holds or number < view.settled:
            return
        made = (view.generation, number)
        given = self.contributed.setdefault(made, set())
        if not agreement.frozen:
            agreement.begin()
            given.add(machine.me)
        if ends and given == set(view.members):  # the last part may arrive at any time
            decisions = agreement.complete(*made)
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
        """No more losses, and everyone learns who has died: rounds must end again."""
        start = self.applied
        for _ in range(60):
            for machine in self.living():
                for other in self.machines.values():
                    event = machine.agreement.heard if other.alive else machine.agreement.dead
                    self.carry_out(machine, event(other.me))
                self.carry_out(machine, machine.agreement.again())
            while self.flying:
                self.deliver(0)
            for machine in self.living():
                self.get(machine)
                self.work(machine)
            if self.applied >= start + 2 * len(self.living()):
                return
        able = [one for one in self.living() if one.history or one.agreement.applied is not None]
        assert not able, "the group stands still"


def test_a_view_that_one_machine_has_installed_stays() -> None:
    """Whoever proposes next finds it, though the machine that knows of it is out of reach."""
    group = Group(3)
    a, b, c = group.machines.values()
    group.join(Machine(Member("d", -1), None))
    while not b.agreement.frozen or a.agreement.view == group.views[0]:
        group.flying.sort(key=lambda one: one[0] == c.me)  # c hears nothing for the time being
        group.deliver(0)
    group.flying.clear()
    assert a.agreement.view == group.views[1] and b.agreement.view == group.views[0]
    for one in (b, c):
        group.carry_out(one, one.agreement.silent(a.me))
        group.carry_out(one, one.agreement.again())
    while group.flying:
        group.flying = [one for one in group.flying if a.me not in (one[0], one[1].sender)]
        if group.flying:
            group.deliver(0)
    assert a.me in group.views[1].members and b.agreement.view is not None
    assert b.agreement.view.generation >= 1


class GroupMachine(RuleBasedStateMachine):
    """Everything that may happen to a group, in any order."""

    @initialize(size=st.integers(1, 5))
    def begin(self, size: int) -> None:
        self.group = Group(size)

    def _one(self, data: st.DataObject) -> Machine:
        return data.draw(st.sampled_from(self.group.living()))

    @precondition(lambda self: self.group.flying)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        self.group.deliver(data.draw(st.integers(0, len(self.group.flying) - 1)), keep=keep)

    @precondition(lambda self: self.group.flying)
    @rule()
    def deliver_all(self) -> None:
        for _ in range(len(self.group.flying)):
            self.group.deliver(0)

    @precondition(lambda self: self.group.flying)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.group.flying.pop(data.draw(st.integers(0, len(self.group.flying) - 1)))

    @precondition(lambda self: self.group.living())
    @rule(data=st.data())
    def cut_off(self, data: st.DataObject) -> None:
        """A partition: all that flies between two sides is lost, and they hold each other for
        silent."""
        side = {one.me for one in self.group.living() if data.draw(st.booleans())}
        self.group.flying = [
            (to, one) for to, one in self.group.flying if (to in side) == (one.sender in side)
        ]
        for one in self.group.living():
            for other in self.group.machines:
                if (one.me in side) != (other in side):
                    self.group.carry_out(one, one.agreement.silent(other))

    @precondition(lambda self: self.group.living())
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        self.group.work(self._one(data))

    @rule(ends=st.booleans())
    def work_all(self, ends: bool) -> None:
        for place in range(2):
            for machine in self.group.living():
                self.group.work(machine, ends=ends and place > 0)

    @precondition(lambda self: self.group.living())
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        self.group.get(self._one(data))

    @precondition(lambda self: self.group.living())
    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        machine = self._one(data)
        self.group.carry_out(machine, machine.agreement.again())

    @precondition(lambda self: len(self.group.living()) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.group.die(self._one(data))

    @precondition(lambda self: self.group.living())
    @rule(data=st.data(), known=st.booleans())
    def notice(self, data: st.DataObject, known: bool) -> None:
        """Learns of a death; or holds anyone for silent, or not."""
        machine = self._one(data)
        other = data.draw(st.sampled_from(list(self.group.machines.values())))
        agreement = machine.agreement
        if not other.alive and known:
            self.group.carry_out(machine, agreement.dead(other.me))
        elif other is not machine:
            event = agreement.silent if data.draw(st.booleans()) else agreement.heard
            self.group.carry_out(machine, event(other.me))

    @precondition(lambda self: len(self.group.living()) > 1 and len(self.group.machines) < 9)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        able = [
            one
            for one in self.group.machines.values()
            if Member(one.me.machine, one.me.incarnation + 1) not in self.group.machines
            and (not one.alive or one.agreement.expelled)
        ]
        if able:
            self.group.join(data.draw(st.sampled_from(able)))

    @precondition(lambda self: len(self.group.living()) > 2)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        machine = self._one(data)
        if machine.agreement.view is not None:
            self.group.carry_out(machine, machine.agreement.leave())

    @invariant()
    def one_line_of_results(self) -> None:
        if not hasattr(self, "group"):
            return
        for machine in self.group.machines.values():
            for number, result in enumerate(machine.history):
                # A newcomer may have taken results that nobody else has applied yet.
                assert self.group.results.get(number, result) == result

    def teardown(self) -> None:
        if hasattr(self, "group"):
            self.group.heal()


TestGroup = pytest.mark.timeout(120)(GroupMachine.TestCase)
TestGroup.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
