"""Counters of each learner's frames. Compiled; only the thread of shard 0 writes.

`c` is CONTROL, `frame` is FRAME, both of shape (1,). The counts are changed in the transactions of
account.py, so that each frame is counted once whichever process is killed.
"""

from __future__ import annotations

import math

import numpy as np

from gadei_ps.kernels.compiled import compiled, inner
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY
from gadei_ps.server.constants import ONE, REFUSE, ZERO
from gadei_ps.server.context import Shard, among, integer
from gadei_ps.server.kinds import EMPTY, WRITES
from gadei_ps.server.symbols import address, doubles, fence, words

HISTOGRAM = layout.HISTOGRAM
RUNS = np.uint64(layout.RUNS)
ENTRIES = np.uint64(layout.offset(CONTROL, "roster"))
ENTRY_BYTES = np.uint64(ENTRY.itemsize)


def _places(dtype: type[np.generic]) -> tuple[tuple[np.uint64, np.uint64], ...]:
    """Return the offsets of the words of PAST of this type, in ENTRY and in CONTROL."""
    return tuple(
        (np.uint64(layout.offset(ENTRY, word)), np.uint64(layout.offset(CONTROL, f"past_{word}")))
        for word in layout.PAST
        if ENTRY[word] == dtype
    )


PAST = _places(np.uint64)
PAST_SUMS = _places(np.float64)
MOST_LOSS = 1e100  # a sum of such losses stays finite


@compiled
def staleness_bin(staleness: np.uint64) -> int:
    """Return the bin: one each for 0 to 15, one for each power of two; the last takes the rest."""
    if staleness < np.uint64(16):
        return integer(staleness)
    bin_ = 16
    rest = staleness >> np.uint64(5)
    while rest > ZERO and bin_ < HISTOGRAM - 1:
        rest >>= ONE
        bin_ += 1
    return bin_


@inner
def count_applied(c: np.ndarray, row: int, frame: np.ndarray, version: np.uint64) -> None:
    """Count a gradient that is applied. version: of the weights, before it."""
    e = c[0].roster[row]
    if among(WRITES, integer(frame[0].kind)):
        return  # not a part of the training
    e.applied += ONE
    e.samples += np.uint64(frame[0].samples)
    e.loss = frame[0].loss
    if abs(frame[0].loss) <= MOST_LOSS:
        e.loss_sum += frame[0].loss
        e.loss_count += ONE
    e.norm = math.sqrt(frame[0].squares)
    e.started = frame[0].started
    e.finished = frame[0].finished
    e.version = frame[0].version
    e.clock = frame[0].clock
    pulled = frame[0].version
    staleness = version - pulled if version > pulled else ZERO
    e.staleness_sum += staleness
    e.staleness_max = max(e.staleness_max, staleness)
    c[0].roster[row].histogram[staleness_bin(staleness)] += ONE


@inner
def count_dropped(c: np.ndarray, row: int) -> None:
    """Count a gradient that the synchronization model drops or its learner abandons."""
    c[0].roster[row].dropped += ONE


@inner
def count_refused(c: np.ndarray, row: int, reason: int) -> None:
    """Count a bad frame and keep its reason."""
    c[0].roster[row].refused += ONE
    c[0].roster[row].reason = np.uint32(reason)


@inner
def count_past(c: np.ndarray, row: int) -> None:
    """Add a learner's counts to those of all learners that have left, and clear them."""
    control = address(c)
    entry = control + ENTRIES + np.uint64(row) * ENTRY_BYTES
    for own, past in PAST:
        counted = words(entry + own, 1)
        words(control + past, 1)[0] += counted[0]
        counted[0] = ZERO
    for own, past in PAST_SUMS:
        added = doubles(entry + own, 1)
        doubles(control + past, 1)[0] += added[0]
        added[0] = 0.0


@inner
def note_run(s: Shard, row: int, sequence: np.uint64, frame: np.ndarray, action: int) -> None:
    """Keep the times of an iteration for `gadei-ps trace`.

    Outside the transactions: a server that dies in between costs a record at most one line. A
    write is not an iteration: it is noted as what a trace leaves out.
    """
    if among(WRITES, integer(frame[0].kind)):
        action = REFUSE
    at = integer(sequence % RUNS)
    s.state[0].runs[row, at].sequence = ZERO
    fence()
    s.state[0].runs[row, at].started = frame[0].started
    s.state[0].runs[row, at].finished = frame[0].finished
    s.state[0].runs[row, at].action = np.uint32(action)
    cut = frame[0].kind == EMPTY and frame[0].blocks == 0
    s.state[0].runs[row, at].censored = np.uint32(1 if cut else 0)
    fence()
    s.state[0].runs[row, at].sequence = sequence + ONE
