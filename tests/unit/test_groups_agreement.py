"""Agreement of a group's machines: model-checked under deaths, delays, losses and partitions."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.agreeing import Group, Machine

from gadei_ps.groups.agreement import Agreement
from gadei_ps.groups.membership import Member


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


def test_an_exchange_that_fails_is_begun_anew_by_the_same_members() -> None:
    group = Group(3)
    _, _, c = group.machines.values()
    group.work(c)
    group.carry_out(c, c.agreement.broken(1))  # of another generation
    assert not group.flying
    group.carry_out(c, c.agreement.broken(0))
    group.flying.clear()  # lost; but it is said again
    for machine in group.living():
        group.carry_out(machine, machine.agreement.again())
    while group.flying:
        group.deliver(0)
    assert group.views[1].members == group.views[0].members
    assert all(one.agreement.view == group.views[1] for one in group.living())
    group.heal()


def test_a_full_group_takes_in_nobody_until_a_place_is_free() -> None:
    group = Group(2)
    a, b = group.machines.values()
    for machine in (a, b):
        machine.agreement = Agreement(machine.me, group.views[0], most=2)
    newcomers = [group.join(Machine(Member(name, -1), None)) for name in "cd"]

    def talk() -> None:
        for _ in range(3):
            for machine in group.living():
                group.carry_out(machine, machine.agreement.again())
            while group.flying:
                group.deliver(0)

    talk()
    assert list(group.views) == [0]
    group.die(b)
    group.carry_out(a, a.agreement.dead(b.me))
    talk()
    assert len(group.views) == 2 and group.views[1].members == (a.me, newcomers[0].me)


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

    @rule()
    def entrust(self) -> None:
        self.group.entrust()

    @precondition(lambda self: self.group.living())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """An exchange fails, though all may live."""
        machine = self._one(data)
        if machine.agreement.view is not None:
            generation = machine.agreement.view.generation
            self.group.carry_out(machine, machine.agreement.broken(generation))

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
        entrusted = self.group.entrusted
        for machine in self.group.living() if entrusted else self.group.machines.values():
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
