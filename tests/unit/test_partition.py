"""The partitioner of virtual workers against all cuts and orders of devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.errors import UsageError
from gadei_ps.learners import partition
from gadei_ps.learners.partition import (
    Chain,
    Device,
    Held,
    Link,
    Piece,
    Placed,
    Profile,
    Times,
)

KINDS, MEMORIES = ("slow", "quick"), ("host", "gpu 0", "gpu 1")
PLENTY = 10**9


def memory_of(chain: Chain, a: int, b: int, in_flight: int) -> int:
    """Bytes of a stage, said once more."""
    pieces = chain.pieces[a:b]
    sizes = [*(one.entering for one in chain.pieces), chain.leaving]
    flying = 1 if b == len(chain.pieces) else in_flight
    held = sum(
        one.size for one in chain.held if one.pieces & set(range(a, b)) or one.borders & {a, b}
    )
    return (
        sum(one.weights for one in pieces)  # the learner's own
        + sum(one.weights for one in pieces) * in_flight  # copies
        + sum(one.weights for one in pieces) * in_flight  # gradients
        + sum(one.state + one.fixed for one in pieces)
        + held * flying
        + max(sizes[n] + sizes[n + 1] for n in range(a, b))
    )


def stage_time(profile: Profile, device: Device, before: Device | None, a: int, b: int) -> int:
    its, piece = profile.times[device.kind], profile.chain.pieces[a]
    found = sum(its.forward[a:b]) + sum(its.backward[a:b])
    found += its.stage_forward + its.stage_backward
    if before is not None and before.memory != device.memory:
        ways = [(before.memory, device.memory), (device.memory, before.memory)]
        for way in ways if piece.returns else ways[:1]:
            link = profile.links[way]
            found += link.latency + round(link.byte * piece.entering)
    return found


Order = tuple[int, ...]


def everything(
    profile: Profile, devices: Sequence[Device], in_flight: int
) -> Iterator[tuple[int, list[int], Order, list[int]]]:
    """Every plan that fits: its slowest stage, all stages' times, devices, and ends of stages."""
    count = len(profile.chain.pieces)
    for stages in range(1, min(len(devices), count) + 1):
        for order in itertools.permutations(range(len(devices)), stages):
            for cuts in itertools.combinations(range(1, count), stages - 1):
                bounds = list(itertools.pairwise([0, *cuts, count]))
                if all(
                    memory_of(profile.chain, a, b, in_flight) <= devices[one].limit
                    for one, (a, b) in zip(order, bounds, strict=True)
                ):
                    befores = [None, *(devices[one] for one in order)]
                    times = [
                        stage_time(profile, devices[one], before, a, b)
                        for one, before, (a, b) in zip(order, befores, bounds, strict=False)
                    ]
                    yield max(times), times, order, [b for _, b in bounds]


def oracle(profile: Profile, devices: Sequence[Device], in_flight: int) -> object:
    """The plan by its definition; None if none fits."""
    found = list(everything(profile, devices, in_flight))
    if not found:
        return None
    least = min(slowest for slowest, *_ in found)
    for count in range(len(devices), 0, -1):
        those = [one for one in found if len(one[2]) == count]
        if those and least >= min(slowest for slowest, *_ in those) * partition.WORTH:
            break
    slowest = min(one[0] for one in those)
    those = [one for one in those if one[0] == slowest]

    def rank(one: tuple[int, list[int], Order, list[int]]) -> object:
        _, times, order, ends = one
        return sum(times), [(device, -end) for device, end in zip(order, ends, strict=True)]

    _, times, order, ends = min(those, key=rank)  # type: ignore[arg-type]
    return slowest, times, order, ends


def said(made: list[Placed]) -> object:
    return (
        max(one.total for one in made),
        [one.total for one in made],
        tuple(one.device for one in made),
        [one.end for one in made],
    )


small = st.integers(0, 9)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Profile, list[Device], int]:
    count = draw(st.integers(1, 5))
    numbers = range(count)
    pieces = tuple(
        Piece(n, n + 1, draw(small), draw(small), draw(small), draw(small), draw(st.booleans()))
        for n in numbers
    )
    held = st.builds(
        Held,
        small,
        st.frozensets(st.sampled_from(numbers), max_size=3),
        st.frozensets(st.sampled_from(numbers), max_size=2),
    )
    chain = Chain(pieces, tuple(draw(st.lists(held, max_size=4))), draw(small))
    some = st.lists(small, min_size=count, max_size=count).map(tuple)
    times = {kind: draw(st.builds(Times, some, some, small, small)) for kind in KINDS}
    link = st.builds(Link, small, st.floats(0, 3))
    links = {way: draw(link) for way in itertools.permutations(MEMORIES, 2)}
    limits = st.one_of(st.just(PLENTY), st.integers(1, 150))
    device = st.builds(
        Device, st.just("x"), st.sampled_from(KINDS), st.sampled_from(MEMORIES), limits
    )
    devices = draw(st.lists(device, min_size=1, max_size=3))
    return Profile(chain, times, links), devices, draw(st.integers(1, 4))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_it_is_the_best_of_all_plans(problem: tuple[Profile, list[Device], int]) -> None:
    profile, devices, in_flight = problem
    wanted = oracle(profile, devices, in_flight)
    if wanted is None:
        with pytest.raises(UsageError, match="no plan fits into the memory"):
            partition.plan(*problem)
        return
    made = partition.plan(*problem)
    assert said(made) == wanted
    for one in made:
        needs = memory_of(profile.chain, one.first, one.end, in_flight)
        assert one.memory == needs <= devices[one.device].limit
