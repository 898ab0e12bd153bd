"""What may happen to a group, in any order: a state machine for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gadei_ps.groups.membership import Member
from support.agreeing import Group, Machine


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
