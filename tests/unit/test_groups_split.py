"""Machines that are cut off, die and come: those that live have one line of results."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.agreeing import Group, Machine

from gadei_ps.groups.membership import Member


class Parted(Group):
    """Machines of which some are cut off from the others. All deaths become known to all."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.away: set[Member] = set()
        self._names = iter(range(100))

    def hear(self, one: Member, other: Member) -> bool:
        return (one in self.away) == (other in self.away)

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
                    if other is one:
                        continue
                    agreement = one.agreement
                    event = agreement.heard if self.hear(one.me, other.me) else agreement.silent
                    self.carry_out(one, (event if other.alive else agreement.dead)(other.me))
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


PLACES = st.frozensets(st.integers(0, 4), max_size=3)
STEPS = st.tuples(st.sampled_from(["part", "join", "kill", "entrust"]), PLACES)


def test_two_parts_of_a_group_do_not_both_go_on() -> None:
    """One is silent, two take in a newcomer and die: neither the silent one nor the newcomer knows
    that the other lives."""
    group = Parted(3)
    group.step("part", frozenset({2}))
    group.step("join", frozenset({0}))
    assert len(group.views[max(group.views)].members) == 3
    group.step("kill", frozenset({0, 1}))
    c, d = group.living()
    before = len(c.history), len(d.history)
    group.step("part", frozenset())
    group.check()
    assert (len(c.history), len(d.history)) == before, "nobody may decide alone"
    for _ in range(2):
        group.entrust()
        group.settle()
    assert c.agreement.expelled and len(d.history) > before[1]
    group.check()


def test_who_is_waited_for() -> None:
    """Dead machines only where no other one is left to wait for."""
    group = Parted(5)
    group.step("part", frozenset({0, 1}))
    group.step("kill", frozenset({2, 3}))
    a, b, c, d, e = group.machines.values()
    agreement = a.agreement
    assert agreement.missing == (e.me,) and not agreement.stands
    group.step("kill", frozenset({2}))
    assert agreement.missing == (c.me, d.me, e.me)
    assert agreement.stands and not b.agreement.missing


# What the dead had decided, and what those decide who are left, are two views.
@example(
    5, [("part", frozenset({0, 3, 4})), ("kill", frozenset({0, 3, 4})), ("entrust", frozenset())]
)
@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), st.lists(STEPS, max_size=6))
def test_machines_that_live_have_one_line_of_results(
    size: int, steps: list[tuple[str, frozenset[int]]]
) -> None:
    group = Parted(size)
    for what, places in steps:
        group.step(what, places)
        group.check()
