"""Verdicts on learners that hang, are slow or have paused, from made-up observations."""

from __future__ import annotations

from collections.abc import Callable

from gadei_ps.machine import process
from gadei_ps.watchdog.liveness import MOST, HangDetector, Sign

LIMIT_S = 2.0
STEP_S = 0.25  # exact in binary


class Looked:
    """Messages until a learner hangs, and the time of the verdict (s). cpu: its use at a time."""

    def __init__(self, cpu: Callable[[float], float], *, paused: bool = False) -> None:
        now = 0.0
        hung = HangDetector(LIMIT_S, 2 * STEP_S, lambda pid: cpu(now))
        self.warned: list[float] = []
        self.killed = 0.0
        while now < 5 * MOST * LIMIT_S and not self.killed:
            kill, late = hung.check(now, {7: Sign("stands", 1, paused)})
            self.warned += [now for _ in late]
            if kill:
                assert kill == [7]
                self.killed = now
            self.left_s = hung.awaited[7].left_s
            now += STEP_S


def test_who_does_nothing_is_warned_of_once_and_killed() -> None:
    looked = Looked(lambda now: 1.0)
    assert looked.warned == [LIMIT_S / 2]
    assert looked.killed == LIMIT_S + STEP_S


def test_who_computes_has_ten_times_as_long() -> None:
    looked = Looked(lambda now: 0.3 * now)
    assert looked.warned == [LIMIT_S / 2]
    assert looked.killed == MOST * LIMIT_S + STEP_S
    # It has computed for a while, and then hangs.
    assert Looked(lambda now: min(now, 5.0)).killed == 5.0 + LIMIT_S + STEP_S


def test_who_wakes_up_now_and_then_does_not_compute() -> None:
    assert Looked(lambda now: 0.0001 * now).killed == LIMIT_S + STEP_S


def test_who_has_paused_may_rest() -> None:
    assert Looked(lambda now: 1.0, paused=True).killed == MOST * LIMIT_S + STEP_S
    looked = Looked(lambda now: 0.3 * now, paused=True)
    assert (looked.killed, looked.warned) == (0.0, [])


def test_without_a_limit() -> None:
    hung = HangDetector(0.0, 1e9, lambda pid: 0.0)
    for now in (0.0, 1e6):
        assert hung.check(now, {7: Sign("stands", 1, False)}) == ([], [])


def test_a_late_look_begins_anew() -> None:
    """The observer did not run, so perhaps nobody did."""
    hung = HangDetector(LIMIT_S, 1.0, lambda pid: 0.0)
    for now in (0.0, 100.0, 200.0):
        assert hung.check(now, {7: Sign("stands", 1, False)}) == ([], [])


def test_processor_time_of_nobody() -> None:
    before = process.tree_cpu_s(1 << 22)
    assert before == 0.0, "there is no such process"
