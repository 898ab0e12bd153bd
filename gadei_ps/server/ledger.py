"""The batch ledger: which learner has which batch, so that each is answered once an epoch.

It lies in the control segment, and the thread of shard 0 is its only writer. A batch is in one of
four states: not yet handed out (`next` and above), in a learner's `outstanding`, in `requeue`
because its learner died or its gradient was dropped, or answered. Nothing counts the answered ones:
an epoch is done when no batch of it is in the other three states. account.py calls these functions
within its transactions, so a server that dies in one of them leaves no trace of it.

Where the job owns a part of the batches (memory/owned.py), what is left of the owned ranges is what
was not handed out yet, in their order, and the watchdog sets which epochs have no more to come.

Compiled. `c` is CONTROL, shape (1,).
"""

from __future__ import annotations

import numpy as np

from gadei_ps.kernels.compiled import compiled, inner
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL
from gadei_ps.server.constants import AHEAD, DONE, MAX_LEARNERS, NO_BATCH, ONE, WORKING, ZERO
from gadei_ps.server.context import integer
from gadei_ps.server.symbols import address, get

EPOCH_AT = np.uint64(32)  # bits of a batch below its epoch: its index
INDEX = np.uint64(2**32 - 1)
OWNED = np.uint64(layout.OWNED)
GIVEN = np.uint64(layout.offset(CONTROL, "owned_given"))
FROM = np.uint64(layout.offset(CONTROL, "owned_from"))
PASSES = np.uint64(layout.offset(CONTROL, "owned_passes"))


@compiled
def held(c: np.ndarray, row: int) -> int:
    """Return the number of batches that the learner has to answer."""
    count = 0
    for i in range(AHEAD):
        if c[0].roster[row].outstanding[i] != NO_BATCH:
            count += 1
    return count


@compiled
def settle(c: np.ndarray, row: int, batch: np.uint64) -> bool:
    """Take the batch from its learner; return False if the learner did not hold it."""
    if batch == NO_BATCH:
        return False
    for i in range(AHEAD):
        if c[0].roster[row].outstanding[i] == batch:
            c[0].roster[row].outstanding[i] = NO_BATCH
            return True
    return False


@inner
def answer(c: np.ndarray, row: int, batch: np.uint64) -> None:
    """Settle the batch that a frame names, if it names one; count one that was not handed out."""
    if batch != NO_BATCH and not settle(c, row, batch):
        c[0].roster[row].unasked += ONE


@compiled
def requeue(c: np.ndarray, row: int, batch: np.uint64) -> bool:
    """Queue the batch again; return False if it was not with this learner."""
    if batch == NO_BATCH:
        return False
    for i in range(AHEAD):
        if c[0].roster[row].outstanding[i] == batch:
            c[0].requeue[c[0].requeued] = batch
            c[0].requeued += ONE
            c[0].roster[row].outstanding[i] = NO_BATCH
            c[0].requeued_total += ONE
            return True
    return False


@compiled
def requeue_all(c: np.ndarray, row: int) -> None:
    """Queue the unanswered batches of a learner that has left."""
    for i in range(AHEAD):
        batch = c[0].roster[row].outstanding[i]
        if batch != NO_BATCH:
            requeue(c, row, batch)


@inner
def pending(c: np.ndarray, epoch: np.uint64) -> bool:
    """Return whether a batch of this epoch is handed out or to be handed out again."""
    for i in range(c[0].requeued):
        if c[0].requeue[i] >> EPOCH_AT == epoch:
            return True
    for row in range(MAX_LEARNERS):
        for i in range(AHEAD):
            batch = c[0].roster[row].outstanding[i]
            if batch != NO_BATCH and batch >> EPOCH_AT == epoch:
                return True
    return False


@inner
def is_taken_back(c: np.ndarray) -> bool:
    """Return whether revoked batches are still here."""
    back = get(address(c) + FROM)  # SYNC POINT: owned ranges
    if c[0].owned_range < back:
        return True
    return bool(c[0].requeued > 0 and back == get(address(c) + GIVEN))


