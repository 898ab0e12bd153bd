"""Choice of the rings that a shard looks at in a pass, so that a pass costs by the rings that push.

Rings that have lately had something to do (lively ones) are looked at in every pass. Of the others
each pass looks at a few, in turn, whatever the lively ones do: so none waits longer than a round of
these takes. Before a shard sleeps, it has looked at all since it last found anything.

    looked:  | lively: in every pass | others: those whose turn it is |     lines of `known`
             0                    lively                          looks

The larger a gradient is, the more of the others are looked at in a pass: a round takes at most
about ROUND_BYTES of gradients from each lively ring. Compiled; runs in the thread of the shard.
"""

from __future__ import annotations

import numpy as np

from gadei_ps.kernels.compiled import inner
from gadei_ps.server.constants import MAX_LEARNERS, ONE
from gadei_ps.server.context import Shard, integer

LEAST = 4
"""Least number of the other rings that a pass looks at."""
ROUND_BYTES = 4 << 20
QUIET = np.uint64(4096)
"""Passes without anything to do after which a ring is not lively any more."""


@inner
def reset(s: Shard, count: int) -> None:
    """Begin with another table of rings: all count as lively at first."""
    part = s.part[0]
    for line in range(count):
        s.known[line].lively = 1
        s.known[line].busy = part.turn
        s.part[0].looked[line] = line
    s.part[0].lively = count
    s.part[0].next_line = 0
    s.part[0].share = LEAST
    if count > 0:
        share = integer(s.known[0].slot_bytes) * MAX_LEARNERS // ROUND_BYTES
        s.part[0].share = max(LEAST, min(MAX_LEARNERS, share))


@inner
def choose(s: Shard, count: int, everything: bool) -> int:
    """Choose the rings of this pass, lines 0 to `looks` of `looked`; return `looks`."""
    looks = s.part[0].lively
    s.part[0].turn += ONE
    share = s.part[0].share
    if everything or share > count:
        share = count
    line = s.part[0].next_line
    for _ in range(share):
        if line >= count:
            line = 0
        if s.known[line].lively == 0:
            s.part[0].looked[looks] = line
            looks += 1
        line += 1
    s.part[0].next_line = line
    return integer(looks)


@inner
def had_news(s: Shard, line: int) -> None:
    """Record that this ring had something to do in this pass."""
    s.known[line].busy = s.part[0].turn


@inner
def sort_out(s: Shard, looks: int) -> None:
    """Sort rings after a pass: those that had work are lively; those long without it are not."""
    turn = s.part[0].turn
    lively = s.part[0].lively
    for i in range(lively, looks):
        line = s.part[0].looked[i]
        if s.known[line].busy == turn:
            s.part[0].looked[i] = s.part[0].looked[lively]
            s.part[0].looked[lively] = line
            s.known[line].lively = 1
            lively += 1
    i = 0
    while i < lively:
        line = s.part[0].looked[i]
        if turn - s.known[line].busy > QUIET:
            lively -= 1
            s.part[0].looked[i] = s.part[0].looked[lively]
            s.known[line].lively = 0
        else:
            i += 1
    s.part[0].lively = lively
