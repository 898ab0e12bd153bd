"""The rings as one shard knows them, from one version of the table of rings to the next.

Compiled; runs in the thread of the shard, the only one that uses its KNOWN_RINGs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gadei_ps.kernels.compiled import inner
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, RING
from gadei_ps.server.account import show_all_work
from gadei_ps.server.constants import MAX_LEARNERS, ZERO
from gadei_ps.server.context import Shard, consumed_at, mark_broken, shown_address, slot_of
from gadei_ps.server.order import had_news, reset
from gadei_ps.server.structs import BOARD, PART
from gadei_ps.server.symbols import clock, get, get32, pass_on, release, shard_sleep

ROSTER = np.uint64(layout.offset(CONTROL, "roster"))
ENTRY_BYTES = np.uint64(ENTRY.itemsize)
SERVED = np.uint64(layout.offset(ENTRY, "served"))
BROKEN = np.uint64(layout.offset(ENTRY, "broken"))
HEAD = np.uint64(layout.offset(RING, "head"))
HOLD_AT = np.uint64(layout.offset(RING, "hold"))
ADDRESSES = np.uint64(layout.offset(PART, "address"))
HEADS = np.uint64(layout.offset(PART, "head"))
APART = np.uint64(layout.offset(PART, "apart"))
WATCHED = np.uint64(layout.offset(BOARD, "watched"))

HOLD_S = 0.02  # how long a consistent pull may keep a shard from beginning the next gradient
HOLD_POLL_NS = np.uint64(50_000)


@inner
def entry_at(s: Shard, row: int) -> np.uint64:
    """Return the address of a row of the roster."""
    return s.control + ROSTER + np.uint64(row) * ENTRY_BYTES


@inner
def look_up(s: Shard) -> int:
    """Copy the table of rings to the shard's own memory; return how many rings there are.

    Releases again what is consumed, and shows again what is handed out: the server before may have
    died before it did.
    """
    count = 0
    for row in range(MAX_LEARNERS):
        address = shown_address(s, row)
        if address == ZERO:
            continue
        tail = get(consumed_at(s, s.number, row))
        shown = s.board[0].ring[row]
        ring = s.known[count]
        ring.address = address
        ring.generation = shown.generation
        ring.slot_bytes = shown.slot_bytes
        ring.slots_at = shown.slots_at
        ring.row = row
        ring.line = count
        ring.tail = tail
        ring.held = ZERO
        ring.wants = ZERO
        # A dying manager may have given the row to another learner, which the manager of this
        # process may not know yet. Then `applied` is that learner's.
        if get(entry_at(s, row) + SERVED) != ring.generation:  # SYNC POINT: served
            continue
        # The ring was forgotten meanwhile: a newer table will show it.
        if shown_address(s, row) != address:
            continue
        if get(entry_at(s, row) + BROKEN) == ring.generation:  # as the server before has found
            mark_broken(s, row, ring.generation)
        s.part[0].address[count] = address
        s.part[0].head[count] = tail
        release(address, np.uint64(s.number), tail)
        if s.number == 0 and s.c[0].roster[row].drained == 0:
            show_all_work(s.c, row, address)
        count += 1
    reset(s, count)
    return count


@inner
def oldest_slot(s: Shard, ring: Any) -> np.uint64:
    """Return the address of the oldest frame of a ring. Not from the table, which may be newer."""
    return slot_of(s.c, ring, ring.tail)


@inner
def has_news(s: Shard, ring: Any) -> bool:
    """Return whether the learner has published since the last look; count this as a look."""
    head = get(ring.address + HEAD)  # SYNC POINT: frame
    news = head != s.part[0].head[ring.line]
    s.part[0].head[ring.line] = head
    return bool(news)


@inner
def consume(s: Shard, ring: Any, tail: np.uint64) -> None:
    """Release the slots of the frames below `tail`: the learner may fill them."""
    ring.tail = tail
    s.part[0].head[ring.line] = tail
    release(ring.address, np.uint64(s.number), tail)


@inner
def consume_quietly(s: Shard, ring: Any, tail: np.uint64) -> None:
    """Release the slots without a wake: wake_learner() follows before the next ring."""
    ring.tail = tail
    s.part[0].head[ring.line] = tail
    pass_on(ring.address, np.uint64(s.number), tail)


@inner
def wake_learner(s: Shard, ring: Any) -> None:
    """Wake the learner if it waits for a slot that this shard has freed."""
    release(ring.address, np.uint64(s.number), ring.tail)


@inner
def is_nonsense(s: Shard, head: np.uint64, tail: np.uint64) -> bool:
    """Return whether a ring's head exceeds its slots: its learner overwrote it."""
    return bool(head - tail > np.uint64(s.c[0].slots))


@inner
def sleep(s: Shard, watched: int, bell_seen: np.uint32, timeout_ns: np.uint64) -> None:
    """Sleep until a head of the first `watched` rings moves, the bell rings or the time is up."""
    for i in range(watched):
        ring = s.known[i]
        at = s.part[0].board + WATCHED + np.uint64(8 * ring.row)
        # Before the look at its head.
        s.part[0].apart[i] = get(at) == ring.generation  # SYNC POINT: watched
    shard_sleep(
        s.control,
        np.uint64(s.number),
        s.here + ADDRESSES,
        s.here + HEADS,
        s.here + APART,
        np.uint64(watched),
        bell_seen,
        timeout_ns,
    )


@inner
def wait_for_pulls(s: Shard, looks: int, bell_seen: np.uint32) -> None:
    """Let each learner that asks for a consistent pull finish it, for a bounded time.

    looks: as chosen (order.py).
    """
    for i in range(looks):
        line = s.part[0].looked[i]
        ring = s.known[line]
        at = ring.address + HOLD_AT
        request = get32(at)
        if request == 0 or request == ring.held:
            continue
        had_news(s, line)
        end = clock() + HOLD_S
        while get32(at) == request and clock() < end:
            sleep(s, 0, bell_seen, HOLD_POLL_NS)
        ring.held = np.uint64(request)
