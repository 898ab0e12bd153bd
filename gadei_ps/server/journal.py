"""Transactions on words that several processes can see: all changes or none, through SIGKILL.

Before a transaction changes words, it saves their old values here; its commit discards them. If a
server dies in between, its successor rolls the words back. The journal lies in the state segment,
and the thread of shard 0 is its only writer. Compiled; addresses are plain words.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gadei_ps.kernels.compiled import inner
from gadei_ps.memory import layout
from gadei_ps.memory.layout import JOURNAL_LOG, STATE
from gadei_ps.server.constants import ZERO
from gadei_ps.server.symbols import get, put, words

WORDS = np.uint64(layout.offset(JOURNAL_LOG, "words"))
LOG = np.uint64(layout.offset(STATE, "journal"))
SIZE = layout.JOURNAL
# The old values of each block are followed by one word with their place: offset, count and segment.
OFFSET = np.uint64(2**32 - 1)
COUNT_AT = np.uint64(32)
COUNT = np.uint64(2**16 - 1)
IN_STATE = np.uint64(1 << 63)


class Segments(NamedTuple):
    """Addresses of the segments whose words a transaction changes."""

    control: np.uint64
    state: np.uint64


@inner
def log_words(b: Segments, in_state: bool, offset: np.uint64, count: int) -> None:
    """Save `count` words, which begin `offset` bytes into control (or state), before a change."""
    log = b.state + LOG
    used = np.int64(get(log))
    saved = words(log + WORDS, SIZE)
    source = words((b.state if in_state else b.control) + offset, count)
    for i in range(count):
        saved[used + i] = source[i]
    where = np.uint64(count) << COUNT_AT | offset
    if in_state:
        where |= IN_STATE
    saved[used + count] = where
    put(log, np.uint64(used + count + 1))  # the old words are there before a new one is


@inner
def commit(b: Segments) -> None:
    """End the transaction: its words stay as they are."""
    put(b.state + LOG, ZERO)


@inner
def roll_back(b: Segments) -> bool:
    """Undo the transaction in which a server died; return whether there was one. Idempotent."""
    log = b.state + LOG
    used = np.int64(get(log))
    if used == 0:
        return False
    saved = words(log + WORDS, SIZE)
    while used > 0:
        where = saved[used - 1]
        count = np.int64((where >> COUNT_AT) & COUNT)
        base = b.state if where & IN_STATE else b.control
        to = words(base + (where & OFFSET), count)
        for i in range(count):
            to[i] = saved[used - 1 - count + i]
        used -= count + 1
        put(log, np.uint64(used))
    return True
