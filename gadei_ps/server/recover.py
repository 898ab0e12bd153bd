"""How a server takes over what another one was doing when it died: exactly once, bit for bit.

Done by the thread of each shard when it has got the shard's lease, before it serves. May itself be
killed at any instant: every step leaves what the next one to recover can go on from.
"""

from __future__ import annotations

import numpy as np

from gadei_ps.kernels.compiled import compiled
from gadei_ps.server.account import book_arrival, book_superstep, books
from gadei_ps.server.apply import (
    ALL_APPLIED,
    APPLY,
    IDLE,
    MAX_LEARNERS,
    ONE,
    SEQUENCE,
    SKIP,
    ZERO,
    Shard,
    finish,
    frame_at,
    integer,
    shard_of,
    slot_of,
    take,
)
from gadei_ps.server.journal import roll_back
from gadei_ps.server.places import (
    RING_ADDRESS,
    RING_GENERATION,
    RING_SLOT_BYTES,
    RING_SLOTS_AT,
    TABLE,
    TABLE_AT,
)
from gadei_ps.server.rows import apply_frames
from gadei_ps.server.symbols import get, put, words


@compiled
def _is_finished(s: Shard) -> bool:
    """Whether the superstep in hand counts already; then its actions may be the next one's."""
    record = s.state[0].record[s.number]
    return bool(record.ring == np.uint64(MAX_LEARNERS) and record.supersteps == record.sequence)


@compiled
def _needs_no_ring(s: Shard) -> bool:
    """Whether all of the gradient in hand is applied and booked: its ring may be gone already."""
    record = s.state[0].record[s.number]
    if get(s.cursor) != ALL_APPLIED:
        return False
    if s.number != 0:
        return True
    return bool(record.ring < np.uint64(MAX_LEARNERS) and record.booked != ZERO)


@compiled
def _slot(s: Shard, table: np.ndarray, row: int, sequence: np.uint64) -> np.uint64:
    return slot_of(
        s.c,
        table[row * TABLE + RING_ADDRESS],
        table[row * TABLE + RING_SLOTS_AT],
        table[row * TABLE + RING_SLOT_BYTES],
        sequence,
    )


@compiled
def can_recover(index: int, low: int, high: int, places: np.ndarray) -> int:
    """1 if the rings of what is in hand are mapped; the manager may not have seen them yet."""
    s = shard_of(index, low, high, places)
    table = words(places[TABLE_AT], MAX_LEARNERS * TABLE)
    record = s.state[0].record[index]
    if get(s.cursor) == IDLE or _is_finished(s) or _needs_no_ring(s):
        return 1
    for row in range(MAX_LEARNERS):
        if record.ring == np.uint64(row):
            wanted = record.generation
        elif record.ring == np.uint64(MAX_LEARNERS) and s.c[0].superstep_action[row] != SKIP:
            wanted = s.c[0].roster[row].generation
        else:
            continue
        address = np.uint64(table.ctypes.data) + np.uint64(8 * (row * TABLE + RING_ADDRESS))
        if get(address) == ZERO or table[row * TABLE + RING_GENERATION] != wanted:
            return 0
    return 1


@compiled
def _finish_gradient(s: Shard, table: np.ndarray) -> None:
    """Applies what is left of the gradient or superstep in hand, and counts it."""
    record = s.state[0].record[s.number]
    position = get(s.cursor)
    members = 0
    for row in range(MAX_LEARNERS):
        if record.ring == np.uint64(row):
            sequence = record.sequence
        elif record.ring == np.uint64(MAX_LEARNERS) and s.c[0].superstep_action[row] == APPLY:
            sequence = s.c[0].superstep_upto[row] - ONE
        else:
            continue
        take(s, members, _slot(s, table, row, sequence))
        members += 1
    if members > 0 and position != ALL_APPLIED:
        apply_frames(s, members, integer(position >> ONE), position & ONE != ZERO)
    if s.number == 0:
        if record.ring == np.uint64(MAX_LEARNERS):
            book_superstep(s, table, record.version)
        elif record.booked == ZERO:
            row = integer(record.ring)
            frame = frame_at(_slot(s, table, row, record.sequence))
            book_arrival(s, row, frame, record.version, False)


@compiled
def recover(index: int, low: int, high: int, places: np.ndarray) -> int:
    """Finishes what a server that died was doing to this shard; 1 if a gradient was in hand.

    low, high: the shard's values. The frame is still in its ring, because its tail moves last.
    Call it when can_recover() says so.
    """
    s = shard_of(index, low, high, places)
    table = words(places[TABLE_AT], MAX_LEARNERS * TABLE)
    if index == 0:
        roll_back(books(s))
    in_hand = 0
    if get(s.cursor) != IDLE:
        in_hand = 1
        if not _is_finished(s):
            if not _needs_no_ring(s):
                _finish_gradient(s, table)
            finish(s)
        else:
            record = s.state[0].record[index]
            if record.applies > ZERO:
                record.steps = record.step + ONE
            put(s.cursor, IDLE)
    lock = s.me + SEQUENCE
    if get(lock) & ONE:
        put(lock, get(lock) + ONE)
    return in_hand
