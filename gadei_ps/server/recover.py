"""Completion of the work of a server that has died: exactly once, bit for bit.

The thread of each shard does this when it has got the shard's lease, before it serves. It may be
killed itself at any instant: after every step the next one can continue the recovery.
Compiled.
"""

from __future__ import annotations

import numpy as np

from gadei_ps.kernels.compiled import compiled, inner
from gadei_ps.server.account import account_arrival, account_superstep, segments_of
from gadei_ps.server.apply import apply_frames
from gadei_ps.server.chunks import Walk, reopen
from gadei_ps.server.constants import ALL_APPLIED, APPLY, IDLE, MAX_LEARNERS, ONE, SKIP, ZERO
from gadei_ps.server.context import (
    Shard,
    integer,
    is_there,
    read_frame,
    shard_of,
    shown_address,
    slot_of,
)
from gadei_ps.server.frames import take
from gadei_ps.server.journal import roll_back
from gadei_ps.server.record import SEQUENCE, count_finished, finish, is_torn, note_torn
from gadei_ps.server.symbols import address, get, put


@inner
def _is_finished(s: Shard) -> bool:
    """Return whether the current superstep counts already; its actions may be the next one's."""
    record = s.state[0].record[s.number]
    return bool(record.ring == np.uint64(MAX_LEARNERS) and record.supersteps == record.sequence)


@inner
def _needs_no_ring(s: Shard) -> bool:
    """Return whether the current gradient is applied and recorded: its ring may be gone already."""
    record = s.state[0].record[s.number]
    if get(s.cursor) != ALL_APPLIED:
        return False
    if s.number != 0:
        return True
    return bool(record.ring < np.uint64(MAX_LEARNERS) and record.accounted != ZERO)


@compiled
def can_recover(part: np.ndarray) -> int:
    """Return 1 if the rings of the current frames are mapped; the manager may not see them yet."""
    s = shard_of(address(part))
    record = s.state[0].record[s.number]
    if get(s.cursor) == IDLE or _is_finished(s) or _needs_no_ring(s):
        return 1
    for row in range(MAX_LEARNERS):
        if record.ring == np.uint64(row):
            wanted = record.generation
        elif record.ring == np.uint64(MAX_LEARNERS) and s.c[0].superstep_action[row] != SKIP:
            wanted = s.c[0].roster[row].generation
        else:
            continue
        if shown_address(s, row) == ZERO or s.board[0].ring[row].generation != wanted:
            return 0
    return 1


@inner
def _finish_gradient(s: Shard) -> None:
    """Apply the rest of the current gradient or superstep, and record it.

    The open chunk is restored from the record alone. If the ring of a single gradient is damaged,
    that is all: the gradient is torn.
    """
    record = s.state[0].record[s.number]
    alone = record.ring < np.uint64(MAX_LEARNERS)
    position = get(s.cursor)
    first, start = 0, s.low
    if position != ALL_APPLIED and position != ZERO:
        piece = position >> ONE
        first, start = integer(piece), reopen(s, piece, position & ONE != ZERO)
    if not alone:
        members = 0
        for row in range(MAX_LEARNERS):
            if s.c[0].superstep_action[row] == APPLY:
                ring = s.board[0].ring[row]
                slot = slot_of(s.c, ring, s.c[0].superstep_upto[row] - ONE)
                take(s, members, slot, read_frame(s, slot))
                members += 1
        if members > 0 and position != ALL_APPLIED:
            apply_frames(s, Walk(members, first, start))
        if s.number == 0:
            account_superstep(s, record.version)
        return
    row = integer(record.ring)
    ring = s.board[0].ring[row]
    slot = slot_of(s.c, ring, record.sequence)
    frame = read_frame(s, slot)
    lost = not is_there(slot, record.generation, record.sequence)
    if position != ALL_APPLIED:
        if lost:
            note_torn(s, 1)
        else:
            take(s, 0, slot, frame)
            apply_frames(s, Walk(1, first, start))
    if s.number == 0 and record.accounted == ZERO:
        torn = lost or is_torn(s)  # of a header that is lost nothing can be counted
        account_arrival(s, row, record.sequence, frame, record.version, torn, False)


@compiled
def recover(part: np.ndarray) -> int:
    """Finish a dead server's work on this shard; return 1 if a gradient was being applied.

    part: PART, shape (1,). The frame is still in its ring, because its tail moves last. To be
    called when can_recover() is true.
    """
    s = shard_of(address(part))
    if s.number == 0:
        roll_back(segments_of(s))
    in_flight = 0
    if get(s.cursor) != IDLE:
        in_flight = 1
        if not _is_finished(s):
            if not _needs_no_ring(s):
                _finish_gradient(s)
            finish(s)
        else:
            count_finished(s)
            put(s.cursor, IDLE)
    lock = s.me + SEQUENCE
    if get(lock) & ONE:
        put(lock, get(lock) + ONE)
    return in_flight
