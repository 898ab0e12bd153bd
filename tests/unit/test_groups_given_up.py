"""Machines that somebody gives up for dead, rightly or wrongly: one group remains."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.vouched import GivenUp, Wrongly

from gadei_ps.groups.membership import APART
from gadei_ps.groups.messages import Join, Message

PLACES = st.frozensets(st.integers(0, 4), max_size=3)


def test_the_last_of_three_goes_on_when_both_others_are_given_up() -> None:
    """Hosts have lost their power: nothing tells that they are dead."""
    group = GivenUp(3)
    a, b, c = group.machines.values()
    group.step("lose", frozenset({0, 1}))
    assert c.agreement.missing == c.agreement.doubts == (a.me, b.me) and not c.agreement.hears
    group.give_up(a.me)
    group.settle()
    assert c.agreement.missing == c.agreement.doubts == (b.me,)
    group.entrust()
    assert not group.entrusted, "one may live still"
    group.give_up(b.me)
    group.settle()
    assert c.agreement.stands
    group.entrust()
    assert group.goes_on() and c.agreement.view is not None
    assert c.agreement.view.given_up == (a.me, b.me) and c.agreement.view.generation >= APART
    back = group.join(a)
    group.settle()
    assert group.goes_on() and back.history and c.agreement.view.given_up == (b.me,)


def test_a_machine_that_is_heard_is_not_given_up() -> None:
    """Neither one that was heard all the time, nor one that is heard again in time."""
    group = GivenUp(3)
    a, b, c = group.machines.values()
    group.give_up(b.me)
    assert group.goes_on() and list(group.views) == [0]
    for other in (b, c):
        group.carry_out(a, a.agreement.silent(other.me))
    group.give_up(b.me, c.me)
    assert a.agreement.stands
    group.carry_out(a, a.agreement.heard(c.me))
    assert a.agreement.missing == (c.me,) and not a.agreement.stands
    group = GivenUp(2)
    a, b = group.machines.values()
    group.give_up(b.me)
    group.step("part", frozenset({1}))
    assert a.agreement.missing == (b.me,), "it was said before"


def test_two_machines_of_which_the_wrong_one_was_given_up() -> None:
    """It has waited meanwhile, is told so once it is heard, and joins."""
    group = GivenUp(2)
    a, b = group.machines.values()
    group.step("part", frozenset({1}))
    before = len(b.history)
    group.give_up(b.me)
    group.settle()
    assert len(a.history) > before == len(b.history)
    group.away.clear()
    group.settle()
    assert b.agreement.expelled
    group.come_together()
    assert group.goes_on() and len(group.living()) == 2


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 5),
    st.lists(
        st.tuples(st.sampled_from(["part", "join", "kill", "lose", "bury", "entrust"]), PLACES),
        max_size=6,
    ),
)
def test_machines_that_are_given_up_and_dead_change_no_result(
    size: int, steps: list[tuple[str, frozenset[int]]]
) -> None:
    group = GivenUp(size)
    for what, places in steps:
        group.step(what, places)
        group.check()
    group.come_together()
    group.check()
    if any(one.history for one in group.living()):
        assert group.goes_on()


def test_the_larger_part_of_a_group_was_given_up_and_lives() -> None:
    """Both parts go on. The one of those who are told of the deaths remains."""
    group = Wrongly(5)
    group.step("part", frozenset({0, 1}))
    a, b, *others = group.machines.values()
    group.give_up(*(one.me for one in others))
    group.settle()
    group.entrust()
    group.settle()
    parts = {one.agreement.view for one in group.living()}
    assert len(parts) == 2 and all(one.history for one in group.living())
    group.step("part", frozenset())
    assert all(one.agreement.expelled for one in others)
    assert not a.agreement.expelled and not b.agreement.expelled
    group.come_together()
    assert group.goes_on() and len(group.living()) == 5


def test_a_machine_that_has_the_state_of_the_other_part_drops_it() -> None:
    """It has asked one part to join, and the letter comes when it is a member of the other one."""
    group = Wrongly(5)
    group.step("part", frozenset({0, 1}))
    a, _, *others = group.machines.values()
    group.give_up(*(one.me for one in others))
    group.settle()
    group.entrust()
    new = group.join(others[0])
    group.carry_out(new, new.agreement.join(one.me for one in others))
    group.settle()
    assert new.history and new.agreement.view == others[1].agreement.view
    group.flying.append((a.me, Message(new.me, None, Join(new.me))))
    group.away = {one.me for one in others}
    group.settle()
    assert new.agreement.expelled
    assert any(new.me in one.newcomers for one in group.views.values() if one.generation >= APART)
    group.come_together()
    assert group.goes_on() and len(group.living()) == 5


# Each half gives up the other; a half then loses one more, and has made two such views.
@example(
    4,
    [
        ("part", frozenset({0, 2})),
        ("give up", frozenset({0, 1, 2, 3})),
        ("lose", frozenset({2})),
        ("bury", frozenset()),
    ],
)
# Each half gives up the other.
@example(4, [("part", frozenset({0, 1})), ("give up", frozenset({0, 1, 2, 3}))])
@settings(deadline=None, max_examples=100)
@given(
    st.integers(2, 5),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["part", "join", "kill", "lose", "bury", "entrust", "give up", "return"]
            ),
            PLACES,
        ),
        max_size=8,
    ),
)
def test_of_machines_that_were_given_up_wrongly_one_group_remains(
    size: int, steps: list[tuple[str, frozenset[int]]]
) -> None:
    group = Wrongly(size)
    for what, places in steps:
        group.step(what, places)
    group.come_together()
    if any(one.history for one in group.living()):
        assert group.goes_on()
