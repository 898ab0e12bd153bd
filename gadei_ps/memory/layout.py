"""The layout of the shared memory as NumPy dtypes.

Every number comes from native/ps_layout.h and native/ps_codes.h, by way of gadei_ps._native. The
drawings, the writer of each word and the meanings stand there. The IntEnums repeat the codes for
the type checker; a test compares them with the enums in C.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final

import numpy as np

from gadei_ps import _native
from gadei_ps.kernels.optimizers import WireType as WireType

_NUMBERS: Final = _native.numbers()
_ENUMS: Final = _native.codes()
_CODE: Final = {name: code for codes in _ENUMS.values() for name, (code, _) in codes.items()}
_TABLE: Final = _native.layout()

MAGIC: Final = _NUMBERS["PS_MAGIC"]
LAYOUT_VERSION: Final = _NUMBERS["PS_LAYOUT_VERSION"]

MAX_LEARNERS: Final = _NUMBERS["PS_MAX_LEARNERS"]
MAX_SHARDS: Final = _NUMBERS["PS_MAX_SHARDS"]
AHEAD: Final = _NUMBERS["PS_AHEAD"]
OWNED: Final = _NUMBERS["PS_OWNED"]
HISTOGRAM: Final = _NUMBERS["PS_HISTOGRAM"]
CHUNK: Final = _NUMBERS["PS_CHUNK"]
MAX_STREAMS: Final = _NUMBERS["PS_MAX_STREAMS"]
MAX_GROUPS: Final = _NUMBERS["PS_MAX_GROUPS"]
HYPER: Final = _NUMBERS["PS_HYPER"]
UNDO_HALVES: Final = _NUMBERS["PS_UNDO_HALVES"]
JOURNAL: Final = _NUMBERS["PS_JOURNAL"]
MAX_DIMS: Final = _NUMBERS["PS_MAX_DIMS"]
RUNS: Final = _NUMBERS["PS_RUNS"]
SYNC_TEXT: Final = _NUMBERS["PS_SYNC_TEXT"]
NO_BATCH: Final = _NUMBERS["PS_NO_BATCH"]
SAME_STEPS: Final = _NUMBERS["PS_SAME_STEPS"]
UNBOUNDED: Final = _NUMBERS["PS_UNBOUNDED"]
IDLE: Final = _NUMBERS["PS_IDLE"]
ALL_APPLIED: Final = _NUMBERS["PS_ALL_APPLIED"]
PAYLOAD_AT: Final = _NUMBERS["PS_PAYLOAD_AT"]
PAGE: Final = 4096

REPLICA: Final = b"replica"
"""Name in the roster of the client that exchanges a job's weights with its group.

It is attached like a learner, and is not one.
"""


class SegmentKind(IntEnum):
    """Content of a segment."""

    CONTROL = 1
    WEIGHTS = 2
    STATE = 3
    RING = 4


class FrameKind(IntEnum):
    """Format of a gradient in its payload."""

    DENSE = 1
    ROWS = 2
    EMPTY = 3  # no gradient: the learner has given the iteration up
    ASSIGN = 4  # values that replace those of the job; blocks as in ROWS


WIRE_BYTES: Final = {WireType.FLOAT32: 4, WireType.BFLOAT16: 2, WireType.FLOAT16: 2}

WANTS_TURN: Final = _CODE["PS_WANTS_TURN"]
WANTS_WORK: Final = _CODE["PS_WANTS_WORK"]
WANTS_PAUSE: Final = _CODE["PS_WANTS_PAUSE"]

CHECKED: Final = _CODE["PS_CHECKED"]
NONFINITE: Final = _CODE["PS_NONFINITE"]
RESET: Final = _CODE["PS_RESET"]
ADD: Final = _CODE["PS_ADD"]


class Role(IntEnum):
    """Role of a tensor: changed by the optimizer, or by addition (batch-norm statistics)."""

    PARAMETER = 1
    BUFFER = 2
    FROZEN = 3


class Phase(IntEnum):
    """Phase of a job between its creation and its end."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2
    KEPT = 3  # stopped, and its memory holds what no checkpoint has
    STOPPED = 4
    FAILED = 5


class Kept(IntEnum):
    """Command that continues with the memory of an ended job; `temporary` in CONTROL."""

    BY_SERVE = 0
    NEVER = 1
    BY_RUN = 2


class ServerState(IntEnum):
    """State of a server process; ready: it serves, or can take over at once."""

    NONE = 0
    STARTING = 1
    READY = 2


