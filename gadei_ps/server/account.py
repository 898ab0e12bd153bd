"""The accounts of shard 0: statistics and the work ledger, changed in transactions.

The thread of shard 0 is the only writer of both. What belongs together is changed in one
transaction (journal.py), so that each frame is counted, and the batch that it answers settled,
exactly once whichever process is killed. Compiled; `c` is CONTROL, shape (1,).

    outcome      of a frame: _account, the only place where a frame is counted. Its times are noted
                 beside that, by the same functions but outside the transaction
    work         batches handed out: into the learner's entry within a transaction, into its ring
                 after that
    departure    a learner is gone
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gadei_ps.kernels.compiled import inner
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, RECORD, RING, STATE
from gadei_ps.server import ledger
from gadei_ps.server.constants import (
    ABANDONED,
    AHEAD,
    APPLY,
    DROP,
    MAX_LEARNERS,
    NO_BATCH,
    NO_WORK,
    OK,
    ONE,
    REFUSE,
    SKIP,
    TORN,
    WORKING,
    ZERO,
)
from gadei_ps.server.context import (
    CONSUMED,
    FRAME_AT,
    Shard,
    frame_at,
    integer,
    is_there,
    read_frame,
    shown_address,
    slot_of,
)
from gadei_ps.server.journal import Segments, commit, log_words
from gadei_ps.server.statistics import (
    ENTRIES,
    ENTRY_BYTES,
    count_applied,
    count_dropped,
    count_past,
    count_refused,
    note_run,
)
from gadei_ps.server.symbols import address, fence, get32, hand_out, put32, wake, words

WORK = np.uint64(layout.offset(CONTROL, "work"))
WANTS = np.uint64(layout.offset(RING, "wants"))
WANTS_WORK = np.uint32(layout.WANTS_WORK)
WORK_HEAD = np.uint64(layout.offset(RING, "work_head"))
WORK_ITEMS = np.uint64(layout.offset(RING, "work_items"))

# What a transaction remembers: shard 0's part of a learner's entry, and the ledger's head. What
# stands in `requeue` above its count means nothing, so the count alone is enough.
COUNTED = np.uint64(layout.offset(ENTRY, "applied"))
COUNTED_WORDS = (ENTRY.itemsize - layout.offset(ENTRY, "applied")) // 8
LEDGER = np.uint64(layout.offset(CONTROL, "next"))  # what stands before it is the watchdog's
LEDGER_WORDS = (layout.offset(CONTROL, "lease") - layout.offset(CONTROL, "next")) // 8
ACCOUNTED = np.uint64(layout.offset(STATE, "record") + layout.offset(RECORD, "accounted"))


class Outcome(NamedTuple):
    """Outcome of a frame."""

    row: int
    action: int
    """APPLY, DROP or REFUSE."""
    reason: int
    """Reason of a refusal."""
    batch: np.uint64
    """Batch that the frame answers, or NO_BATCH."""


@inner
def segments_of(s: Shard) -> Segments:
    """Return the segments that transactions change."""
    return Segments(s.control, s.part[0].state)


@inner
def _begin_transaction(s: Shard, row: int) -> Segments:
    """Begin a transaction on a learner's entry and the ledger; commit() ends it."""
    b = segments_of(s)
    log_words(b, False, ENTRIES + np.uint64(row) * ENTRY_BYTES + COUNTED, COUNTED_WORDS)
    log_words(b, False, LEDGER, LEDGER_WORDS)
    return b


# -- outcome --------------------------------------------------------------------------------------


@inner
def _account(c: np.ndarray, outcome: Outcome, frame: np.ndarray, version: np.uint64) -> None:
    """Enter a frame into the statistics and the ledger.

    frame, version: its header, FRAME of shape (1,), and the version of the weights before it, if
    it is applied.
    """
    row = outcome.row
    if outcome.action == APPLY:
        count_applied(c, row, frame, version)
        ledger.answer(c, row, outcome.batch)
    elif outcome.action == DROP:
        count_dropped(c, row)
        ledger.requeue(c, row, outcome.batch)
    else:
        count_refused(c, row, outcome.reason)
        ledger.answer(c, row, outcome.batch)


@inner
def account_arrival(
    s: Shard,
    row: int,
    sequence: np.uint64,
    frame: np.ndarray,
    version: np.uint64,
    torn: bool,
    more: bool,
) -> None:
    """Record the current gradient; hand out the next batches if `more`.

    frame: its header, FRAME of shape (1,). torn: it could not be read to its end; then nothing is
    believed of the header, and its batch goes to another learner. Its times come after the
    transaction: if the server dies in between, the next one finds the gradient accounted for and
    does not note them.
    """
    b = _begin_transaction(s, row)
    log_words(b, True, ACCOUNTED, 1)
    if torn:
        _account(s.c, Outcome(row, REFUSE, TORN, NO_BATCH), frame, version)
    else:
        _account(s.c, Outcome(row, APPLY, 0, frame[0].batch), frame, version)
    if more:
        ledger.hand_out_more(s.c, row)
    s.state[0].record[0].accounted = ONE
    commit(b)
    note_run(s, row, sequence, frame, REFUSE if torn else APPLY)


