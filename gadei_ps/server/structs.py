"""Structs in a server process' own memory, for its manager and its shard threads.

The structs of shared memory are in memory/layout.py. Python and compiled code read the same fields;
addresses are plain words.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gadei_ps.kernels.optimizers import COEFFICIENTS
from gadei_ps.memory.layout import FRAME, MAX_GROUPS, MAX_LEARNERS, MAX_SHARDS
from gadei_ps.server import kinds

i64, u64, f32, f64 = "i8", "u8", "f4", "f8"

NOT_READING: Final = 2**64 - 1
"""Value of `seen`: the shard stands by, and looks at the table of rings before it reads a ring."""

WINDOW: Final = 1024
"""Values that are decoded or averaged at a time: several chunks, because one is short for that."""

# A line of the table of rings. The manager stores the address last and takes it back first.
RING_LINE: Final = np.dtype(
    [
        ("address", u64),  # 0: the row is not served
        ("generation", u64),
        ("slot_bytes", u64),
        ("slots_at", u64),
        ("broken", u64),  # generation of a ring that is not read any more (rings.py)
    ],
    align=True,
)

# One for each server process. The shards write `seen` and `holds`, shard 0 `requests`, watchers
# `watched`, the manager all the rest.
BOARD: Final = np.dtype(
    [
        ("table_version", u64),  # goes up with every change of the table of rings
        ("quit", u64),
        ("seen", u64, (MAX_SHARDS,)),  # the version that each shard works with; NOT_READING
        ("holds", u64, (MAX_SHARDS,)),  # 1 once the shard serves with its lease
        ("requests", u64),  # number of new requests of learners that were seen
        ("ring", RING_LINE, (MAX_LEARNERS,)),
        # Written by watcher threads: generation of the watched ring (watchers.py); 0: none
        ("watched", u64, (MAX_LEARNERS,)),
    ],
    align=True,
)

# A current frame: one that is being applied, alone or in a mean of several.
CURRENT_FRAME: Final = np.dtype(
    [
        ("payload", u64),  # address
        ("dtype", i64),
        ("kind", i64),
        ("scale", f64),  # what to multiply the gradient by, because of clipping
        ("stream", i64),  # of an assignment: 0 the weights, 1 or 2 a slot
        ("reset", i64),  # 1: the slots of assigned weights become zero
        ("adds", i64),  # 1: an assignment is added to the weights
        ("next_step", u64),  # optimizer steps finished after it, where it is alone
        ("watch", u64),  # address of a word that is 0 once its memory is lost; 0: none
        # The rest is used if one of the current frames is of rows (apply.py).
        ("next", i64),  # block to look at next
        ("form", i64),  # of the tensor at hand: ABSENT, ROWS, DENSE
        ("values", u64),  # address of its values
        ("indices", u64),  # address of its rows' numbers
        ("count", i64),  # of its rows
        ("at", i64),  # which of the listed rows is at hand
        ("row", i64),  # its number; NO_ROW after the last
    ],
    align=True,
)

# A ring as a shard works with it, until the shard sees that the table has changed.
KNOWN_RING: Final = np.dtype(
    [
        ("row", i64),
        ("line", i64),  # its index in `known`, `address` and `head` of the part
        ("address", u64),
        ("generation", u64),
        ("slot_bytes", u64),
        ("slots_at", u64),
        ("tail", u64),
        ("held", u64),  # request for a consistent pull that has had its time
        ("wants", u64),  # what the learner has asked for
        ("lively", i64),  # 1: every pass looks at it (order.py)
        ("busy", u64),  # turn of the last pass that had something to do for it
    ],
    align=True,
)

# What one shard works with: made by the manager, read by the thread of the shard.
PART: Final = np.dtype(
    [
        ("index", i64),
        ("low", i64),  # first value of the shard's part of the weights; a multiple of CHUNK
        ("high", i64),  # the one after its last; a multiple of CHUNK, or the end of the weights
        ("control", u64),  # addresses of segments
        ("state", u64),
        ("weights", u64),  # address of the values
        ("slot0", u64),  # addresses of the optimizer's slots; 0 if the optimizer has none
        ("slot1", u64),
        ("undo", u64),  # address of this shard's undo log
        ("board", u64),  # address of the process' BOARD
        # Addresses of compiled code (units.py).
        ("apply", u64),
        ("arrive", u64),
        ("move", u64, (kinds.COUNT, 2)),  # loops by the frame's kind and the form of its values
        ("tensors_at", u64),  # address of the model's table
        ("tensors", u64),
        ("elements", u64),
        ("parameters", u64),
        ("groups", i64),  # of parameters
        ("group_end", i64, (MAX_GROUPS,)),  # the value after each group's last; a multiple of CHUNK
        ("capacity", u64),  # bytes that every slot has for a payload
        # Memory that only the thread of the shard uses.
        ("current", CURRENT_FRAME, (MAX_LEARNERS,)),
        ("known", KNOWN_RING, (MAX_LEARNERS,)),
        ("address", u64, (MAX_LEARNERS,)),  # of the rings in `known`, for shard_sleep
        ("head", u64, (MAX_LEARNERS,)),  # heads that the shard has acted on, for shard_sleep
        ("apart", u64, (MAX_LEARNERS,)),  # 1: a watcher watches the head, for shard_sleep
        # Which of them a pass looks at (order.py).
        ("looked", i64, (MAX_LEARNERS,)),  # lines of `known`; first those that are lively
        ("lively", i64),
        ("next_line", i64),  # of the rings that are looked at in turn
        ("share", i64),  # how many of these a pass looks at
        ("turn", u64),  # passes so far
        # Of the current gradient, for each group (cpu.coefficients).
        ("coefficients", f64, (MAX_GROUPS, COEFFICIENTS)),
        ("frame", FRAME),  # header of the current frame, as it was read, once
        ("scratch", f32, (WINDOW,)),  # decoded values
        ("mean", f32, (WINDOW,)),  # the mean of several gradients, or a clipped one
        ("spans", i64),  # written so far: which of the record's two comes next
    ],
    align=True,
)
