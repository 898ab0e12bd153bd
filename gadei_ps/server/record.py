"""A shard's record of the gradient that it applies, from which its successor finishes it once.

    begin     which frame, which step, which rates      then cursor = 0
    chunks    where they belong -> spans
              old weights and slots -> undo log         then cursor = chunk << 1 | 1
              update                                                      (chunks.py)
    note_torn  whether the frame was there to the end -> torn
    unlock                                                   cursor = ALL_APPLIED
    account   shard 0: statistics, batch ledger         then accounted       (account.py)
    finish    consumed, steps, version: absolute values then cursor = IDLE
    release   the ring's tail                                SYNC POINT: slot

Each `then` is a release store that no store crosses in the order of this thread: `put`, an opaque
call, or for each chunk `mark`. recover.py reads backwards what a dead server left behind.
Compiled; runs in the thread of the shard.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gadei_ps.kernels.compiled import inner
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, SHARD
from gadei_ps.server.constants import ALL_APPLIED, IDLE, MAX_LEARNERS, ONE, SKIP, ZERO
from gadei_ps.server.context import Shard, span_at
from gadei_ps.server.symbols import fence, get, mark, put

SEQUENCE = np.uint64(layout.offset(SHARD, "sequence"))
VERSION = np.uint64(layout.offset(CONTROL, "version"))


class Entry(NamedTuple):
    """Gradient that is about to be applied: a frame of a ring, or the mean of a superstep."""

    ring: int
    """Row of the ring; MAX_LEARNERS for a superstep."""
    generation: np.uint64
    """Generation of the ring."""
    sequence: np.uint64
    """Sequence of the frame, or the number of the superstep."""
    version: np.uint64
    """Version of the weights before it."""
    applies: int
    """Number of its frames that are applied."""
    next_step: np.uint64
    """Optimizer steps finished after it."""


@inner
def begin(s: Shard, entry: Entry) -> None:
    """Write down what is about to be applied. Its rates are in the record already."""
    record = s.state[0].record[s.number]
    record.ring = np.uint64(entry.ring)
    record.generation = entry.generation
    record.sequence = entry.sequence
    record.step = record.steps
    record.version = entry.version
    record.applies = np.uint64(entry.applies)
    record.next_step = entry.next_step
    record.accounted = ZERO
    record.tear = record.torn
    put(span_at(s, 0), IDLE)
    put(span_at(s, 1), IDLE)
    put(s.cursor, ZERO)


@inner
def note_torn(s: Shard, frames: int) -> None:
    """Note the number of current frames that could not be read to their end. Idempotent."""
    record = s.state[0].record[s.number]
    record.torn = record.tear + np.uint64(frames)


@inner
def is_torn(s: Shard) -> bool:
    """Return whether a current frame is noted as torn."""
    record = s.state[0].record[s.number]
    return bool(record.torn != record.tear)


@inner
def lock(s: Shard) -> None:
    """Make the sequence lock odd: weights are about to change."""
    word = s.me + SEQUENCE
    put(word, get(word) | ONE)
    fence()  # no weight is written before the lock is seen to be odd


@inner
def unlock(s: Shard) -> None:
    """Make the sequence lock even: all of the gradient is in the weights."""
    mark(s.cursor, ALL_APPLIED)
    word = s.me + SEQUENCE
    put(word, (get(word) | ONE) + ONE)  # SYNC POINT: chunk of weights


@inner
def count_finished(s: Shard) -> None:
    """Count what the shard has finished, including the current work."""
    record = s.state[0].record[s.number]
    record.gradients = record.version + record.applies
    record.steps = record.next_step


@inner
def finish(s: Shard) -> None:
    """Make the applied gradient count: stores absolute values only, so that twice is once."""
    record = s.state[0].record[s.number]
    fence()  # a process that sees the sequence below as applied also sees the weights
    if s.number == 0:
        put(s.control + VERSION, record.version + record.applies)  # SYNC POINT: applied
    if record.ring < np.uint64(MAX_LEARNERS):
        s.state[0].applied[s.number, record.ring] = record.sequence + ONE
    else:
        for row in range(MAX_LEARNERS):
            if s.c[0].superstep_action[row] != SKIP:
                s.state[0].applied[s.number, row] = s.c[0].superstep_upto[row]
        fence()  # the manager continues from `applied` as soon as it sees this
        record.supersteps = record.sequence
    count_finished(s)
    fence()
    put(s.cursor, IDLE)
