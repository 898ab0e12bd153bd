"""Frames that wait for a superstep: the synchronization model chooses, the shards apply the mean.

    begin -> apply the mean -> account for each row -> finish -> release

The manager has checked the frames (driver.py). Compiled; runs in the thread of the shard.
"""

from __future__ import annotations

import numpy as np

from gadei_ps.kernels import cpu
from gadei_ps.kernels.compiled import inner
from gadei_ps.server.account import account_superstep
from gadei_ps.server.apply import apply_frames
from gadei_ps.server.chunks import Walk
from gadei_ps.server.constants import APPLY, MAX_LEARNERS, ONE, SKIP, ZERO
from gadei_ps.server.context import Shard, integer, is_there, read_frame
from gadei_ps.server.frames import are_scales, take
from gadei_ps.server.known import consume, oldest_slot
from gadei_ps.server.record import Entry, begin, finish


@inner
def apply_superstep(s: Shard, count: int, number: np.uint64) -> None:
    """Apply the mean of the gradients that the sync model has chosen; consume the others."""
    record = s.state[0].record[s.number]
    members = 0
    for group in range(s.groups):
        record.rate[group] = 0.0
    record.momentum = 0.0
    scales = 0
    for i in range(count):
        ring = s.known[i]
        if s.c[0].superstep_action[ring.row] == APPLY:
            slot = oldest_slot(s, ring)
            frame = read_frame(s, slot)
            take(s, members, slot, frame)
            # Since the manager has checked it, the learner may have written over it.
            if are_scales(frame, s.groups) and is_there(slot, ring.generation, ring.tail):
                for group in range(s.groups):
                    record.rate[group] += frame[0].rate_scale[group]
                record.momentum += frame[0].momentum  # NaN if one of them leaves it to the job
                scales += 1
            members += 1
    record.staleness = ZERO  # all of them have the same weights
    steps = integer(record.steps)
    record.momentum = record.momentum / scales if scales > 0 else np.nan
    for group in range(s.groups):
        mean = record.rate[group] / max(scales, 1)
        record.rate[group] = cpu.learning_rate(s.c[0].hyper[group], steps) * mean
    version = record.gradients
    after = s.state[0].record[s.number].steps
    if members > 0:
        after = s.current[0].next_step if members == 1 else after + ONE
    begin(s, Entry(MAX_LEARNERS, ZERO, number, version, members, after))
    if members > 0:
        apply_frames(s, Walk(members, 0, s.low))
    if s.number == 0:
        account_superstep(s, version)
    finish(s)
    for i in range(count):
        # Not by superstep_action: the manager may be writing the next superstep already.
        ring = s.known[i]
        tail = s.state[0].applied[s.number, ring.row]
        if tail != ring.tail:
            consume(s, ring, tail)


@inner
def all_known(s: Shard, count: int) -> bool:
    """Return whether the rings of the published superstep are mapped.

    After a failover the manager may have to map one yet, of a learner that came just before.
    """
    missing = 0
    for row in range(MAX_LEARNERS):
        missing += s.c[0].superstep_action[row] != SKIP
    for i in range(count):
        ring = s.known[i]
        same = ring.generation == s.c[0].roster[ring.row].generation
        missing -= same and s.c[0].superstep_action[ring.row] != SKIP
    return missing == 0
