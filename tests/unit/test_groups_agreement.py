"""Agreement of a group's machines: model-checked under deaths, delays, losses and partitions."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from support.agreeing import Group, Machine
from support.happenings import GroupMachine

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


TestGroup = pytest.mark.timeout(120)(GroupMachine.TestCase)
TestGroup.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
