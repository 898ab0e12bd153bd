"""Numbers of the layout in the types that compiled code needs.

Numba would carry an enum member into the compiled code as a type of its own, so these are plain
integers. What is computed with addresses and counts in shared memory is unsigned: Numba makes a
float of a signed and an unsigned word.
"""

from __future__ import annotations

import numpy as np

from gadei_ps.memory import layout
from gadei_ps.memory.layout import Action, Mode, Reason, WireType, Work

ZERO = np.uint64(0)
ONE = np.uint64(1)

MAX_LEARNERS = layout.MAX_LEARNERS
CHUNK = layout.CHUNK
AHEAD = layout.AHEAD
NO_BATCH = np.uint64(layout.NO_BATCH)
RESET = np.uint32(layout.RESET)
ADD = np.uint32(layout.ADD)
SAME_STEPS = np.uint64(layout.SAME_STEPS)
MOST_STEPS = np.uint64(2**62)  # an assignment may set no more

# The cursor of a record, where it is not a chunk.
IDLE = np.uint64(layout.IDLE)
ALL_APPLIED = np.uint64(layout.ALL_APPLIED)

FLOAT32 = int(WireType.FLOAT32)
BFLOAT16 = int(WireType.BFLOAT16)
FLOAT16 = int(WireType.FLOAT16)

SKIP = int(Action.SKIP)
APPLY = int(Action.APPLY)
DROP = int(Action.DROP)
REFUSE = int(Action.REFUSE)

ON_ARRIVAL = int(Mode.ON_ARRIVAL)
COLLECT = int(Mode.COLLECT)
HOLD = int(Mode.HOLD)

NO_WORK = int(Work.NONE)
WORKING = int(Work.WORKING)
DONE = int(Work.DONE)

OK = int(Reason.OK)
BAD_KIND = int(Reason.BAD_KIND)
BAD_DTYPE = int(Reason.BAD_DTYPE)
BAD_SIZE = int(Reason.BAD_SIZE)
BAD_GENERATION = int(Reason.BAD_GENERATION)
BAD_SEQUENCE = int(Reason.BAD_SEQUENCE)
UNCHECKED = int(Reason.UNCHECKED)
NOT_FINITE = int(Reason.NOT_FINITE)
BAD_SCALE = int(Reason.BAD_SCALE)
BAD_ROWS = int(Reason.BAD_ROWS)
ABANDONED = int(Reason.ABANDONED)
TORN = int(Reason.TORN)
BAD_ASSIGN = int(Reason.BAD_ASSIGN)
