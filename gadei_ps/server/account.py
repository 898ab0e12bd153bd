"""What the thread of shard 0 keeps besides its part of the weights: statistics and the work ledger.

It is the only writer of both. What belongs together is changed in one transaction (journal.py), so
that a gradient is counted, and the batch that it answers settled, exactly once whoever is killed.
Compiled; `c` is CONTROL, shape (1,).
"""

from __future__ import annotations

import math

import numpy as np

from gadei_ps.kernels.compiled import compiled
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, RECORD, RING, STATE, Action, FrameKind, Reason
from gadei_ps.server import ledger
from gadei_ps.server.apply import (
    APPLY,
    MAX_LEARNERS,
    ONE,
    SKIP,
    ZERO,
    Shard,
    frame_at,
    integer,
    slot_of,
)
from gadei_ps.server.journal import Books, forget, remember
from gadei_ps.server.places import (
    RING_ADDRESS,
    RING_GENERATION,
    RING_SLOT_BYTES,
    RING_SLOTS_AT,
    TABLE,
)
from gadei_ps.server.symbols import fence, get, get32, hand_out, put32, wake, words

AHEAD = layout.AHEAD
HISTOGRAM = layout.HISTOGRAM
NO_BATCH = np.uint64(layout.NO_BATCH)
DROP = int(Action.DROP)
REFUSE = int(Action.REFUSE)
GIVEN_UP = int(Reason.GIVEN_UP)
EMPTY = int(FrameKind.EMPTY)
RUNS = np.uint64(layout.RUNS)
NO_WORK = int(layout.Work.NONE)
WORKING = int(layout.Work.WORKING)
WORK = np.uint64(layout.offset(CONTROL, "work"))
WANTS = np.uint64(layout.offset(RING, "wants"))
WANTS_WORK = np.uint32(layout.WANTS_WORK)
WORK_HEAD = np.uint64(layout.offset(RING, "work_head"))
WORK_ITEMS = np.uint64(layout.offset(RING, "work_items"))

# What a transaction remembers: shard 0's part of a learner's entry, and the ledger's head. What
# stands in `requeue` above its count means nothing, so the count alone is enough.
ENTRIES = np.uint64(layout.offset(CONTROL, "roster"))
ENTRY_BYTES = np.uint64(ENTRY.itemsize)
COUNTED = np.uint64(layout.offset(ENTRY, "applied"))
COUNTED_WORDS = (ENTRY.itemsize - layout.offset(ENTRY, "applied")) // 8
LEDGER = np.uint64(layout.offset(CONTROL, "next"))  # what stands before it is the watchdog's
LEDGER_WORDS = (layout.offset(CONTROL, "lease") - layout.offset(CONTROL, "next")) // 8
BOOKED = np.uint64(layout.offset(STATE, "record") + layout.offset(RECORD, "booked"))
APPLIED = np.uint64(layout.offset(STATE, "applied"))


@compiled
def books(s: Shard) -> Books:
    """Where shard 0 keeps them."""
    return Books(s.control, np.uint64(s.state.ctypes.data))


@compiled
def open_books(s: Shard, row: int) -> Books:
    """Begins a transaction on a learner's entry and the ledger; forget() ends it."""
    b = books(s)
    remember(b, False, ENTRIES + np.uint64(row) * ENTRY_BYTES + COUNTED, COUNTED_WORDS)
    remember(b, False, LEDGER, LEDGER_WORDS)
    return b


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


@compiled
def note_run(s: Shard, row: int, sequence: np.uint64, frame: np.ndarray, action: int) -> None:
    """Keeps the times of an iteration for whoever records them (gadei-ps trace).

    Outside the transactions: a server that dies in between costs a record no more than one line.
    """
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


@compiled
def count_refused(c: np.ndarray, row: int, reason: int) -> None:
    """Counts a bad frame and keeps its reason."""
    c[0].roster[row].refused += ONE
    c[0].roster[row].reason = np.uint32(reason)


@compiled
def count_dropped(c: np.ndarray, row: int, batch: np.uint64) -> None:
    """Counts a gradient that is not applied; its batch is handed out again."""
    c[0].roster[row].dropped += ONE
    ledger.requeue(c, row, batch)


@compiled
def settle(c: np.ndarray, row: int, batch: np.uint64) -> None:
    """The frame answers the batch that it names, if it names one."""
    if batch != NO_BATCH and not ledger.settle(c, row, batch):
        c[0].roster[row].unasked += ONE


@compiled
def hand_out_more(c: np.ndarray, row: int) -> None:
    """Puts batches into the learner's entry until it holds as many as it may."""
    missing = integer(c[0].ahead) - ledger.held(c, row)
    for _ in range(missing):
        batch = ledger.assign(c, row)
        if batch == NO_BATCH:
            break
        e = c[0].roster[row]
        c[0].roster[row].items[e.handed % np.uint64(AHEAD)] = batch
        e.handed += ONE


