"""Externally assigned batches: the words of the control segment that define them.

If several jobs train together, each owns some batches of an epoch. Its watchdog writes the
requested ranges of batches one after the other; shard 0 hands them out in that order, and never
moves past one that is not whole. A batch is epoch << 32 | index, as in the batch ledger.

Ranges below `owned_from` are revoked. Until another range is given, batches that a learner returns
are not handed out again either.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gadei_ps.memory.layout import NO_BATCH, OWNED, Work, batch_id

Ranges = list[tuple[int, int, int]]
"""Batches of an epoch: epoch, first index, the index after the last. They ascend."""
EPOCH_AT = 32
INDEX = (1 << EPOCH_AT) - 1


def is_on(control: np.void) -> bool:
    """Return whether only owned batches are handed out. control: CONTROL."""
    return bool(int(control["owned"]))


def left(control: np.void) -> bool:
    """Return whether some owned batches were not handed out yet."""
    return max(int(control["owned_range"]), int(control["owned_from"])) < int(
        control["owned_given"]
    )


def waits(control: np.void) -> bool:
    """Return whether learners wait until the job owns more batches."""
    if not is_on(control) or int(control["work"]) != Work.WORKING or left(control):
        return False
    return not is_awaited(control)


def is_awaited(control: np.void) -> bool:
    """Return whether a batch that was handed out is not answered yet, as of one instant."""
    # A batch that comes back is queued before its learner loses it; one that is handed out again
    # leaves the queue last. So one place is looked at before and after the other.
    return bool(
        control["requeued"]
        or (control["roster"]["outstanding"] != NO_BATCH).any()
        or control["requeued"]
    )


def unanswered(control: np.void) -> Ranges:
    """The owned batches that no gradient has answered, while nothing is handed out or answered.

    Also what has come back and is to be given up: until shard 0 has seen that, it could be handed
    out if another range were given.
    """
    given, back = int(control["owned_given"]), int(control["owned_from"])
    number, at = int(control["owned_range"]), int(control["owned_at"])
    spans = []
    for one in range(max(number, back), given):
        begin, end = (int(word) for word in control["owned_ranges"][one % OWNED])
        spans.append((begin + (at if one == number else 0), end))
    outstanding = control["roster"]["outstanding"]
    held = outstanding[outstanding != NO_BATCH].tolist()
    held += control["requeue"][: int(control["requeued"])].tolist()
    return _joined([*spans, *((batch, batch + 1) for batch in held)])


def _joined(spans: Iterable[tuple[int, int]]) -> Ranges:
    """Merge spans of batches that do not overlap into ranges that do not touch."""
    found: Ranges = []
    for begin, end in sorted(spans):
        epoch, first, last = begin >> EPOCH_AT, begin & INDEX, end - (begin >> EPOCH_AT << EPOCH_AT)
        if found and found[-1][0] == epoch and found[-1][2] == first:
            found[-1] = epoch, found[-1][1], last
        else:
            found.append((epoch, first, last))
    return found


def words(epoch: int, begin: int, end: int) -> tuple[int, int]:
    """A range as its two words."""
    return batch_id(epoch, begin), batch_id(epoch, end)
