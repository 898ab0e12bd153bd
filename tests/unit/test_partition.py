"""The partitioner of virtual workers against all cuts and orders of devices."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.errors import UsageError
from gadei_ps.learners.virtual import partition, schedule
from gadei_ps.learners.virtual.partition import (
    Activation,
    Chain,
    Device,
    Link,
    Piece,
    PlacedStage,
    Profile,
    Times,
)

KINDS, MEMORIES = ("slow", "quick"), ("host", "gpu 0", "gpu 1")
PLENTY = 10**9


def memory_of(chain: Chain, a: int, b: int, in_flight: int) -> int:
    """Return bytes of a stage, computed independently of the planner."""
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
        + (0 if b == len(chain.pieces) else sizes[b]) * (in_flight - 1)  # gradients that wait
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


def shown(made: list[PlacedStage]) -> object:
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
        Activation,
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
    assert shown(made) == wanted
    for one in made:
        needs = memory_of(profile.chain, one.first, one.end, in_flight)
        assert one.memory == needs <= devices[one.device].limit


def row(times: Sequence[int], *, weights: int = 0, entering: int = 0, quick: int = 1) -> Profile:
    """Return pieces with these times forward, and the same backward; less on the quick kind."""
    pieces = tuple(Piece(n, n + 1, weights, 0, 0, entering, n > 0) for n in range(len(times)))
    some = tuple(times)
    parts = tuple(one // quick for one in some)
    links = {way: Link(5, 1.0) for way in itertools.permutations(MEMORIES, 2)}
    return Profile(
        Chain(pieces, (), 0),
        {"slow": Times(some, some, 0, 0), "quick": Times(parts, parts, 0, 0)},
        links,
    )


def device(kind: str = "slow", memory: str = "host", limit: int = PLENTY) -> Device:
    return Device(f"{memory}:1", kind, memory, limit)


def test_equal_plans_are_told_apart() -> None:
    """Prefer as many layers as possible in the stage before; the device that was named first."""
    made = partition.plan(row([5, 1, 1, 1]), [device(), device(), device()], 4)
    assert [(one.device, one.first, one.end) for one in made] == [(0, 0, 1), (1, 1, 3), (2, 3, 4)]


def test_a_device_that_only_delays_is_left_out() -> None:
    """Check that transfers to it and back take longer than it computes."""
    both = [device("quick"), device("slow", "gpu 0")]
    far = row([100, 100], entering=10**6, quick=2)
    assert [one.device for one in partition.plan(far, both, 4)] == [0]
    # A stage that is slower by less than a hundredth is not a reason.
    near = row([10_000, 20], entering=20)
    assert len(partition.plan(near, [device(), device("slow", "gpu 0")], 4)) == 2


@pytest.mark.parametrize(
    ("limits", "number", "needed", "factor"),
    [((100, 99), 0, 180, "1.80"), ((45, 45), 0, 270, "4.00"), ((90, 170), 1, 180, "1.06")],
)
def test_what_is_lacking_is_said(
    limits: tuple[int, ...], number: int, needed: int, factor: str
) -> None:
    """Find a plan with the memory that the error names, and none with less."""
    chain = row([1, 1, 1], weights=10 << 20).chain  # of 90 MiB each, nine times the weights

    def ask(*limits: int) -> None:
        partition.check_fits(chain.memory(4), [device(limit=one << 20) for one in limits])

    which = (
        f"device {number} (host:1) needs at least {needed}.0 MiB and may have {limits[number]}.0"
    )
    more = f"all devices need {factor} times what they may have; lower s_local"
    with pytest.raises(UsageError, match=f"{re.escape(which)} MiB, or {re.escape(more)}"):
        ask(*limits)
    with pytest.raises(UsageError, match=r"270.0 MiB and may have 9.0 MiB; lower s_local"):
        ask(9)
    enough = list(limits)
    enough[number] = needed
    ask(*enough)
    enough[number] -= 1
    with pytest.raises(UsageError, match="no plan fits"):
        ask(*enough)


# -- the timeline --------------------------------------------------------------------------------

EVEN = [(10, 20)] * 3


@pytest.mark.parametrize("stages", [EVEN, [(30, 5), (10, 20), (1, 40)], [(7, 11)]])
def test_a_stage_prefers_a_backward_pass(stages: list[tuple[int, int]]) -> None:
    """Check that no stage waits where a forward pass begins; the last one computes both at once."""
    passes = schedule.run(stages, 6, 0, 0, 20)
    assert len(passes) == 20 * len(stages) * 2
    by = {(one.stage, one.backward, one.mini_batch): one for one in passes}
    for stage in range(len(stages)):
        own = sorted((one.begin, one.end) for one in passes if one.stage == stage)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
        for number in range(20):
            if stage + 1 < len(stages):
                came = by[stage + 1, True, number].end
                assert by[stage + 1, False, number].begin >= by[stage, False, number].end
            else:
                came = by[stage, False, number].end
                assert by[stage, True, number].begin == came
            waited = range(came, by[stage, True, number].begin)
            assert not any(by[stage, False, other].begin in waited for other in range(20))


def test_no_more_are_in_flight_than_may_be() -> None:
    for in_flight in (1, 2, 5):
        passes = schedule.run(EVEN, in_flight, 3, 4, 20)
        begin = {one.mini_batch: one.begin for one in passes if one.stage == 0 and not one.backward}
        end = {one.mini_batch: one.end for one in passes if one.stage == 0 and one.backward}
        for number in range(20 - in_flight):
            assert begin[number + in_flight] >= end[number] + 3 + 4


def test_the_pace() -> None:
    assert schedule.pace(EVEN, 1, 3, 4) == 97  # all stages in turn, and the learner's thread
    assert schedule.pace(EVEN, 8, 3, 4) == 30  # the slowest stage
    assert schedule.pace([(10, 20), (1, 1)], 8, 30, 40) == 70  # the learner's thread
    assert schedule.filling(EVEN, 0, 0, 0.99) == 3
    assert schedule.filling(EVEN, 30, 40, 0.99) is None