@compiled
def take_back(c: np.ndarray) -> None:
    """Drop revoked batches, even those that learners have returned since. Idempotent."""
    back = get(address(c) + FROM)  # SYNC POINT: owned ranges
    if c[0].owned_range < back:
        c[0].owned_at = ZERO
        c[0].owned_range = back
    if back == get(address(c) + GIVEN):
        c[0].requeued = ZERO


@inner
def is_amid_epoch(c: np.ndarray) -> bool:
    """Return whether the epoch that is being handed out has batches left, and is the only one open.

    For owned batches: whether no epoch may have become done.
    """
    if c[0].owned != ZERO:
        return bool(c[0].epochs_done >= get(address(c) + PASSES))
    return bool(c[0].epochs_done == c[0].next >> EPOCH_AT and (c[0].next & INDEX) != c[0].batches)


@inner
def _is_handed_out(c: np.ndarray, epoch: np.uint64) -> bool:
    """Return whether all batches of this epoch were handed out."""
    if c[0].owned != ZERO:
        return bool(epoch < get(address(c) + PASSES))  # SYNC POINT: owned ranges
    following = c[0].next >> EPOCH_AT
    return bool(epoch < following or (epoch == following and (c[0].next & INDEX) == c[0].batches))


@compiled
def close_epochs(c: np.ndarray) -> bool:
    """Count the epochs that have become done; return whether one has, or all are."""
    changed = False
    while c[0].epochs_done < c[0].epochs and _is_handed_out(c, c[0].epochs_done):
        if pending(c, c[0].epochs_done):
            break
        c[0].epochs_done += ONE
        changed = True
    if c[0].epochs_done == c[0].epochs and c[0].work == WORKING:
        c[0].work = np.uint32(DONE)
        changed = True
    return changed


@inner
def has_more(c: np.ndarray) -> bool:
    """Return whether there is a batch to hand out now."""
    if c[0].work != WORKING:
        return False
    if c[0].owned != ZERO:
        if is_taken_back(c):
            return True  # assign() looks again
        return bool(c[0].requeued > 0 or c[0].owned_range < get(address(c) + GIVEN))
    if c[0].requeued > 0 or (c[0].next & INDEX) != c[0].batches:
        return True
    epoch = (c[0].next >> EPOCH_AT) + ONE
    return bool(epoch < c[0].epochs and c[0].epochs_done + ONE >= epoch)


@inner
def _next_owned(c: np.ndarray) -> np.uint64:
    """Return the next batch of the owned ranges, of which one is left."""
    number = c[0].owned_range
    place = integer(number % OWNED)
    batch = np.uint64(c[0].owned_ranges[place, 0] + c[0].owned_at)
    c[0].owned_at += ONE
    if batch + ONE == c[0].owned_ranges[place, 1]:
        c[0].owned_at = ZERO
        c[0].owned_range = number + ONE
    return batch


@compiled
def assign(c: np.ndarray, row: int) -> np.uint64:
    """Hand the next batch to the learner of this row; NO_BATCH if there is none now.

    At most two epochs are open at once: the last batches of one are awaited while the next begins.
    """
    free = -1
    for i in range(AHEAD):
        if c[0].roster[row].outstanding[i] == NO_BATCH:
            free = i
            break
    if c[0].owned != ZERO:
        take_back(c)
    if free < 0 or not has_more(c):
        return NO_BATCH
    if c[0].requeued > 0:
        batch: np.uint64 = c[0].requeue[c[0].requeued - ONE]
        c[0].roster[row].outstanding[free] = batch
        c[0].requeued -= ONE
        return batch
    if c[0].owned != ZERO:
        owned = _next_owned(c)
        c[0].roster[row].outstanding[free] = owned
        return owned
    batch = c[0].next
    if (batch & INDEX) == c[0].batches:
        batch = ((batch >> EPOCH_AT) + ONE) << EPOCH_AT
    c[0].roster[row].outstanding[free] = batch
    c[0].next = batch + ONE
    return batch


@inner
def hand_out_more(c: np.ndarray, row: int) -> None:
    """Put batches into the learner's entry until it holds as many as it may."""
    missing = integer(c[0].ahead) - held(c, row)
    for _ in range(missing):
        batch = assign(c, row)
        if batch == NO_BATCH:
            break
        e = c[0].roster[row]
        c[0].roster[row].items[e.handed % np.uint64(AHEAD)] = batch
        e.handed += ONE
