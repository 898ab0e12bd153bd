"""Sets of whole numbers, beside plain sets."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.groups.ranges import Ranges

quick = settings(max_examples=40, deadline=None)


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
