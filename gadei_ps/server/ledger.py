"""The work ledger: which batch is with whom, so that each is answered once an epoch whoever dies.

It lies in the control segment and the thread of shard 0 is its only writer. A batch is in one of
four places: not yet handed out (`next` and above), in a learner's `outstanding`, in `requeue`
because its learner died or its gradient was dropped, or answered. Nothing counts the answered ones:
an epoch is done when no batch of it is in the other three places. What the functions here change is
part of a transaction (journal.py), so that a server that dies in one of them leaves no trace of it.

Compiled; also plain Python through `.py_func`. `c` is the control segment, shape (1,).
"""

from __future__ import annotations

import numpy as np

from gadei_ps.kernels.compiled import compiled
from gadei_ps.memory import layout

NO_BATCH = np.uint64(layout.NO_BATCH)
AHEAD = layout.AHEAD
MAX_LEARNERS = layout.MAX_LEARNERS
WORKING = int(layout.Work.WORKING)
DONE = int(layout.Work.DONE)
HALF = np.uint64(32)
INDEX = np.uint64(2**32 - 1)


@compiled
def clear(c: np.ndarray, row: int) -> None:
    """Nothing is handed to the learner of this row."""
    for i in range(AHEAD):
        c[0].roster[row].outstanding[i] = NO_BATCH


@compiled
def held(c: np.ndarray, row: int) -> int:
    """How many batches the learner has to answer."""
    count = 0
    for i in range(AHEAD):
        if c[0].roster[row].outstanding[i] != NO_BATCH:
            count += 1
    return count


@compiled
def settle(c: np.ndarray, row: int, batch: np.uint64) -> bool:
    """The learner answered the batch. False if it was not handed to it."""
    if batch == NO_BATCH:
        return False
    for i in range(AHEAD):
        if c[0].roster[row].outstanding[i] == batch:
            c[0].roster[row].outstanding[i] = NO_BATCH
            return True
    return False


@compiled
def requeue(c: np.ndarray, row: int, batch: np.uint64) -> bool:
    """The batch is to be handed out again. False if it was not with this learner."""
    if batch == NO_BATCH:
        return False
    for i in range(AHEAD):
        if c[0].roster[row].outstanding[i] == batch:
            c[0].requeue[c[0].requeued] = batch
            c[0].requeued += np.uint64(1)
            c[0].roster[row].outstanding[i] = NO_BATCH
            c[0].requeued_total += np.uint64(1)
            return True
    return False


@compiled
def requeue_all(c: np.ndarray, row: int) -> None:
    """The learner is gone: all that it had not answered goes to others."""
    for i in range(AHEAD):
        batch = c[0].roster[row].outstanding[i]
        if batch != NO_BATCH:
            requeue(c, row, batch)


@compiled
def pending(c: np.ndarray, epoch: np.uint64) -> bool:
    """Whether a batch of this epoch is handed out or to be handed out again."""
    for i in range(c[0].requeued):
        if c[0].requeue[i] >> HALF == epoch:
            return True
    for row in range(MAX_LEARNERS):
        for i in range(AHEAD):
            batch = c[0].roster[row].outstanding[i]
            if batch != NO_BATCH and batch >> HALF == epoch:
                return True
    return False


@compiled
def close_epochs(c: np.ndarray) -> bool:
    """Counts the epochs that have become done. True if one has, or if all are."""
    changed = False
    while c[0].epochs_done < c[0].epochs and (
        c[0].epochs_done < c[0].next >> HALF
        or (c[0].epochs_done == c[0].next >> HALF and (c[0].next & INDEX) == c[0].batches)
    ):
        if pending(c, c[0].epochs_done):
            break
        c[0].epochs_done += np.uint64(1)
        changed = True
    if c[0].epochs_done == c[0].epochs and c[0].work == WORKING:
        c[0].work = np.uint32(DONE)
        changed = True
    return changed


@compiled
def left(c: np.ndarray) -> bool:
    """Whether there is a batch to hand out just now."""
    if c[0].work != WORKING:
        return False
    if c[0].requeued > 0 or (c[0].next & INDEX) != c[0].batches:
        return True
    epoch = (c[0].next >> HALF) + np.uint64(1)
    return bool(epoch < c[0].epochs and c[0].epochs_done + np.uint64(1) >= epoch)


@compiled
def assign(c: np.ndarray, row: int) -> np.uint64:
    """Hands the next batch to the learner of this row; NO_BATCH if there is none just now.

    At most two epochs are open at once: the last batches of one are awaited while the next begins.
    """
    free = -1
    for i in range(AHEAD):
        if c[0].roster[row].outstanding[i] == NO_BATCH:
            free = i
            break
    if free < 0 or not left(c):
        return NO_BATCH
    if c[0].requeued > 0:
        batch: np.uint64 = c[0].requeue[c[0].requeued - np.uint64(1)]
        c[0].roster[row].outstanding[free] = batch
        c[0].requeued -= np.uint64(1)
        return batch
    batch = c[0].next
    if (batch & INDEX) == c[0].batches:
        batch = ((batch >> HALF) + np.uint64(1)) << HALF
    c[0].roster[row].outstanding[free] = batch
    c[0].next = batch + np.uint64(1)
    return batch
