"""State of a shard's thread, and its current frames.

Compiled; each function here runs in the thread of the shard.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gadei_ps.kernels.compiled import inner
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, FRAME, RECORD, SHARD, STATE
from gadei_ps.server.constants import MAX_LEARNERS, ZERO
from gadei_ps.server.kinds import COUNT
from gadei_ps.server.structs import BOARD, CURRENT_FRAME, KNOWN_RING, PART, RING_LINE
from gadei_ps.server.symbols import get, put, structs, words

SHARDS = np.uint64(layout.offset(CONTROL, "shard"))
SPANS = np.uint64(layout.offset(RECORD, "span"))
SPAN_BYTES = np.uint64(layout.SPAN.itemsize)
SPAN_START = np.uint64(layout.offset(layout.SPAN, "start"))
SPAN_END = np.uint64(layout.offset(layout.SPAN, "end"))
SHARD_BYTES = np.uint64(SHARD.itemsize)
RECORDS = np.uint64(layout.offset(STATE, "record"))
RECORD_BYTES = np.uint64(RECORD.itemsize)
CURSOR = np.uint64(layout.offset(RECORD, "cursor"))
CONSUMED = np.uint64(layout.offset(STATE, "applied"))
PAYLOAD_AT = np.uint64(layout.PAYLOAD_AT)
LINES = np.uint64(layout.offset(BOARD, "ring"))
LINE_BYTES = np.uint64(RING_LINE.itemsize)
BROKEN = np.uint64(layout.offset(RING_LINE, "broken"))
GENERATION = np.uint64(layout.offset(FRAME, "generation"))
SEQUENCE = np.uint64(layout.offset(FRAME, "sequence"))
FRAME_WORDS = FRAME.itemsize // 8
FRAME_AT = np.uint64(layout.offset(PART, "frame"))
CURRENT = np.uint64(layout.offset(PART, "current"))
KNOWN = np.uint64(layout.offset(PART, "known"))

control_at = structs(CONTROL)
state_at = structs(STATE)
frame_at = structs(FRAME)
board_at = structs(BOARD)
part_at = structs(PART)
current_at = structs(CURRENT_FRAME)
known_at = structs(KNOWN_RING)


class Streams(NamedTuple):
    """Addresses of the arrays that a gradient changes, and of the undo log."""

    weights: np.uint64
    slot0: np.uint64
    slot1: np.uint64
    undo: np.uint64


class Shard(NamedTuple):
    """A shard; made by `shard_of`."""

    number: int
    low: int
    high: int
    part: np.ndarray
    """PART, shape (1,)."""
    here: np.uint64
    """Address of the part."""
    c: np.ndarray
    """CONTROL, shape (1,)."""
    state: np.ndarray
    """STATE, shape (1,)."""
    control: np.uint64
    me: np.uint64
    """Address of the shard's struct in control."""
    cursor: np.uint64
    """Address of the cursor of its record."""
    kind: int
    kept: int
    """Optimizer slots: 0, 1 or 2."""
    groups: int
    """Groups of parameters."""
    board: np.ndarray
    """BOARD, shape (1,)."""
    current: np.ndarray
    """CURRENT_FRAME, shape (MAX_LEARNERS,)."""
    known: np.ndarray
    """KNOWN_RING, shape (MAX_LEARNERS,)."""
    at: Streams


@inner
def integer(value: Any) -> int:
    """Convert to a signed word: Numba makes a float of a signed and an unsigned word."""
    return np.int64(value)  # type: ignore[return-value]


@inner
def among(kinds: int, kind: int) -> bool:
    """Return whether a frame's kind, which may be any number, is in a set of kinds.py."""
    return 0 <= kind < COUNT and (kinds >> kind) & 1 != 0


@inner
def shard_of(here: np.uint64) -> Shard:
    """Return the shard of the PART at this address."""
    part = part_at(here)
    p = part[0]
    kept = 0
    if p.slot0 != ZERO:
        kept = 1
    if p.slot1 != ZERO:
        kept = 2
    c = control_at(p.control)
    at = np.uint64(p.index)
    return Shard(
        p.index,
        p.low,
        p.high,
        part,
        here,
        c,
        state_at(p.state),
        p.control,
        p.control + SHARDS + at * SHARD_BYTES,
        p.state + RECORDS + at * RECORD_BYTES + CURSOR,
        integer(c[0].optimizer),
        kept,
        p.groups,
        board_at(p.board),
        current_at(here + CURRENT),
        known_at(here + KNOWN),
        Streams(p.weights, p.slot0, p.slot1, p.undo),
    )


@inner
def consumed_at(s: Shard, shard: int, row: int) -> np.uint64:
    """Return the address of a shard's count of a row's consumed frames (`applied` in state)."""
    state: np.uint64 = s.part[0].state
    return state + CONSUMED + np.uint64(shard * MAX_LEARNERS + row) * np.uint64(8)


@inner
def span_at(s: Shard, which: int) -> np.uint64:
    """Return the address of one of the two spans of the shard's record."""
    return s.cursor - CURSOR + SPANS + np.uint64(which) * SPAN_BYTES


@inner
def shown_address(s: Shard, row: int) -> np.uint64:
    """Return the address of the row's ring in the table of rings; 0 if the row is not served."""
    address: np.uint64 = get(s.part[0].board + LINES + np.uint64(row) * LINE_BYTES)
    return address


@inner
def _broken_at(s: Shard, row: int) -> np.uint64:
    """Return the address of the mark of a ring that is not read any more."""
    at: np.uint64 = s.part[0].board + LINES + np.uint64(row) * LINE_BYTES + BROKEN
    return at


@inner
def is_broken(s: Shard, row: int, generation: np.uint64) -> bool:
    """Return whether the ring is damaged, so that no shard of this process reads it any more."""
    return bool(get(_broken_at(s, row)) == generation)


@inner
def mark_broken(s: Shard, row: int, generation: np.uint64) -> None:
    """Mark a ring whose words are impossible; the manager evicts its learner."""
    put(_broken_at(s, row), generation)


@inner
def slot_of(c: np.ndarray, ring: Any, sequence: np.uint64) -> np.uint64:
    """Return the address of the slot of the frame of this number. ring: RING_LINE or KNOWN_RING."""
    first: np.uint64 = ring.address + ring.slots_at
    size: np.uint64 = ring.slot_bytes
    return first + (sequence % np.uint64(c[0].slots)) * size


@inner
def read_frame(s: Shard, slot: np.uint64) -> np.ndarray:
    """Return the header of the frame in this slot, FRAME of shape (1,), valid until the next call.

    Read once: its learner may write over it at any time, and what is checked is what is used.
    """
    copy = words(s.here + FRAME_AT, FRAME_WORDS)
    for i in range(FRAME_WORDS):
        copy[i] = get(slot + np.uint64(8 * i))
    frame: np.ndarray = frame_at(s.here + FRAME_AT)
    return frame


@inner
def is_there(slot: np.uint64, generation: np.uint64, sequence: np.uint64) -> bool:
    """Return whether the slot still holds this frame: not if its ring was lost meanwhile."""
    return bool(get(slot + GENERATION) == generation and get(slot + SEQUENCE) == sequence)


@inner
def is_lost(s: Shard) -> bool:
    """Return whether the first current frame was lost while it is applied: its ring is zeros."""
    watch = s.current[0].watch
    return bool(watch != ZERO and get(watch) == ZERO)
