"""Views by generation: who follows whom, who replaces whom, which rounds a view makes."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.groups.membership import Answer, Changes, Member, View, covered, is_quorum, next_view

A, B, C, D = (Member(name, 0) for name in "abcd")
FIRST = View(0, (A, B, C), settled=5)
NONE = Changes()


def after(view: View, answers: dict[Member, Answer], changes: Changes = NONE) -> View:
    found = next_view(view, answers, changes)
    assert found is not None
    return found


def test_survivors_keep_their_order_and_make_the_round_again() -> None:
    found = after(FIRST, {C: Answer(5), A: Answer(5)})
    assert (found.generation, found.members, found.settled) == (1, (A, C), 5)
    assert (found.vacant, found.newcomers, found.first) == ((B,), frozenset(), A)


def test_a_result_that_one_holds_is_taken() -> None:
    assert after(FIRST, {B: Answer(5), C: Answer(5, holds=True)}).settled == 6
    assert after(FIRST, {B: Answer(6), C: Answer(5, holds=True)}).settled == 6


def test_a_machine_that_comes_back_takes_its_own_place() -> None:
    gone = after(FIRST, {A: Answer(5), C: Answer(5)})
    again = Member("b", 1)
    back = after(gone, {A: Answer(7), C: Answer(7)}, Changes((D, again)))
    assert back.members == (A, C, again, D)  # a place that nobody kept is at the end
    assert back.replaced == ((again, B),) and back.newcomers == {again, D} and not back.vacant
    # While its death is handled, the newcomer takes the very seat.
    assert after(FIRST, {A: Answer(5), C: Answer(5)}, Changes((D,))).members == (A, D, C)


def test_a_machine_is_a_member_once() -> None:
    answers = {one: Answer(5) for one in FIRST.members}
    assert after(FIRST, answers, Changes((Member("a", 1), B))).members == (A, B, C)


def test_one_leaves_only_if_another_has_the_state() -> None:
    answers = {one: Answer(5) for one in FIRST.members}
    assert after(FIRST, answers, Changes(leaving=frozenset({A}))).members == (B, C)
    alone = {A: Answer(5), B: Answer(None)}
    kept = after(FIRST, alone, Changes(leaving=frozenset({A})))
    assert kept.members == (A, B) and kept.newcomers == {B}
    assert next_view(FIRST, {B: Answer(None), C: Answer(None)}, NONE) is None


@settings(deadline=None)
@given(st.integers(1, 6), st.data())
def test_quorums_have_a_member_in_common_unless_all_are_dead(
    size: int, data: st.DataObject
) -> None:
    view = View(0, tuple(Member(str(k), 0) for k in range(size)))
    members = set(view.members)
    some = st.sets(st.sampled_from(view.members))
    one, other, dead = data.draw(some), data.draw(some), data.draw(some)
    if is_quorum(view, one, dead) and is_quorum(view, other, dead):
        assert one & other or members - one | members - other <= dead
    assert is_quorum(view, members, ())
    assert not is_quorum(view, (), members)


def test_fewer_than_half_do_not_decide() -> None:
    """Also if all others are dead: these may have taken in a newcomer."""
    four = View(0, (A, B, C, D))
    assert is_quorum(four, {A, B}, {C, D}) and not is_quorum(four, {A, B}, {C})
    assert is_quorum(FIRST, {A, B}, ()) and not is_quorum(FIRST, {A}, {B, C})


def test_rounds_that_views_have_made() -> None:
    views = [FIRST, after(FIRST, {A: Answer(8)}), View(2, (A,), 9)]
    assert covered(views) == [range(5, 8), range(8, 9)]
    numbers = list(itertools.chain(*covered(views)))
    assert numbers == sorted(set(numbers))