class Stop(IntEnum):
    """Request to learners to stop."""

    GO = 0
    DRAIN = 1
    NOW = 2
    CLOSED = 3


class Work(IntEnum):
    """State of the work ledger."""

    NONE = 0
    WORKING = 1
    DONE = 2


class Mode(IntEnum):
    """Treatment of a frame by shards: apply at once, keep for a superstep, or leave in the ring."""

    ON_ARRIVAL = 0
    COLLECT = 1
    HOLD = 2


class Action(IntEnum):
    """Treatment of a learner's oldest gradient in a superstep."""

    SKIP = 0
    APPLY = 1
    DROP = 2
    REFUSE = 3


class Gone(IntEnum):
    """Reason why a learner left."""

    DETACHED = 1
    DIED = 2
    HUNG = 3
    DAMAGED = 4
    STOPPED = 5


class Reason(IntEnum):
    """Reason why a frame was refused."""

    OK = 0
    BAD_KIND = 1
    BAD_DTYPE = 2
    BAD_SIZE = 3
    BAD_GENERATION = 4
    BAD_SEQUENCE = 5
    UNCHECKED = 6
    NOT_FINITE = 7
    BAD_SCALE = 8
    BAD_ROWS = 9
    ABANDONED = 10  # empty: not refused but dropped
    TORN = 11
    BAD_ASSIGN = 12


REASON_TEXT: Final[dict[int, str]] = {
    Reason(code): text for code, text in _ENUMS["ps_reason"].values()
}

# The types of words in ps_layout.h; a text ends with its first zero byte.
_TYPES: Final = {"u8": "u1", "u32": "u4", "u64": "u8", "i32": "i4", "f32": "f4", "f64": "f8"}
STRUCTS: Final[dict[str, np.dtype[np.void]]] = {}
"""Every struct by its name in C."""


def _struct(name: str) -> np.dtype[np.void]:
    """The dtype of a struct; what it holds must have been made before."""
    size, fields = _TABLE[name]
    formats: list[object] = []
    for _, width, kind, dims, _, _ in fields.values():
        shape = tuple(int(count) for count in re.findall(r"\d+", dims))
        base = STRUCTS.get(f"ps_{kind}", _TYPES.get(kind))
        formats.append(f"S{width}" if kind == "char" else (base, shape))
    made: np.dtype[np.void] = np.dtype(
        {
            "names": list(fields),
            "formats": formats,
            "offsets": [at for at, *_ in fields.values()],
            "itemsize": size,
        },
        align=True,
    )
    STRUCTS[name] = made
    return made


HEADER: Final = _struct("ps_header")
SHARD: Final = _struct("ps_shard")
SERVER: Final = _struct("ps_server")
ENTRY: Final = _struct("ps_entry")
CONTROL: Final = _struct("ps_control")
TENSOR: Final = _struct("ps_tensor")
WEIGHTS: Final = _struct("ps_weights")
SPAN: Final = _struct("ps_span")
RECORD: Final = _struct("ps_record")
JOURNAL_LOG: Final = _struct("ps_journal")
RUN: Final = _struct("ps_run")
STATE: Final = _struct("ps_state")
FRAME: Final = _struct("ps_frame")
BLOCK: Final = _struct("ps_block")
TAIL: Final = _struct("ps_tail")
RING: Final = _struct("ps_ring")

PAST: Final = tuple(
    name.removeprefix("past_") for name in CONTROL.names or () if name.startswith("past_")
)
"""Words of ENTRY that are added to `past_...` of CONTROL when their learner leaves."""

UNDO_HALF: Final = MAX_STREAMS * CHUNK * 4
"""Bytes of a half of a shard's undo log, which holds one chunk of each stream."""

UNDO_BYTES: Final = UNDO_HALVES * UNDO_HALF
"""Size of a shard's undo log (bytes)."""


def offset(struct: np.dtype[np.void], field: str) -> int:
    """Return the field's distance from the struct's begin (bytes)."""
    assert struct.fields is not None
    return int(struct.fields[field][1])


def rounded(size: int, unit: int) -> int:
    """`size`, in bytes or elements, rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def batch_id(epoch: int, index: int) -> int:
    """A batch as frames and the ledger name it."""
    return epoch << 32 | index


def shard_range(elements: int, shards: int, index: int) -> tuple[int, int]:
    """First element of a shard and the one after its last; whole chunks, except at the end."""
    return _native.shard_range(elements, shards, index)
