"""Frames that are applied as they arrive.

    check the frame -> begin -> apply -> account -> finish -> release

A bad frame is refused instead: counted and released. Of a broken ring no frame is begun: the shards
only come to the same count (settle_broken). Compiled; runs in the thread of the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from gadei_ps.kernels import cpu
from gadei_ps.kernels.compiled import inner
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL
from gadei_ps.server.account import account_arrival, account_refusal, show_work, takes_work
from gadei_ps.server.apply import apply_frames
from gadei_ps.server.chunks import Walk
from gadei_ps.server.constants import OK, ONE, TORN, ZERO
from gadei_ps.server.context import (
    FRAME_AT,
    Shard,
    consumed_at,
    integer,
    is_broken,
    mark_broken,
    read_frame,
    shard_of,
)
from gadei_ps.server.frames import check_frame, take
from gadei_ps.server.known import (
    HEAD,
    consume,
    consume_quietly,
    is_nonsense,
    oldest_slot,
    wake_learner,
)
from gadei_ps.server.record import Entry, begin, finish, is_torn
from gadei_ps.server.symbols import call, get, get32

MODE = np.uint64(layout.offset(CONTROL, "mode"))
SUPERSTEP = np.uint64(layout.offset(CONTROL, "superstep"))
VISIT_BYTES = 1 << 17  # of slots that a shard frees before it wakes their learner


def _arrive(part: int, line: int) -> None:
    """Do what on_arrival() does, as a C function. part: address."""
    s = shard_of(np.uint64(part))
    ring = s.known[line]
    row, tail = ring.row, ring.tail
    head = get(ring.address + HEAD)
    more = s.number == 0 and takes_work(s.c, row, ring.address, ring.generation)
    shown = s.c[0].roster[row].handed
    if is_nonsense(s, head, tail):
        mark_broken(s, row, ring.generation)
        return
    slot = oldest_slot(s, ring)
    frame = read_frame(s, slot)
    header = s.here + FRAME_AT
    reason = check_frame(header, slot, ring.generation, tail, s.part)
    if is_broken(s, row, ring.generation):
        return  # what was read may be zeros
    if reason == OK:
        record = s.state[0].record[s.number]
        # Not the version of the weights: shard 0 may have been faster, and have counted this one.
        version = record.gradients
        steps = integer(record.steps)
        # A learner writes the version that it has pulled, so it may be any.
        record.staleness = version - min(version, frame[0].version)
        record.momentum = frame[0].momentum
        for group in range(s.groups):
            hyper = s.c[0].hyper[group]
            rate = cpu.learning_rate(hyper, steps) * frame[0].rate_scale[group]
            record.rate[group] = cpu.stale_rate(hyper, rate, integer(record.staleness))
        take(s, 0, slot, frame)
        begin(s, Entry(row, ring.generation, tail, version, 1, s.current[0].next_step))
        apply_frames(s, Walk(1, 0, s.low))
        if s.number == 0:
            account_arrival(s, row, tail, frame, version, is_torn(s), more)
        finish(s)
    else:
        _refuse(s, row, reason, header, tail + ONE, more)
    if more:
        show_work(s.c, row, ring.address, shown)
    consume_quietly(s, ring, tail + ONE)


SIGNATURE = types.void(types.uint64, types.int64)


def source(name: str) -> tuple[Any, Callable[..., None]]:
    """Return the source of the unit."""
    return SIGNATURE, _arrive


@inner
def on_arrival(s: Shard, line: int) -> None:
    """Apply, or refuse, the oldest frame of a ring. line: of the ring, in `known`."""
    call(s.part[0].arrive, s.here, line)
    wake_learner(s, s.known[line])


@inner
def on_arrivals(s: Shard, line: int) -> None:
    """Do so with the frames that are there, up to VISIT_BYTES; wake the learner once.

    To wake a learner takes as long as a small gradient does, and one that finds several slots free
    sleeps less often.
    """
    ring = s.known[line]
    most = VISIT_BYTES // integer(ring.slot_bytes)
    while True:
        tail = ring.tail
        call(s.part[0].arrive, s.here, line)
        most -= 1
        if most < 1 or ring.tail == tail or get(ring.address + HEAD) == ring.tail:
            break
    wake_learner(s, ring)


@inner
def _refuse(
    s: Shard, row: int, reason: int, header: np.uint64, upto: np.uint64, more: bool
) -> None:
    """Consume the frames of this row below `upto`. header: of the last one; 0: of none."""
    if s.number == 0:
        account_refusal(s, row, reason, header, upto, more)
    else:
        s.state[0].applied[s.number, row] = upto


@inner
def _most_consumed(s: Shard, row: int) -> np.uint64:
    """Return the number of frames of this row that the furthest shard has consumed."""
    most = ZERO
    for shard in range(s.c[0].shards):
        most = max(most, get(consumed_at(s, shard, row)))  # acquire: its frame's head is read next
    return most


@inner
def settle_broken(s: Shard, line: int) -> bool:
    """Count as consumed what another shard has begun of a broken ring; return whether it had.

    A frame that one shard has applied and another one cannot is torn. line: of the ring, in
    `known`.
    """
    ring = s.known[line]
    row = ring.row
    s.part[0].head[ring.line] = get(ring.address + HEAD)  # it is not a reason to wake up
    most = _most_consumed(s, row)
    if most <= s.state[0].applied[s.number, row]:
        return False
    record = s.state[0].record[s.number]
    missing = most - s.state[0].applied[s.number, row]
    record.torn += missing
    if s.number != 0:
        record.gradients += missing  # shard 0 has applied them; if not, this counts too many
    _refuse(s, row, TORN, ZERO, most, False)
    consume(s, ring, most)
    return True


@inner
def catch_up(s: Shard, count: int, superstep: np.uint64, mode: np.uint32) -> bool:
    """Consume, during a global pause, what another shard has consumed already.

    superstep, mode: that the pass began with. True if there was any, or if one of them is another
    now: what another shard has consumed since, in a superstep perhaps, must not be applied on
    arrival.
    """
    found = False
    for i in range(count):
        ring = s.known[i]
        most = _most_consumed(s, ring.row)
        if most <= s.state[0].applied[s.number, ring.row]:
            continue
        if get32(s.control + MODE) != mode:  # SYNC POINT: mode
            return True
        if get(s.control + SUPERSTEP) != superstep:  # SYNC POINT: superstep
            return True
        if is_broken(s, ring.row, ring.generation):
            settle_broken(s, i)
        else:
            on_arrival(s, i)
        found = True
    return found
