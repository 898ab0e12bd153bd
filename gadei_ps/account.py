"""What the thread of shard 0 keeps besides its part of the weights: statistics and the work ledger.

It is the only writer of both. Compiled; `c` is CONTROL, shape (1,).
"""

from __future__ import annotations

import numpy as np

from gadei_ps import layout, ledger
from gadei_ps.apply import APPLY, MAX_LEARNERS, ONE, SKIP, ZERO, compiled, frame_at, integer
from gadei_ps.layout import CONTROL, RING, Action
from gadei_ps.places import RING_ADDRESS, RING_GENERATION, TABLE
from gadei_ps.symbols import get32, hand_out, wake

HISTOGRAM = layout.HISTOGRAM
NO_BATCH = np.uint64(layout.NO_BATCH)
DROP = int(Action.DROP)
NO_WORK = int(layout.Work.NONE)
WORK = np.uint64(layout.offset(CONTROL, "work"))
WANTS = np.uint64(layout.offset(RING, "wants"))
WANTS_WORK = np.uint32(layout.WANTS_WORK)
WORK_HEAD = np.uint64(layout.offset(RING, "work_head"))


@compiled
def staleness_bin(staleness: np.uint64) -> int:
    """0 to 15 have a bin each, then one bin for each power of two; the last takes the rest."""
    if staleness < np.uint64(16):
        return integer(staleness)
    bin_ = 16
    rest = staleness >> np.uint64(5)
    while rest > ZERO and bin_ < HISTOGRAM - 1:
        rest >>= ONE
        bin_ += 1
    return bin_


@compiled
def count_applied(c: np.ndarray, row: int, frame: np.ndarray, version: np.uint64) -> None:
    """What the statistics keep of a gradient that is applied. version: before it."""
    e = c[0].roster[row]
    e.applied += ONE
    e.samples += np.uint64(frame[0].samples)
    e.loss = frame[0].loss
    e.started = frame[0].started
    e.finished = frame[0].finished
    e.version = frame[0].version
    e.clock = frame[0].clock
    pulled = frame[0].version
    staleness = version - pulled if version > pulled else ZERO
    e.staleness_sum += staleness
    e.staleness_max = max(e.staleness_max, staleness)
    c[0].roster[row].histogram[staleness_bin(staleness)] += ONE


@compiled
def count_refused(c: np.ndarray, row: int, reason: int) -> None:
    """Counts a bad frame and keeps its reason."""
    c[0].roster[row].refused += ONE
    c[0].roster[row].reason = np.uint32(reason)


@compiled
def settle(c: np.ndarray, row: int, batch: np.uint64) -> None:
    """The frame answers the batch that it names, if it names one."""
    if batch != NO_BATCH and not ledger.settle(c, row, batch):
        c[0].roster[row].unasked += ONE


@compiled
def count_superstep(c: np.ndarray, row: int, slot: np.uint64, version: np.uint64) -> None:
    """What a superstep has done with the oldest frame of this row."""
    action = c[0].superstep_action[row]
    if action == SKIP:
        return
    frame = frame_at(slot)
    if action == APPLY:
        count_applied(c, row, frame, version)
        settle(c, row, frame[0].batch)
    elif action == DROP:
        c[0].roster[row].dropped += ONE
        ledger.requeue(c, row, frame[0].batch)
    else:
        count_refused(c, row, integer(c[0].superstep_reason[row]))
        settle(c, row, frame[0].batch)


@compiled
def top_up(c: np.ndarray, row: int, ring: np.uint64) -> None:
    """Hands out batches until the learner holds as many as it may."""
    if not get32(ring + WANTS) & WANTS_WORK:
        return  # it has data of its own, or only reads
    missing = integer(c[0].ahead) - ledger.held(c, row)
    for _ in range(missing):
        batch = ledger.assign(c, row)
        if batch == NO_BATCH:
            break
        hand_out(ring, batch)


@compiled
def top_up_all(c: np.ndarray, table: np.ndarray) -> None:
    """Closes epochs and hands out what can be handed out, to every learner that is there."""
    if get32(np.uint64(c.ctypes.data) + WORK) == NO_WORK:  # SYNC POINT: work
        return
    changed = ledger.close_epochs(c)
    for row in range(MAX_LEARNERS):
        ring = table[row * TABLE + RING_ADDRESS]
        if ring != ZERO and c[0].roster[row].wanted == table[row * TABLE + RING_GENERATION]:
            top_up(c, row, ring)
            if changed:
                wake(ring + WORK_HEAD)


@compiled
def depart(c: np.ndarray, row: int) -> None:
    """A learner is gone and its ring is empty; its unanswered batches go to others."""
    ledger.requeue_all(c, row)
    e = c[0].roster[row]
    c[0].past_applied += e.applied
    c[0].past_dropped += e.dropped
    c[0].past_refused += e.refused
    c[0].past_samples += e.samples
    e.applied = ZERO
    e.dropped = ZERO
    e.refused = ZERO
    e.samples = ZERO
    e.drained = np.uint32(1)