@inner
def account_refusal(
    s: Shard, row: int, reason: int, header: np.uint64, upto: np.uint64, more: bool
) -> None:
    """Record a frame that is consumed without being applied. Frames below `upto` are consumed.

    header: address of its header; 0 if there is no frame. Its times come first, because after the
    transaction it counts as consumed.
    """
    action = DROP if reason == ABANDONED else REFUSE
    batch = NO_BATCH
    if header != ZERO:
        frame = frame_at(header)
        if frame[0].generation != ZERO:
            batch = frame[0].batch
        note_run(s, row, upto - ONE, frame, action)
    b = _begin_transaction(s, row)
    log_words(b, True, CONSUMED + np.uint64(8 * row), 1)
    _account(s.c, Outcome(row, action, reason, batch), frame_at(s.here + FRAME_AT), ZERO)
    if more:
        ledger.hand_out_more(s.c, row)
    s.state[0].applied[0, row] = upto
    commit(b)


@inner
def account_superstep(s: Shard, version: np.uint64) -> None:
    """Record for each row what the current superstep has done with its oldest frame."""
    record = s.state[0].record[0]
    c = s.c
    for row in range(integer(record.accounted), MAX_LEARNERS):
        action = integer(c[0].superstep_action[row])
        if action == SKIP:
            continue
        b = _begin_transaction(s, row)
        log_words(b, True, ACCOUNTED, 1)
        sequence = c[0].superstep_upto[row] - ONE
        ring = s.board[0].ring[row]
        slot = slot_of(c, ring, sequence)
        frame = read_frame(s, slot)
        reason = integer(c[0].superstep_reason[row])
        batch = frame[0].batch if frame[0].generation != ZERO else NO_BATCH
        if not is_there(slot, ring.generation, sequence) and action != DROP:
            action = REFUSE
            if reason == OK:
                reason, batch = TORN, NO_BATCH
        _account(c, Outcome(row, action, reason, batch), frame, version)
        record.accounted = np.uint64(row + 1)
        commit(b)
        note_run(s, row, sequence, frame, action)


# -- work -----------------------------------------------------------------------------------------


@inner
def takes_work(c: np.ndarray, row: int, ring: np.uint64, generation: np.uint64) -> bool:
    """Return whether there is work, and the learner is attached and asks for it."""
    return bool(
        get32(address(c) + WORK) == WORKING  # SYNC POINT: work
        and c[0].roster[row].wanted == generation
        and get32(ring + WANTS) & WANTS_WORK
    )


@inner
def show_work(c: np.ndarray, row: int, ring: np.uint64, shown: np.uint64) -> None:
    """Copy batches from number `shown` on from the learner's entry into its ring."""
    e = c[0].roster[row]
    while shown < e.handed:
        hand_out(ring, shown, c[0].roster[row].items[shown % np.uint64(AHEAD)])
        shown += ONE


@inner
def show_all_work(c: np.ndarray, row: int, ring: np.uint64) -> None:
    """Make the ring's copy equal to the entry, whatever a dead server has done of that."""
    e = c[0].roster[row]
    items = words(ring + WORK_ITEMS, AHEAD)
    for i in range(AHEAD):
        items[i] = c[0].roster[row].items[i]
    fence()
    put32(ring + WORK_HEAD, np.uint32(e.handed))
    wake(ring + WORK_HEAD)


@inner
def _is_coming(c: np.ndarray, row: int) -> bool:
    """Return whether a learner is attached whose ring the manager has not shown yet."""
    e = c[0].roster[row]
    return bool(e.wanted != ZERO and e.wanted == e.generation and e.retired != e.generation)


@inner
def others_may_get(c: np.ndarray) -> bool:
    """Return whether an answered frame may give batches to learners other than its own.

    True at the end of an epoch, and when a batch came back.
    """
    return bool(c[0].work == WORKING and (c[0].requeued > 0 or not ledger.is_amid_epoch(c)))


@inner
def top_up_all(s: Shard) -> None:
    """Close epochs and hand out what can be handed out, to every learner that is there.

    In the order of rows: a learner waits for those of lower rows whose rings are just being shown.
    Otherwise who gets which batch at first would depend on how quickly that is done.
    """
    c = s.c
    if get32(s.control + WORK) == NO_WORK:  # SYNC POINT: work
        return
    if c[0].owned != ZERO and ledger.is_taken_back(c):
        b = segments_of(s)
        log_words(b, False, LEDGER, LEDGER_WORDS)
        ledger.take_back(c)
        commit(b)
    changed = ledger.close_epochs(c)
    waits = False
    for row in range(MAX_LEARNERS):
        ring = shown_address(s, row)
        if ring == ZERO:
            waits = waits or _is_coming(c, row)
            continue
        if (
            not waits
            and takes_work(c, row, ring, s.board[0].ring[row].generation)
            and ledger.held(c, row) < integer(c[0].ahead)
            and ledger.has_more(c)
        ):
            shown = c[0].roster[row].handed
            b = _begin_transaction(s, row)
            ledger.hand_out_more(c, row)
            commit(b)
            show_work(c, row, ring, shown)
        if changed:
            wake(ring + WORK_HEAD)


# -- departure ------------------------------------------------------------------------------------


@inner
def depart(s: Shard, row: int, broken: bool) -> None:
    """Give the unanswered batches of a learner that has left an empty ring to other learners.

    broken: of its ring nothing more is read; what that may hold counts as one refused gradient.
    """
    b = _begin_transaction(s, row)
    if broken:
        count_refused(s.c, row, TORN)
    ledger.requeue_all(s.c, row)
    count_past(s.c, row)
    commit(b)
    # Last, and for good: the manager lets the ring go as soon as it sees this.
    s.c[0].roster[row].drained = np.uint32(1)