@compiled
def takes_work(c: np.ndarray, row: int, ring: np.uint64, generation: np.uint64) -> bool:
    """Whether there is work, and the learner is there and asks for it."""
    return bool(
        get32(np.uint64(c.ctypes.data) + WORK) == WORKING  # SYNC POINT: work
        and c[0].roster[row].wanted == generation
        and get32(ring + WANTS) & WANTS_WORK
    )


@compiled
def show_work(c: np.ndarray, row: int, ring: np.uint64, shown: np.uint64) -> None:
    """Copies batches from number `shown` on from the learner's entry into its ring."""
    e = c[0].roster[row]
    while shown < e.handed:
        hand_out(ring, shown, c[0].roster[row].items[shown % np.uint64(AHEAD)])
        shown += ONE


@compiled
def show_all_work(c: np.ndarray, row: int, ring: np.uint64) -> None:
    """Makes the ring's copy equal to the entry, whatever a server that died has done of it."""
    e = c[0].roster[row]
    items = words(ring + WORK_ITEMS, AHEAD)
    for i in range(AHEAD):
        items[i] = c[0].roster[row].items[i]
    fence()
    put32(ring + WORK_HEAD, np.uint32(e.handed))
    wake(ring + WORK_HEAD)


@compiled
def book_arrival(s: Shard, row: int, frame: np.ndarray, version: np.uint64, more: bool) -> None:
    """Counts the gradient in hand and settles its batch; hands out the next one if `more`."""
    b = open_books(s, row)
    remember(b, True, BOOKED, 1)
    count_applied(s.c, row, frame, version)
    settle(s.c, row, frame[0].batch)
    if more:
        hand_out_more(s.c, row)
    s.state[0].record[0].booked = ONE
    forget(b)


@compiled
def book_refusal(
    s: Shard, row: int, reason: int, batch: np.uint64, upto: np.uint64, more: bool
) -> None:
    """A frame is consumed without being applied, by shard 0: counts it and answers its batch."""
    b = open_books(s, row)
    remember(b, True, APPLIED + np.uint64(8 * row), 1)
    if reason == GIVEN_UP:
        count_dropped(s.c, row, batch)
    else:
        count_refused(s.c, row, reason)
        settle(s.c, row, batch)
    if more:
        hand_out_more(s.c, row)
    s.state[0].applied[0, row] = upto
    forget(b)


@compiled
def book_superstep(s: Shard, table: np.ndarray, version: np.uint64) -> None:
    """Does for each row what the superstep in hand has done with its oldest frame."""
    record = s.state[0].record[0]
    for row in range(integer(record.booked), MAX_LEARNERS):
        if s.c[0].superstep_action[row] == SKIP:
            continue
        b = open_books(s, row)
        remember(b, True, BOOKED, 1)
        slot = slot_of(
            s.c,
            table[row * TABLE + RING_ADDRESS],
            table[row * TABLE + RING_SLOTS_AT],
            table[row * TABLE + RING_SLOT_BYTES],
            s.c[0].superstep_upto[row] - ONE,
        )
        _count_superstep(s.c, row, slot, version)
        record.booked = np.uint64(row + 1)
        forget(b)
        sequence = s.c[0].superstep_upto[row] - ONE
        note_run(s, row, sequence, frame_at(slot), s.c[0].superstep_action[row])


@compiled
def _count_superstep(c: np.ndarray, row: int, slot: np.uint64, version: np.uint64) -> None:
    action = c[0].superstep_action[row]
    frame = frame_at(slot)
    if action == APPLY:
        count_applied(c, row, frame, version)
        settle(c, row, frame[0].batch)
    elif action == DROP:
        count_dropped(c, row, frame[0].batch)
    else:
        count_refused(c, row, integer(c[0].superstep_reason[row]))
        settle(c, row, frame[0].batch)


@compiled
def top_up_all(s: Shard, table: np.ndarray) -> None:
    """Closes epochs and hands out what can be handed out, to every learner that is there."""
    c = s.c
    if get32(s.control + WORK) == NO_WORK:  # SYNC POINT: work
        return
    changed = ledger.close_epochs(c)
    for row in range(MAX_LEARNERS):
        ring = get(np.uint64(table.ctypes.data) + np.uint64(8 * (row * TABLE + RING_ADDRESS)))
        if ring == ZERO:
            continue
        if (
            takes_work(c, row, ring, table[row * TABLE + RING_GENERATION])
            and ledger.held(c, row) < integer(c[0].ahead)
            and ledger.left(c)
        ):
            shown = c[0].roster[row].handed
            b = open_books(s, row)
            hand_out_more(c, row)
            forget(b)
            show_work(c, row, ring, shown)
        if changed:
            wake(ring + WORK_HEAD)


@compiled
def depart(s: Shard, row: int) -> None:
    """A learner is gone and its ring is empty; its unanswered batches go to others."""
    c = s.c
    b = open_books(s, row)
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
    forget(b)
    e.drained = np.uint32(
        1
    )  # last, and for good: the manager lets the ring go as soon as it sees it
