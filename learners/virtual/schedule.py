"""Schedule of the stages of a pipeline, as learners/virtual/stages.py has it, in virtual time.

s_local + 1 mini-batches are in flight. A stage computes one pass at a time and prefers a waiting
backward pass; the last stage computes both passes of a mini-batch at once. The learner's own thread
copies the weights before a mini-batch enters, and steps the optimizer when the oldest one has
ended.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

ENOUGH = 64  # mini-batches in flight; with more, no stage waits less


@dataclass(frozen=True)
class Pass:
    """One pass of a stage; begin and end in ns."""

    stage: int
    backward: bool
    mini_batch: int
    begin: int
    end: int


def run(
    stages: Sequence[tuple[int, int]], in_flight: int, copy: int, step: int, mini_batches: int
) -> list[Pass]:
    """Return all passes of the first mini-batches, in the order in which they end.

    stages: forward and backward, ns. copy, step: what the learner's thread needs for each, ns.
    """
    last = len(stages) - 1
    forward: list[deque[int]] = [deque() for _ in stages]
    backward: list[deque[int]] = [deque() for _ in stages]
    idle = [True] * len(stages)
    entered = ended = 0
    done: set[int] = set()
    busy = False  # the learner's thread
    now, order = 0, 0
    events: list[tuple[int, int, Pass | None]] = []  # None: of the learner's thread
    found: list[Pass] = []

    def begin(ns: int, what: tuple[int, bool, int] | None) -> None:
        nonlocal order
        order += 1
        one = None if what is None else Pass(*what, now, now + ns)
        heapq.heappush(events, (now + ns, order, one))

    def end(one: Pass | None) -> None:
        nonlocal busy, entered, ended
        if one is None:
            busy = False
            if steps:
                ended += 1
            else:
                forward[0].append(entered)
                entered += 1
            return
        found.append(one)
        idle[one.stage] = True
        if not one.backward:
            ready = backward[last] if one.stage == last else forward[one.stage + 1]
            ready.append(one.mini_batch)
        elif one.stage:
            backward[one.stage - 1].append(one.mini_batch)
        else:
            done.add(one.mini_batch)

    steps = False
    while True:
        if not busy and ended < mini_batches:
            steps = entered - ended == in_flight or entered == mini_batches
            if not steps or ended in done:
                busy = True
                begin(step if steps else copy, None)
        for stage, times in enumerate(stages):
            if idle[stage] and (backward[stage] or forward[stage]):
                idle[stage] = False
                back = bool(backward[stage])
                number = (backward if back else forward)[stage].popleft()
                begin(times[back], (stage, back, number))
        if not events:
            return found
        now = events[0][0]
        while events and events[0][0] == now:
            end(heapq.heappop(events)[2])


def pace(stages: Sequence[tuple[int, int]], in_flight: int, copy: int, step: int) -> float:
    """Return ns from one mini-batch to the next, once the pipeline is full."""
    wave = min(in_flight, ENOUGH)
    rounds = 4 * len(stages) + 4
    passes = run(stages, wave, copy, step, 2 * rounds * wave + 4 * len(stages))
    ends = [one.end for one in passes if one.backward and one.stage == 0]
    first = rounds * wave
    return (ends[first + (rounds - 2) * wave] - ends[first]) / ((rounds - 2) * wave)


def filling(stages: Sequence[tuple[int, int]], copy: int, step: int, share: float) -> int | None:
    """Return the fewest mini-batches in flight that keep the slowest stage busy for this share of
    time.

    None if no number does.
    """
    slowest = max(map(sum, stages))

    def is_full(in_flight: int) -> bool:
        return slowest >= share * pace(stages, in_flight, copy, step)

    if not is_full(ENOUGH):
        return None
    return 1 + bisect.bisect_left(range(1, ENOUGH), True, key=is_full)
