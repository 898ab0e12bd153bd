"""Progress detection: verdicts on made-up observations."""

from __future__ import annotations

from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from gadei_ps.watchdog.liveness import Start, Watch

LIMIT_S = 2.0
STEP_S = 0.25  # exact in binary, so that ages are
Signs = dict[Hashable, Hashable]


def looks(watch: Watch, begin: float, until: float, signs: Signs) -> list[Hashable]:
    """Look again and again at the same counters; return the last verdict."""
    steps = round((until - begin) / STEP_S)
    silent: list[Hashable] = []
    for step in range(steps + 1):
        silent = watch.check(begin + step * STEP_S, signs)
    return silent


def test_the_limit() -> None:
    watch = Watch(LIMIT_S)
    assert looks(watch, 0, LIMIT_S, {"a": 1, "b": 1}) == []
    assert watch.check(LIMIT_S + STEP_S, {"a": 1, "b": 2}) == ["a"]
    assert watch.check(LIMIT_S + 2 * STEP_S, {"a": 1, "b": 2}) == ["a"], "it reports it again"
    assert watch.check(LIMIT_S + 3 * STEP_S, {"a": 2, "b": 2}) == []
    # From then on as from the first look.
    assert looks(watch, LIMIT_S + 3 * STEP_S, 2 * LIMIT_S + 3 * STEP_S, {"a": 2}) == []
    assert watch.check(2 * LIMIT_S + 4 * STEP_S, {"a": 2}) == ["a"]


def test_any_change_will_do() -> None:
    """Compare counters without an order: one may begin again."""
    watch = Watch(LIMIT_S)
    for step in range(100):
        assert watch.check(step * STEP_S, {"a": (step % 2, "x")}) == []


def test_keys_that_vanish_are_forgotten() -> None:
    """A learner that nobody waits for may rest; when it is waited for, its time begins."""
    watch = Watch(LIMIT_S)
    looks(watch, 0, LIMIT_S, {"a": 1, "b": 1})
    assert watch.check(LIMIT_S + STEP_S, {"b": 1}) == ["b"]
    begin = LIMIT_S + 2 * STEP_S
    assert looks(watch, begin, begin + LIMIT_S, {"a": 1}) == []
    assert watch.check(begin + LIMIT_S + STEP_S, {"a": 1}) == ["a"]


def test_a_late_observer_blames_nobody() -> None:
    """Restart all clocks after a suspension, for stopped processes as well."""
    watch = Watch(LIMIT_S)
    looks(watch, 0, LIMIT_S, {"a": 1})
    late = LIMIT_S + watch.late_s + STEP_S
    assert watch.check(late, {"a": 1}) == []
    assert looks(watch, late, late + LIMIT_S, {"a": 1}) == []
    assert watch.check(late + LIMIT_S + STEP_S, {"a": 1}) == ["a"]


def test_just_in_time() -> None:
    watch = Watch(LIMIT_S, late_s=5.0)
    assert watch.check(0, {"a": 1}) == []
    assert watch.check(5.0, {"a": 1}) == ["a"]


def test_nothing_to_look_at() -> None:
    watch = Watch(LIMIT_S)
    for step in range(100):
        assert watch.check(step * STEP_S, {}) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),  # steps since the last look; above 4 it is late
            st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)),
        ),
        max_size=60,
    )
)
def test_against_the_whole_history(story: list[tuple[int, Signs]]) -> None:
    """A member is blamed if it had the same sign at every look for more than the limit."""
    watch = Watch(LIMIT_S)
    history: list[tuple[float, Signs]] = []
    now = 0.0
    for steps, signs in story:
        now += steps * STEP_S
        if history and now - history[-1][0] > watch.late_s:
            history.clear()
        history.append((now, signs))
        silent = watch.check(now, signs)
        expected = set()
        for key, sign in signs.items():
            since = now
            for at, seen in reversed(history):
                if key not in seen or seen[key] != sign:
                    break
                since = at
            if now - since > LIMIT_S:
                expected.add(key)
        assert set(silent) == expected


def hangs(start: Start, begin: float, until: float, *cpu_s: float) -> bool:
    """Look again and again at processes that use no processor time; return the last verdict."""
    steps = round((until - begin) / STEP_S)
    return [start.hangs(begin + step * STEP_S, cpu_s) for step in range(steps + 1)][-1]


def test_a_start_that_computes_may_take_long() -> None:
    start = Start(LIMIT_S)
    for step in range(1000):  # slowly: a busy machine
        assert not start.hangs(step * STEP_S, [step * STEP_S / 10])
    begin = 1000 * STEP_S
    assert not hangs(start, begin, begin + LIMIT_S - STEP_S, 999 * STEP_S / 10)
    assert hangs(start, begin, begin + LIMIT_S, 999 * STEP_S / 10)


def test_a_start_that_only_wakes_and_sleeps_hangs() -> None:
    start = Start(LIMIT_S)
    looks = 0
    while not start.hangs(looks * STEP_S, [looks * STEP_S / 1000]):
        looks += 1
    assert looks * STEP_S <= 2 * LIMIT_S


def test_a_start_without_a_process_hangs() -> None:
    start = Start(LIMIT_S)
    assert not hangs(start, 0, LIMIT_S)
    assert start.hangs(LIMIT_S + STEP_S, [])


def test_a_start_that_gets_no_further_hangs() -> None:
    """Start servers that die and begin again: they use the processor, but make no progress."""
    start = Start(LIMIT_S)
    assert not hangs(start, 0, 0, 5.0)
    for step in range(1, round(LIMIT_S / STEP_S) + 1):
        assert not start.hangs(step * STEP_S, [step % 4])
    assert start.hangs(LIMIT_S + STEP_S, [4.0])
    assert not start.hangs(LIMIT_S + 2 * STEP_S, [1.0, 5.5])


def test_a_start_that_computes_for_ever_hangs() -> None:
    start = Start(LIMIT_S, most_cpu_s=100.0)
    looks = 0
    while not start.hangs(looks * STEP_S, [looks * STEP_S]):
        looks += 1
    assert looks * STEP_S == 100.0 + LIMIT_S + STEP_S
