"""Ownership of samples, beside a plain set."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.groups.subsets import Ranges, Subsets

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@quick
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "take"]), st.integers(0, 40), st.integers(0, 12)
        )
    )
)
def test_ranges_are_a_set(steps: list[tuple[str, int, int]]) -> None:
    ranges, plain = Ranges(), set[int]()
    for what, begin, size in steps:
        span = set(range(begin, begin + size))
        if what == "add":
            ranges.add(begin, begin + size)
            plain |= span
        elif what == "remove":
            assert ranges.remove(begin, begin + size) == len(plain & span)
            plain -= span
        else:
            taken = {k for low, high in ranges.take(size) for k in range(low, high)}
            assert taken == set(sorted(plain)[:size])
            plain -= taken
        listed = list(ranges)
        assert [k for low, high in listed for k in range(low, high)] == sorted(plain)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(listed))
        assert len(ranges) == len(plain)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(0, 60), st.integers(1, 5))
def test_each_sample_is_answered_once_a_pass(seed: int, samples: int, owners: int) -> None:
    subsets = Subsets(samples, list(range(owners)))
    sizes = [subsets.owned(one) for one in range(owners)]
    assert sum(sizes) == samples and max(sizes) - min(sizes) <= 1
    living = list(range(owners))
    answered: list[int] = []
    newest = owners
    chance = random.Random(seed)
    while subsets.left:
        what = chance.choice(["take", "take", "keep", "keep", "die", "join"])
        owner = chance.choice(living)
        own = {k for low, high in subsets.ranges(owner) for k in range(low, high)}
        before = subsets.left
        if what == "take":
            ranges = subsets.take(owner, chance.randint(1, 20))
            answered += [k for low, high in ranges for k in range(low, high)]
        elif what == "keep":
            left = {k for k in range(samples) if chance.random() < 0.5}
            assert subsets.keep(owner, Ranges((k, k + 1) for k in left)) == len(own - left)
            answered += own - left
        else:
            heirs = [one for one in living if one != owner]
            if what == "join" or not heirs:
                assert subsets.gone(owner, []) == len(own)
                living, heirs = [*heirs, newest], [newest]
                newest += 1
            else:
                living = heirs
            assert subsets.gone(owner, heirs) == len(own)
            assert subsets.left == before and set(subsets.owners) == set(living)
    assert sorted(answered) == list(range(samples))
