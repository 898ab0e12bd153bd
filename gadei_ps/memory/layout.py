"""The shared memory's layout as NumPy dtypes: native/ps_layout.h said in Python.

The drawing, the writers of each word and the reasons stand there; a test compares every offset and
size with what the C compiler made of it. This module knows nothing but numbers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

MAGIC: Final = 0x53504945444147
LAYOUT_VERSION: Final = 5

MAX_LEARNERS: Final = 256
MAX_SHARDS: Final = 64
AHEAD: Final = 16
HISTOGRAM: Final = 32
CHUNK: Final = 64
MAX_STREAMS: Final = 3
UNDO_HALVES: Final = 2
HYPER: Final = 32
JOURNAL: Final = 248
MAX_DIMS: Final = 8
RUNS: Final = 128
SYNC_TEXT: Final = 512
NO_BATCH: Final = 2**64 - 1
UNBOUNDED: Final = 1 << 62
IDLE: Final = 2**64 - 1
APPLIED: Final = 2**64 - 2
PAYLOAD_AT: Final = 4096
PAGE: Final = 4096


class SegmentKind(IntEnum):
    """What a segment holds."""

    CONTROL = 1
    WEIGHTS = 2
    STATE = 3
    RING = 4


class FrameKind(IntEnum):
    """How a gradient is written in its payload."""

    DENSE = 1
    ROWS = 2
    EMPTY = 3  # no gradient: the learner has given the iteration up


class WireType(IntEnum):
    """Number format of a payload."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3


WIRE_BYTES: Final = {WireType.FLOAT32: 4, WireType.BFLOAT16: 2, WireType.FLOAT16: 2}

WANTS_TURN: Final = 1
WANTS_WORK: Final = 2

CHECKED: Final = 1
NONFINITE: Final = 2


class Role(IntEnum):
    """What a tensor is: moved by the optimizer, or by plain addition (batch-norm statistics)."""

    PARAMETER = 1
    BUFFER = 2


