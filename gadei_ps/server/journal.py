"""Transactions on words that several processes can see: all of it, or nothing, through SIGKILL.

Before a transaction changes words it remembers them here; it ends by forgetting. Whoever takes over
from a server that died in between rolls the words back. The journal lies in the state segment; the
thread of shard 0 is its only writer. Compiled; addresses are plain words.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gadei_ps.kernels.compiled import compiled
from gadei_ps.memory import layout
from gadei_ps.memory.layout import JOURNAL_LOG, STATE
from gadei_ps.server.symbols import get, put, words

WORDS = np.uint64(layout.offset(JOURNAL_LOG, "words"))
LOG = np.uint64(layout.offset(STATE, "journal"))
SIZE = layout.JOURNAL
ZERO = np.uint64(0)
OFFSET = np.uint64(2**32 - 1)
COUNT_AT = np.uint64(32)
IN_STATE = np.uint64(1 << 63)
COUNT = np.uint64(2**16 - 1)


class Books(NamedTuple):
    """Addresses that a journal's words are told by."""

    control: np.uint64
    state: np.uint64


@compiled
def remember(b: Books, in_state: bool, offset: np.uint64, count: int) -> None:
    """Saves `count` words that begin `offset` bytes into control, or state, before they change."""
    log = b.state + LOG
    used = np.int64(get(log))
    saved = words(log + WORDS, SIZE)
    source = words((b.state if in_state else b.control) + offset, count)
    for i in range(count):
        saved[used + i] = source[i]
    place = np.uint64(count) << COUNT_AT | offset
    if in_state:
        place |= IN_STATE
    saved[used + count] = place
    put(log, np.uint64(used + count + 1))  # the old words are there before a new one is


@compiled
def forget(b: Books) -> None:
    """The transaction is done: its words stay as they are."""
    put(b.state + LOG, ZERO)


@compiled
def roll_back(b: Books) -> bool:
    """Undoes the transaction that a server died in; True if there was one. May be done twice."""
    log = b.state + LOG
    used = np.int64(get(log))
    if used == 0:
        return False
    saved = words(log + WORDS, SIZE)
    while used > 0:
        place = saved[used - 1]
        count = np.int64((place >> COUNT_AT) & COUNT)
        base = b.state if place & IN_STATE else b.control
        to = words(base + (place & OFFSET), count)
        for i in range(count):
            to[i] = saved[used - 1 - count + i]
        used -= count + 1
        put(log, np.uint64(used))
    return True
