"""What the manager of a parameter server and its shard threads share: plain words of the process.

Indices into uint64 arrays, because compiled code and Python both read them. The manager writes, the
shards read; but SEEN and HOLDS are theirs.
"""

from __future__ import annotations

from typing import Final

from gadei_ps.memory.layout import MAX_SHARDS

# The table of rings: columns of an array of shape (MAX_LEARNERS, TABLE).
TABLE: Final = 4
RING_ADDRESS: Final = 0  # 0: the row is not served
RING_GENERATION: Final = 1
RING_SLOT_BYTES: Final = 2
RING_SLOTS_AT: Final = 3

# An array of shape (WORDS,).
TABLE_VERSION: Final = 0  # goes up with every change of the table
QUIT: Final = 1
SEEN: Final = 2  # and on, one for each shard: the version that it works with; NOT_READING
HOLDS: Final = SEEN + MAX_SHARDS  # and on, one for each shard: 1 once it serves with its lease
WORDS: Final = HOLDS + MAX_SHARDS
NOT_READING: Final = 2**64 - 1  # the shard stands by: it looks at the table before it reads it

# Addresses and sizes that a shard works with: an array of shape (PLACES,).
PLACES: Final = 16
CONTROL_AT: Final = 0
STATE_AT: Final = 1
WEIGHTS_AT: Final = 2  # of the values
SLOT0_AT: Final = 3  # of the optimizer's slots; 0 where the optimizer has none
SLOT1_AT: Final = 4
UNDO_AT: Final = 5  # of this shard's undo log
TABLE_AT: Final = 6
WORDS_AT: Final = 7
ELEMENTS: Final = 8
PARAMETERS: Final = 9
TENSORS_AT: Final = 10  # of the model's table
TENSORS: Final = 11
CAPACITY: Final = 12  # bytes that every slot has for a payload
APPLY_AT: Final = 13  # of the compiled code that applies gradients (rows.applier)
HANDS_AT: Final = 14  # of this shard's own memory (apply.room)
ROOM_AT: Final = 15