class Phase(IntEnum):
    """Where a job is in its life."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2
    KEPT = 3  # stopped, but its last checkpoint failed
    STOPPED = 4
    FAILED = 5


class ServerState(IntEnum):
    """Where a server process is in its life; ready: it serves, or can take over at once."""

    NONE = 0
    STARTING = 1
    READY = 2


class Stop(IntEnum):
    """What learners are asked to do."""

    GO = 0
    DRAIN = 1
    NOW = 2


class Work(IntEnum):
    """State of the work ledger."""

    NONE = 0
    WORKING = 1
    DONE = 2


class Mode(IntEnum):
    """What shards do with a frame: apply it as it comes, leave it for a superstep, let it lie."""

    ON_ARRIVAL = 0
    COLLECT = 1
    HOLD = 2


class Action(IntEnum):
    """What a superstep does with the oldest gradient of a learner."""

    SKIP = 0
    APPLY = 1
    DROP = 2
    REFUSE = 3


class Reason(IntEnum):
    """Why a frame was refused."""

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
    GIVEN_UP = 10  # empty: not refused but dropped


REASON_TEXT: Final = {
    Reason.OK: "",
    Reason.BAD_KIND: "unknown kind of frame",
    Reason.BAD_DTYPE: "unknown number format",
    Reason.BAD_SIZE: "payload of another size than the model",
    Reason.BAD_GENERATION: "frame of another generation of the ring",
    Reason.BAD_SEQUENCE: "sequence number out of order",
    Reason.UNCHECKED: "not checked for values that are not finite",
    Reason.NOT_FINITE: "holds a NaN or an infinity",
    Reason.BAD_SCALE: "scale of the learning rate is negative or not finite",
    Reason.BAD_ROWS: "a row out of range, or tensors or rows not in ascending order",
    Reason.GIVEN_UP: "given up by its learner",
}


def _struct(*fields: tuple[str, object] | tuple[str, object, tuple[int, ...]]) -> np.dtype[np.void]:
    """A dtype laid out as a C compiler lays out a struct of these fields."""
    return np.dtype(list(fields), align=True)


u8, u32, u64, i32, f32, f64 = "u1", "u4", "u8", "i4", "f4", "f8"

HEADER: Final = _struct(
    ("magic", u64),
    ("layout_version", u32),
    ("kind", u32),
    ("job_id", u8, (16,)),
    ("bytes", u64),
    ("generation", u64),
    ("owner_pid", i32),
    ("index", u32),
    ("owner_start", u64),
    ("job_name", "S64"),
)

SHARD: Final = _struct(
    ("heartbeat", u64),
    ("sequence", u64),
    ("frames", u64),
    ("parked", u64),
    ("tid", u32),
    ("recovered", u32),
    ("cpu", u32),
    ("mode", u32),
    ("pad0", u8, (16,)),
    ("lease", u64, (8,)),
)

SERVER: Final = _struct(
    ("pid", i32),
    ("state", u32),
    ("start", u64),
    ("beat", u64),
    ("pad", u64, (5,)),
)

ENTRY: Final = _struct(
    ("generation", u64),
    ("wanted", u64),
    ("pid", i32),
    ("gone", u32),
    ("pid_start", u64),
    ("name", "S32"),
    ("served", u64),
    ("retired", u64),
    ("grant", u64),
    ("grant_seq", u32),
    ("member", u32),
    ("base", u64),
    ("obsolete", u64),
    ("pad2", u64, (2,)),
    ("applied", u64),
    ("dropped", u64),
    ("refused", u64),
    ("samples", u64),
    ("loss", f64),
    ("started", f64),
    ("finished", f64),
    ("version", u64),
    ("staleness_sum", u64),
    ("staleness_max", u64),
    ("clock", u64),
    ("reason", u32),
    ("drained", u32),
    ("unasked", u64),
    ("handed", u64),
    ("norm", f64),
    ("pad3", u64),
    ("histogram", u64, (HISTOGRAM,)),
    ("outstanding", u64, (AHEAD,)),
    ("items", u64, (AHEAD,)),
)

CONTROL: Final = _struct(
    ("header", HEADER),
    ("shards", u32),
    ("slots", u32),
    ("ahead", u32),
    ("mode", u32),
    ("report", u32),
    ("refuse_nonfinite", u32),
    ("staleness_aware", u32),
    ("optimizer", u32),
    ("spin_ns", u64),
    ("pad0", u64, (3,)),
    ("hyper", f64, (HYPER,)),
    ("phase", u32),
    ("stop", u32),
    ("model_ready", u32),
    ("watchdog_pid", i32),
    ("watchdog_start", u64),
    ("pause", u64),
    ("temporary", u64),
    ("saves", u64),
    ("sync_wanted", u64),
    ("pad2", u64),
    ("lease_generation", u64),
    ("lease_pid", i32),
    ("lease_state", u32),
    ("lease_start", u64),
    ("lease_shards", u64),
    ("pad3", u64, (4,)),
    ("version", u64),
    ("supersteps_done", u64),
    ("pad4", u64, (6,)),
    ("shard_bell", u32),
    ("manager_bell", u32),
    ("sleepers", u64),
    ("pad6", u64, (6,)),
    ("superstep", u64),
    ("sync_done", u64),
    ("wave", u64),
    ("pad8", u64, (5,)),
    ("work", u32),
    ("pad9", u32),
    ("batches", u64),
    ("epochs", u64),
    ("seed", u64),
    ("next", u64),
    ("epochs_done", u64),
    ("requeued", u64),
    ("pad10", u64),
    ("past_applied", u64),
    ("past_dropped", u64),
    ("past_refused", u64),
    ("past_samples", u64),
    ("requeued_total", u64),
    ("pad11", u64, (3,)),
    ("lease", u64, (8,)),
    ("heir", u64, (8,)),
    ("server_deaths", u64),
    ("server_starts", u64),
    ("learner_deaths", u64),
    ("watchdog_starts", u64),
    ("checkpoints", u64),
    ("checkpoint_version", u64),
    ("checkpoint_failures", u64),
    ("started", u64),
    ("config", u32, (8,)),
    ("finished", u64, (MAX_LEARNERS // 64,)),
    ("server", SERVER, (2,)),
    ("shard", SHARD, (MAX_SHARDS,)),
    ("roster", ENTRY, (MAX_LEARNERS,)),
    ("superstep_action", u32, (MAX_LEARNERS,)),
    ("superstep_reason", u32, (MAX_LEARNERS,)),
    ("superstep_upto", u64, (MAX_LEARNERS,)),
    ("requeue", u64, (MAX_LEARNERS * AHEAD,)),
    ("sync_text", u8, (2, SYNC_TEXT)),
)

TENSOR: Final = _struct(
    ("name", "S120"),
    ("role", u32),
    ("dims", u32),
    ("shape", u64, (MAX_DIMS,)),
    ("start", u64),
    ("count", u64),
    ("pad", u64, (6,)),
)

WEIGHTS: Final = _struct(
    ("header", HEADER),
    ("tensors", u64),
    ("table_at", u64),
    ("data_at", u64),
    ("elements", u64),
    ("parameters", u64),
    ("values", u64),
    ("pad", u64, (2,)),
)

RECORD: Final = _struct(
    ("cursor", u64),
    ("ring", u64),
    ("generation", u64),
    ("sequence", u64),
    ("step", u64),
    ("rate", f64),
    ("version", u64),
    ("applies", u64),
    ("steps", u64),
    ("supersteps", u64),
    ("booked", u64),
    ("pad", u64, (5,)),
)

JOURNAL_LOG: Final = _struct(
    ("used", u64),
    ("pad", u64, (7,)),
    ("words", u64, (JOURNAL,)),
)

RUN: Final = _struct(
    ("sequence", u64),
    ("started", f64),
    ("finished", f64),
    ("action", u32),
    ("censored", u32),
)

STATE: Final = _struct(
    ("header", HEADER),
    ("streams", u64),
    ("slots_at", u64),
    ("slot_bytes", u64),
    ("undo_at", u64),
    ("pad", u64, (4,)),
    ("record", RECORD, (MAX_SHARDS,)),
    ("applied", u64, (MAX_SHARDS, MAX_LEARNERS)),
    ("journal", JOURNAL_LOG),
    ("runs", RUN, (MAX_LEARNERS, RUNS)),
)

FRAME: Final = _struct(
    ("sequence", u64),
    ("generation", u64),
    ("clock", u64),
    ("version", u64),
    ("kind", u32),
    ("dtype", u32),
    ("payload_bytes", u64),
    ("flags", u32),
    ("blocks", u32),
    ("batch", u64),
    ("samples", u32),
    ("rate_scale", f32),
    ("loss", f64),
    ("started", f64),
    ("finished", f64),
    ("squares", f64),
    ("pad", u64, (3,)),
)

BLOCK: Final = _struct(
    ("tensor", u32),
    ("form", u32),
    ("rows", u64),
    ("indices_at", u64),
    ("values_at", u64),
)

TAIL: Final = _struct(("value", u64), ("pad", u64, (7,)))

RING: Final = _struct(
    ("header", HEADER),
    ("slots", u32),
    ("shards", u32),
    ("slot_bytes", u64),
    ("slots_at", u64),
    ("capacity", u64),
    ("pad0", u64, (4,)),
    ("head", u64),
    ("pad1", u64, (7,)),
    ("waits_slot", u32),
    ("waits_work", u32),
    ("hold", u32),
    ("wants", u32),
    ("heartbeat", u64),
    ("pulled", u64),
    ("work_tail", u64),
    ("left", u64),
    ("pad3", u64, (2,)),
    ("released", u32),
    ("pad4", u32),
    ("pad5", u64, (7,)),
    ("work_head", u32),
    ("pad6", u32),
    ("pad7", u64, (7,)),
    ("work_items", u64, (AHEAD,)),
    ("tail", TAIL, (MAX_SHARDS,)),
)

STRUCTS: Final = {
    "ps_header": HEADER,
    "ps_shard": SHARD,
    "ps_server": SERVER,
    "ps_entry": ENTRY,
    "ps_control": CONTROL,
    "ps_tensor": TENSOR,
    "ps_weights": WEIGHTS,
    "ps_record": RECORD,
    "ps_journal": JOURNAL_LOG,
    "ps_run": RUN,
    "ps_state": STATE,
    "ps_frame": FRAME,
    "ps_block": BLOCK,
    "ps_ring": RING,
}


UNDO_HALF: Final = MAX_STREAMS * CHUNK * 4
"""Bytes of a half of a shard's undo log, which holds one chunk of each stream."""

UNDO_BYTES: Final = UNDO_HALVES * UNDO_HALF
"""Of a shard's undo log."""


def offset(struct: np.dtype[np.void], field: str) -> int:
    """Bytes from the struct's begin to the field."""
    assert struct.fields is not None
    return int(struct.fields[field][1])


def rounded(size: int, unit: int) -> int:
    """`size`, in bytes or elements, rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def batch_id(epoch: int, index: int) -> int:
    """A batch as frames and the ledger name it."""
    return epoch << 32 | index


def shard_range(elements: int, shards: int, index: int) -> tuple[int, int]:
    """First element of a shard and the one after its last; whole chunks but for the very end."""
    chunks = -(-elements // CHUNK)
    low = chunks * index // shards * CHUNK
    high = min(chunks * (index + 1) // shards * CHUNK, elements)
    return low, high
