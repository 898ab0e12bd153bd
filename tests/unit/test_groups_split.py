"""Machines that are cut off, die and come: those that live have one line of results."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.agreeing import Parted

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
