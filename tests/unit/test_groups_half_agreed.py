"""Views that are agreed on by half when machines are given up that live: one group remains."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.vouched import Half, Wrongly

from gadei_ps.groups.agreement import Agreement
from gadei_ps.groups.membership import APART, Member, View, can_work
from gadei_ps.groups.messages import Ballot, Message, Notice, Prepare, Send

ALL = frozenset(range(5))
Steps = list[tuple[str, frozenset[int]]]


def places(*numbers: int) -> frozenset[int]:
    """Of machines."""
    return frozenset(numbers)


# Each has promised for both; c wants to leave, as a knows, and b, as d knows.
OF_A_AND_B = Half(0, promise=places(1, 2), leave=places(2))
OF_C_AND_D = Half(3, promise=places(1, 2), leave=places(1))


def test_two_sides_with_views_of_one_generation_and_no_member_in_common() -> None:
    """Neither view says that somebody was given up: it was proposed when nobody was."""
    group = Wrongly(4)
    a, b, c, d = group.machines.values()
    group.propose(OF_A_AND_B)
    group.propose(OF_C_AND_D)
    group.step("part", places(2, 3))
    group.step("give up", ALL)
    ours, theirs = a.agreement.view, d.agreement.view
    assert ours is not None and theirs is not None
    assert (ours.generation, ours.members, ours.given_up) == (1, (a.me, b.me), ())
    assert (theirs.generation, theirs.members, theirs.given_up) == (1, (c.me, d.me), ())
    assert all(one.history for one in group.living())
    group.step("part", places())
    assert [one.me for one in group.living()] == list(
        max(ours, theirs, key=lambda it: it.rank).members
    )
    group.come_together()
    assert group.goes_on() and len(group.living()) == 4


def test_a_machine_that_has_gone_on_by_a_view_does_not_come_back_to_another_one() -> None:
    """It has answered who proposed that one; before it was made, another one was that it is in,
    too, and it has made rounds under it."""
    group = Wrongly(4)
    a, b, c, d = group.machines.values()
    group.propose(OF_C_AND_D)
    group.propose(Half(0, promise=places(1, 2), accept=places(1), gives_up=True))
    group.propose(Half(2, promise=places(3), accept=places(3), gives_up=True))
    assert c.agreement.view == d.agreement.view != group.views[0] and c.history
    group.carry_out(a, a.agreement.silent(c.me))
    group.carry_out(a, a.agreement.give_up(c.me.machine))
    made = a.agreement.view
    assert made is not None and made.generation >= APART and made.members == (a.me, b.me, c.me)
    group.say(lambda to, _: to == c.me)
    assert c.agreement.expelled
    group.come_together()
    assert group.goes_on() and len(group.living()) == 4


def test_a_machine_drops_what_it_has_only_for_one_that_works_under_the_other_view() -> None:
    """Who has left may tell of a view under which nobody works yet."""
    group = Wrongly(4)
    group.settle()
    a, b, c, d = group.machines.values()
    later = View(1, (a.me, b.me), len(a.history), after=0)
    group.carry_out(c, c.agreement.receive(Message(d.me, later, Notice())))
    assert not c.agreement.expelled and c.agreement.view == group.views[0]
    group.carry_out(c, c.agreement.receive(Message(a.me, later, Notice())))
    assert c.agreement.expelled


def test_under_which_views_a_machine_can_work() -> None:
    a, b, c = (Member(name, 0) for name in "abc")
    first = View(3, (a, b))
    after = View(4, (a, b, c), 7, frozenset({c}), after=3)
    assert can_work(a, 7, first, after) and not can_work(a, 7, first, View(4, (b,), after=3))
    assert not can_work(a, 7, View(4, (a,), after=3), View(5, (a, b, c), after=3))
    assert can_work(c, None, None, after) and can_work(c, None, first, after)
    assert not can_work(c, 0, first, after), "what it has is of others"
    assert not can_work(c, None, View(4, (c,)), after), "two of one generation"


def test_of_two_views_one_remains() -> None:
    a, b = Member("a", 0), Member("b", 0)
    views = [
        View(1, (a, b)),
        View(1, (a,)),
        View(1, (a, b), newcomers=frozenset({b})),
        View(2, (a,)),
    ]
    for one in views:
        for other in views:
            assert (one.rank < other.rank) + (one.rank > other.rank) == (one != other)
    assert max(views, key=lambda view: view.rank) == views[-1]


def test_what_is_said_under_another_view_of_the_same_generation_is_not_heard() -> None:
    """Its sender is told which view remains, if it is of the lesser one."""
    a, b, c = (Member(name, 0) for name in "abc")
    lesser, greater = View(1, (a, b)), View(1, (a, c))
    asks = Prepare(Ballot(7, 0))
    agreement = Agreement(c, greater)
    told = agreement.receive(Message(a, lesser, asks))
    assert told == [Send(a, Message(c, greater, Notice()))] and not agreement.frozen
    agreement = Agreement(b, lesser)
    assert not agreement.receive(Message(b, greater, asks)) and not agreement.frozen
    assert agreement.view == lesser, "b is no member of it"
    agreement.receive(Message(c, greater, asks))
    assert agreement.expelled


PLACES = st.frozensets(st.integers(0, 4), max_size=4)
HAPPENS = ["part", "join", "kill", "lose", "bury", "entrust", "give up", "return"]
HALVES = st.builds(Half, st.integers(0, 4), PLACES, PLACES, PLACES, st.booleans())


# Neither side says that somebody was given up.
@example(4, [OF_A_AND_B, OF_C_AND_D], places(2, 3), [])
# One side is told of a view that has a machine of it, which has gone on by another one.
@example(
    4, [Half(1, places(0, 2), leave=places(3), gives_up=True)], places(0, 2), [("part", places())]
)
@settings(deadline=None, max_examples=100)
@given(
    st.integers(2, 5),
    st.lists(HALVES, min_size=1, max_size=4),
    PLACES,
    st.lists(st.tuples(st.sampled_from(HAPPENS), PLACES), max_size=4),
)
def test_of_sides_that_agreed_by_half_one_group_remains(
    size: int, halves: list[Half], away: frozenset[int], steps: Steps
) -> None:
    """Some views are proposed, then each side gives up the other one."""
    group = Wrongly(size)
    for one in halves:
        group.propose(one)
    for what, chosen in (("part", away), ("give up", ALL), *steps):
        group.step(what, chosen)
    group.come_together()
    if any(one.history for one in group.living()):
        assert group.goes_on()
