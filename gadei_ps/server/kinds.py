"""Kinds of frames: one row for each, from which checks, loops, accounting and the driver derive.

Fields of the header that only one kind has are checked and read in frames.py. The loop that changes
values has its source in chunks.py, and the walk over the payload is in apply.py. A kind whose
payload and loop are those of another one needs neither. Imported without Numba, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from gadei_ps.memory.layout import FrameKind

DENSE = int(FrameKind.DENSE)
ROWS = int(FrameKind.ROWS)
EMPTY = int(FrameKind.EMPTY)
ASSIGN = int(FrameKind.ASSIGN)


class Traits(NamedTuple):
    """Properties of the frames of a kind."""

    loop: str
    """Name of the loop in chunks.py. With {kind}: the optimizer has one of its own."""
    blocks: bool = False
    """Whether the payload has blocks (blocks.py), and not a value for each parameter."""
    buffers: bool = False
    """Whether the frame may change buffers."""
    writes: bool = False
    """Whether the frame is a write and not an iteration: the synchronization model, the statistics
    and the trace leave it out, and it is applied alone."""


TABLE: Final[dict[int, Traits]] = {
    FrameKind.DENSE: Traits("move-{kind}"),
    FrameKind.ROWS: Traits("move-{kind}", blocks=True),
    FrameKind.ASSIGN: Traits("assign", blocks=True, buffers=True, writes=True),
}
"""All kinds that can be applied."""

COUNT: Final = max(FrameKind) + 1
"""Numbers of kinds, with 0."""


def _kinds(wanted: Callable[[Traits], bool]) -> int:
    """Return a set of kinds as compiled code reads it (context.among): a bit for each."""
    return sum(1 << kind for kind, traits in TABLE.items() if wanted(traits))


APPLIED: Final = _kinds(lambda traits: True)
BLOCKS: Final = _kinds(lambda traits: traits.blocks)
BUFFERS: Final = _kinds(lambda traits: traits.buffers)
WRITES: Final = _kinds(lambda traits: traits.writes)
