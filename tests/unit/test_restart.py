"""Restarts of dead processes: decisions on histories that hypothesis makes up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadei_ps.watchdog.restart import GIVE_UP, Exit, Policy, delay, remembered

NOW = 1000.0
policies = st.builds(
    Policy,
    limit=st.integers(1, 12),
    first_s=st.floats(0.01, 1),
    longest_s=st.floats(1, 10),
    within_s=st.floats(1, 200),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Exit]:
    """Return exits before NOW, oldest first."""
    ages = draw(st.lists(st.floats(0, 300), max_size=30))
    return [Exit(NOW - age, draw(st.booleans())) for age in sorted(ages, reverse=True)]


def useless(count: int, at: float = NOW) -> list[Exit]:
    return [Exit(at, useful=False)] * count


@given(histories(), policies)
def test_a_useful_death_never_delays(exits: list[Exit], policy: Policy) -> None:
    assert delay([*exits, Exit(NOW, useful=True)], NOW, policy) == 0
    assert delay([], NOW, policy) == 0


@given(st.integers(1, 40), policies)
def test_useless_ones_wait_ever_longer_and_end(count: int, policy: Policy) -> None:
    waits = [delay(useless(n), NOW, policy) for n in range(1, count + 1)]
    given_up = waits[policy.limit - 1 :]
    assert all(wait == GIVE_UP for wait in given_up)
    tried = waits[: policy.limit - 1]
    assert all(wait <= policy.longest_s for wait in tried)
    assert all(one <= other for one, other in itertools.pairwise(tried))
    for number, wait in enumerate(tried):
        doubled = policy.first_s * 2.0 ** (number - 1) if number else 0.0
        assert wait == min(policy.longest_s, doubled)


@given(histories(), policies, st.floats(0, 400), st.floats(0, 400))
def test_time_heals(exits: list[Exit], policy: Policy, one_s: float, other_s: float) -> None:
    """Waiting never makes the wait longer, and in the end all is forgiven."""
    sooner, later = sorted((one_s, other_s))
    assert delay(exits, NOW + later, policy) <= delay(exits, NOW + sooner, policy)
    # A second more: near 1000 a sum of floats may fall just short of the limit.
    assert delay(exits, NOW + policy.within_s + 1, policy) == 0


@given(histories(), policies, st.integers(0, 12))
def test_only_those_since_the_last_useful_one_count(
    exits: list[Exit], policy: Policy, count: int
) -> None:
    last = useless(count)
    expected = delay(last, NOW, policy)
    assert delay([*exits, Exit(NOW, useful=True), *last], NOW, policy) == expected


@given(histories(), policies)
def test_what_is_remembered_is_enough(exits: list[Exit], policy: Policy) -> None:
    kept = remembered(exits, policy)
    assert len(kept) <= policy.limit
    assert delay(kept, NOW, policy) == delay(exits, NOW, policy)
    # Exit by exit, as supervisors do it.
    short: tuple[Exit, ...] = ()
    for one in exits:
        short = remembered((*short, one), policy)
    assert short == kept


@pytest.mark.parametrize("policy", [Policy(), Policy(limit=5), Policy(limit=20)])
def test_what_dies_at_once_is_given_up(policy: Policy) -> None:
    """Back-off does not take so long that the first deaths are forgiven meanwhile."""
    now, exits = NOW, ()
    starts = 0
    while (wait := delay(exits, now, policy)) != GIVE_UP:
        now += wait + 1.0  # it needs a second to fail
        starts += 1
        exits = remembered((*exits, Exit(now, useful=False)), policy)
        assert starts <= policy.limit
    assert starts == policy.limit
    assert now - NOW < policy.within_s


def test_killed_for_ever() -> None:
    """A process that does something each time may be killed as often as one likes."""
    now, exits = NOW, ()
    for number in range(1000):
        assert delay(exits, now, Policy()) == 0
        now += 0.05
        exits = remembered((*exits, Exit(now, useful=True)), Policy())
        if number % 7 == 0:  # now and then one is killed before it has done anything
            exits = remembered((*exits, Exit(now, useful=False)), Policy())
