"""How one gradient is applied by one shard, so that whoever takes over can finish it exactly once.

    record: which frame, which step, which rate          then cursor = 0
    for each chunk:  weights and slots -> undo log       then cursor = chunk << 1 | 1
                     update
    after the last one                                        cursor = ALL_APPLIED
    shard 0: statistics and work ledger, a transaction   then booked (account.py)
    applied sequence, steps, version: absolute values    then cursor = IDLE
    the ring's tail                                                    SYNC POINT: slot

Every `then` is a release store that no store crosses in the order of this thread: `put`, an opaque
call, or for each chunk `mark`. What a server that died has left is read backwards by recover.py.
Everything here is compiled and runs in the thread of the shard.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numba.extending
import numpy as np

from gadei_ps.kernels import cpu
from gadei_ps.kernels.borrow import borrow
from gadei_ps.kernels.compiled import compiled, inlined
from gadei_ps.kernels.optimizers import COEFFICIENTS
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, FRAME, RECORD, SHARD, STATE, Action, Reason
from gadei_ps.memory.layout import WireType as Wire
from gadei_ps.server.places import (
    CONTROL_AT,
    HANDS_AT,
    PARAMETERS,
    ROOM_AT,
    SLOT0_AT,
    SLOT1_AT,
    STATE_AT,
    UNDO_AT,
    WEIGHTS_AT,
)
from gadei_ps.server.symbols import (
    doubles,
    fence,
    floats,
    get,
    halves,
    longs,
    mark,
    put,
    structs,
)

CHUNK = layout.CHUNK
MAX_LEARNERS = layout.MAX_LEARNERS
CHUNK_BYTES = np.uint64(layout.CHUNK * 4)
HALF_BYTES = np.uint64(layout.UNDO_HALF)
# Values decoded or averaged at a time, some chunks: a chunk is small for the loops that do it.
BLOCK = 1024
LINE = 16
BLOCK_BYTES = np.uint64(BLOCK * 4)
COEFFICIENT_BYTES = np.uint64(COEFFICIENTS * 8)
PAYLOAD_AT = np.uint64(layout.PAYLOAD_AT)
IDLE = np.uint64(layout.IDLE)
ALL_APPLIED = np.uint64(layout.ALL_APPLIED)
ONE = np.uint64(1)
ZERO = np.uint64(0)
# Plain integers: Numba would carry an enum member along as a type of its own.
FLOAT32 = int(Wire.FLOAT32)
BFLOAT16 = int(Wire.BFLOAT16)
FLOAT16 = int(Wire.FLOAT16)
# What is known of each frame in hand: lines of Shard.hands. Those from WALK on are of rows.py.
PAYLOAD = 0  # address
DTYPE = 1
KIND = 2
WALK = 3
HANDS = 10
# What moves a buffer, beside the kinds of optimizer that move a parameter.
BUFFER = 0
AS_FLOAT32 = np.float32(0)
AS_BFLOAT16 = np.uint16(0)
APPLY = int(Action.APPLY)
SKIP = int(Action.SKIP)
OK = int(Reason.OK)
BAD_SEQUENCE = int(Reason.BAD_SEQUENCE)

SEQUENCE = np.uint64(layout.offset(SHARD, "sequence"))
VERSION = np.uint64(layout.offset(CONTROL, "version"))

control_at = structs(CONTROL)
state_at = structs(STATE)
frame_at = structs(FRAME)


class Streams(NamedTuple):
    """Addresses that a gradient is applied at; plain words, which cost nothing to hand on."""

    weights: np.uint64
    slot0: np.uint64
    slot1: np.uint64
    undo: np.uint64
    scratch: np.uint64
    """One block, for decoded values."""
    mean: np.uint64
    """One block, for the mean of several gradients."""
    coef: np.uint64
    """What the optimizer needs to know of the gradient in hand, float64 (COEFFICIENTS,)."""
    scales: np.uint64
    """What to multiply each frame in hand by, float64 (MAX_LEARNERS,)."""


class Shard(NamedTuple):
    """What a shard thread knows of itself; made once by `shard_of`."""

    number: int
    low: int
    """First value of its part."""
    high: int
    """The one after its last."""
    places: np.ndarray
    c: np.ndarray
    """CONTROL, shape (1,)."""
    state: np.ndarray
    """STATE, shape (1,)."""
    control: np.uint64
    me: np.uint64
    """Address of its struct in control."""
    cursor: np.uint64
    """Address of its record's cursor."""
    kind: int
    kept: int
    """Optimizer slots: 0, 1 or 2."""
    hands: np.ndarray
    """What is known of each frame in hand, int64 of shape (HANDS, MAX_LEARNERS)."""
    at: Streams


@compiled
def integer(value: Any) -> int:
    """As a signed word: Numba makes a float of signed and unsigned words mixed."""
    return np.int64(value)  # type: ignore[return-value]


def room() -> tuple[np.ndarray, np.ndarray]:
    """Memory of a shard's own, for places: HANDS_AT, ROOM_AT (the last four of Streams)."""
    hands = np.zeros((HANDS, MAX_LEARNERS), np.int64)
    return hands, np.zeros(2 * BLOCK + 2 * COEFFICIENTS + 2 * MAX_LEARNERS, np.float32)


@compiled
def shard_of(index: int, low: int, high: int, places: np.ndarray) -> Shard:
    """The shard of values low to high. places: see places.py."""
    control = places[CONTROL_AT]
    kept = 0
    if places[SLOT0_AT] != ZERO:
        kept = 1
    if places[SLOT1_AT] != ZERO:
        kept = 2
    c = control_at(control)
    at = np.uint64(index)
    return Shard(
        index,
        low,
        high,
        places,
        c,
        state_at(places[STATE_AT]),
        control,
        control + SHARDS + at * SHARD_BYTES,
        places[STATE_AT] + RECORDS + at * RECORD_BYTES + CURSOR,
        integer(c[0].optimizer),
        kept,
        longs(places[HANDS_AT], HANDS * MAX_LEARNERS).reshape((HANDS, MAX_LEARNERS)),
        Streams(
            places[WEIGHTS_AT],
            places[SLOT0_AT],
            places[SLOT1_AT],
            places[UNDO_AT],
            places[ROOM_AT],
            places[ROOM_AT] + BLOCK_BYTES,
            places[ROOM_AT] + BLOCK_BYTES + BLOCK_BYTES,
            places[ROOM_AT] + BLOCK_BYTES + BLOCK_BYTES + COEFFICIENT_BYTES,
        ),
    )


SHARDS = np.uint64(layout.offset(CONTROL, "shard"))
SHARD_BYTES = np.uint64(SHARD.itemsize)
RECORDS = np.uint64(layout.offset(STATE, "record"))
RECORD_BYTES = np.uint64(RECORD.itemsize)
CURSOR = np.uint64(layout.offset(RECORD, "cursor"))


@compiled
def slot_of(
    c: np.ndarray, ring: np.uint64, slots_at: np.uint64, slot_bytes: np.uint64, sequence: np.uint64
) -> np.uint64:
    """Address of the slot that holds the frame of this number."""
    return ring + slots_at + (sequence % np.uint64(c[0].slots)) * slot_bytes


@compiled
def take(s: Shard, member: int, slot: np.uint64) -> None:
    """The frame in this slot is the member-th of those in hand."""
    s.hands[PAYLOAD, member] = integer(slot + PAYLOAD_AT)
    s.hands[DTYPE, member] = integer(frame_at(slot)[0].dtype)
    s.hands[KIND, member] = integer(frame_at(slot)[0].kind)
    scale = cpu.clip_scale(s.c[0].hyper, frame_at(slot)[0].squares)
    doubles(s.at.scales, MAX_LEARNERS)[member] = scale


@compiled
def scale_of(s: Shard, member: int, is_parameter: bool) -> float:
    """What to multiply a frame in hand by. A buffer's change is none of the gradient's."""
    return doubles(s.at.scales, MAX_LEARNERS)[member] if is_parameter else 1.0


@compiled
def _decode(payload: np.uint64, dtype: int, start: int, count: int, out: np.uint64) -> None:
    source = halves(payload + np.uint64(start * 2), count)
    if dtype == BFLOAT16:
        cpu.decode_bfloat16(source, floats(out, count))
    else:
        cpu.decode_float16(source, floats(out, count))


def values_at(form: Any, address: Any, count: int) -> Any:
    """`count` values of a gradient at an address, of the form's type: AS_FLOAT32 or AS_BFLOAT16.

    By the type of an argument, so that each has loops of its own, which convert as they read.
    """
    raise NotImplementedError


@numba.extending.overload(values_at, inline="always")
def _values_at(form, address, count):  # type: ignore[no-untyped-def]  # Numba compares signatures
    if form == numba.types.uint16:
        return lambda form, address, count: halves(address, count)
    return lambda form, address, count: floats(address, count)


def bytes_of(form: Any) -> np.uint64:
    """Of one of these values."""
    raise NotImplementedError


@numba.extending.overload(bytes_of, inline="always")
def _bytes_of(form):  # type: ignore[no-untyped-def]
    if form == numba.types.uint16:
        return lambda form: np.uint64(2)
    return lambda form: np.uint64(4)


@inlined
def gradient_at(
    payload: np.uint64, dtype: int, start: int, count: int, scratch: np.uint64
) -> np.uint64:
    """Where values start to start + count of a payload are as float32: `scratch` if decoded."""
    if dtype == FLOAT32:
        return payload + np.uint64(start * 4)
    _decode(payload, dtype, start, count, scratch)
    return scratch


@inlined
def _copy(to: np.ndarray, source: np.ndarray) -> None:
    for i in range(source.size):
        to[i] = source[i]


@inlined
def _half(at: Streams, chunk: np.uint64) -> np.uint64:
    """Address of the half of the undo log that this chunk is saved in."""
    return at.undo + (chunk & ONE) * HALF_BYTES


@inlined
def _save(at: Streams, kept: int, chunk: np.uint64, start: int, count: int) -> None:
    """The chunk's weights and slots go into the undo log; in one loop, as `update` reads them."""
    here, undo = np.uint64(start * 4), _half(at, chunk)
    old, w = floats(undo, count), floats(at.weights + here, count)
    old0, s0 = floats(undo + CHUNK_BYTES, count), floats(at.slot0 + here, count)
    old1, s1 = floats(undo + CHUNK_BYTES + CHUNK_BYTES, count), floats(at.slot1 + here, count)
    if kept == 0:
        _copy(old, w)
    elif kept == 1:
        for i in range(count):
            old[i] = w[i]
            old0[i] = s0[i]
    else:
        for i in range(count):
            old[i] = w[i]
            old0[i] = s0[i]
            old1[i] = s1[i]


@inlined
def restore(at: Streams, kept: int, chunk: np.uint64, start: int, count: int) -> None:
    """The other way."""
    here, undo = np.uint64(start * 4), _half(at, chunk)
    _copy(floats(at.weights + here, count), floats(undo, count))
    if kept > 0:
        _copy(floats(at.slot0 + here, count), floats(undo + CHUNK_BYTES, count))
    if kept > 1:
        _copy(floats(at.slot1 + here, count), floats(undo + CHUNK_BYTES + CHUNK_BYTES, count))


@compiled
def begin(
    s: Shard,
    ring: int,
    generation: np.uint64,
    sequence: np.uint64,
    rate: float,
    version: np.uint64,
    applies: int,
) -> None:
    """Writes down what is about to be applied: a frame of a ring, or (ring MAX_LEARNERS) a
    superstep of that number."""
    record = s.state[0].record[s.number]
    record.ring = np.uint64(ring)
    record.generation = generation
    record.sequence = sequence
    record.step = record.steps
    record.rate = rate
    record.version = version
    record.applies = np.uint64(applies)
    record.booked = ZERO
    put(s.cursor, ZERO)


@inlined
def _move(
    kind: int,
    kept: int,
    coef: cpu.Scalars,
    at: Streams,
    g: np.uint64,
    form: Any,
    start: int,
    low: int,
    count: int,
) -> None:
    """Moves some values of a piece that begins at `start`, from its low-th on.

    g: address of the piece's gradient; form: see `values_at`.
    """
    here = np.uint64((start + low) * 4)
    w = floats(at.weights + here, count)
    gradient = values_at(form, g + np.uint64(low) * bytes_of(form), count)
    if kind == BUFFER:
        cpu.add(w, gradient)
    else:
        s0 = floats(at.slot0 + here, count if kept > 0 else 0)
        s1 = floats(at.slot1 + here, count if kept > 1 else 0)
        cpu.move(kind, coef, w, s0, s1, gradient)


@inlined
def _change_chunk(
    kind: int,
    kept: int,
    coef: cpu.Scalars,
    at: Streams,
    g: np.uint64,
    form: Any,
    cursor: np.uint64,
    chunk: np.uint64,
    start: int,
    count: int,
) -> None:
    """Moves the values of one chunk. g: address of their gradient; form: see `values_at`.

    It stays open until the next one is, which is saved in the other half of the log.
    """
    _save(at, kept, chunk, start, count)
    mark(cursor, (chunk << ONE) | ONE)
    _move(kind, kept, coef, at, g, form, start, 0, count)


@inlined
def _save_line(at: Streams, kept: int, chunk: np.uint64, start: int, low: int, count: int) -> None:
    """Saves some values of the piece that begins at `start`, from its low-th on."""
    here, there = np.uint64((start + low) * 4), _half(at, chunk) + np.uint64(low * 4)
    _copy(floats(there, count), floats(at.weights + here, count))
    if kept > 0:
        _copy(floats(there + CHUNK_BYTES, count), floats(at.slot0 + here, count))
    if kept > 1:
        two = CHUNK_BYTES + CHUNK_BYTES
        _copy(floats(there + two, count), floats(at.slot1 + here, count))


@compiled
def _change_rest(
    kind: int,
    kept: int,
    coef: cpu.Scalars,
    at: Streams,
    g: np.uint64,
    form: Any,
    cursor: np.uint64,
    chunk: int,
    start: int,
    count: int,
) -> None:
    """The same for a piece that is no whole chunk, the end of a row most often.

    Compiled once for all kinds, and by lines: a loop of vectors over a length that is not known
    would do most of so few values one by one.
    """
    whole = count - count % LINE
    for low in range(0, whole, LINE):
        _save_line(at, kept, np.uint64(chunk), start, low, LINE)
    if whole < count:
        _save_line(at, kept, np.uint64(chunk), start, whole, count - whole)
    mark(cursor, (np.uint64(chunk) << ONE) | ONE)
    for low in range(0, whole, LINE):
        _move(kind, kept, coef, at, g, form, start, low, LINE)
    if whole < count:
        _move(kind, kept, coef, at, g, form, start, whole, count - whole)


@inlined
def _change(
    kind: int,
    kept: int,
    coef: cpu.Scalars,
    at: Streams,
    g: np.uint64,
    form: Any,
    cursor: np.uint64,
    chunk: int,
    start: int,
    end: int,
) -> None:
    """Moves values start to end, whole chunks of one role. start: where the chunk-th begins.

    kind and kept are constants where this is called, and so is the length of a chunk here: it is
    too short to pay for a choice or for what is left over by a loop of vectors.
    """
    position = np.uint64(chunk)
    for low in range(start, end, CHUNK):
        _change_chunk(kind, kept, coef, at, g, form, cursor, position, low, CHUNK)
        position += ONE
        g += np.uint64(CHUNK) * bytes_of(form)


@compiled
def move_span(
    kind: int,
    kept: int,
    coef: cpu.Scalars,
    at: Streams,
    g: np.uint64,
    form: Any,
    cursor: np.uint64,
    chunk: int,
    start: int,
    end: int,
) -> None:
    """Moves values start to end, all of one role, the first of them in the chunk-th chunk."""
    rest = (end - start) % CHUNK
    whole = end - rest
    if kind == BUFFER:
        _change(BUFFER, 0, coef, at, g, form, cursor, chunk, start, whole)
    elif kind == cpu.SGD:
        _change(cpu.SGD, 0, coef, at, g, form, cursor, chunk, start, whole)
    elif kind == cpu.MOMENTUM_SGD:
        _change(cpu.MOMENTUM_SGD, 1, coef, at, g, form, cursor, chunk, start, whole)
    elif kind == cpu.NESTEROV:
        _change(cpu.NESTEROV, 1, coef, at, g, form, cursor, chunk, start, whole)
    elif kind == cpu.ADAGRAD:
        _change(cpu.ADAGRAD, 1, coef, at, g, form, cursor, chunk, start, whole)
    elif kind == cpu.ADAM:
        _change(cpu.ADAM, 2, coef, at, g, form, cursor, chunk, start, whole)
    elif kind == cpu.ADAMW:
        _change(cpu.ADAMW, 2, coef, at, g, form, cursor, chunk, start, whole)
    if rest > 0:
        g += np.uint64(whole - start) * bytes_of(form)
        chunk += (whole - start) // CHUNK
        _change_rest(kind, kept, coef, at, g, form, cursor, chunk, whole, rest)


@compiled
def take_coefficients(s: Shard) -> None:
    """Works out the scalars of the gradient in hand."""
    record = s.state[0].record[s.number]
    coef = doubles(s.at.coef, COEFFICIENTS)
    cpu.coefficients(s.kind, s.c[0].hyper, record.rate, integer(record.step) + 1, coef)


@compiled
def lock(s: Shard) -> None:
    """Makes the sequence lock odd: weights are about to change."""
    word = s.me + SEQUENCE
    put(word, get(word) | ONE)
    fence()  # no weight is written before the lock is seen to be odd


@compiled
def unlock(s: Shard) -> None:
    """All of the gradient is in the weights."""
    mark(s.cursor, ALL_APPLIED)
    word = s.me + SEQUENCE
    put(word, (get(word) | ONE) + ONE)  # SYNC POINT: chunk of weights


@compiled
def apply_chunks(s: Shard, members: int, first: int, reopen: bool) -> None:
    """Applies the dense gradient in hand, or the mean of several, from the first-th chunk on.

    Parameters are moved by the optimizer, buffers by plain addition. The sequence lock of the shard
    is odd meanwhile. reopen: that chunk is open, its old values are in the undo log.
    """
    take_coefficients(s)
    lock(s)
    coef = cpu.scalars(doubles(s.at.coef, COEFFICIENTS))
    hands = borrow(s.hands)
    parameters = integer(s.places[PARAMETERS])
    at = s.at
    # Then it is worked out, block by block.
    mixed = members > 1 or scale_of(s, 0, True) != 1.0
    start = s.low + first * CHUNK
    if reopen:
        kept = s.kept if start < parameters else 0
        restore(at, kept, np.uint64(first), start, min(CHUNK, s.high - start))
    while start < s.high:
        is_parameter = start < parameters
        end = min(s.high, parameters) if is_parameter else s.high
        if mixed or hands[DTYPE, 0] == FLOAT16:
            end = min(end, start + BLOCK)
        count = end - start
        if mixed:
            g = at.mean
            mean = floats(g, count)
            mean[:] = np.float32(0)
            for k in range(members):
                payload = np.uint64(hands[PAYLOAD, k])
                one = gradient_at(payload, hands[DTYPE, k], start, count, at.scratch)
                cpu.accumulate(mean, floats(one, count), scale_of(s, k, is_parameter))
            cpu.scale(mean, 1.0 / members)
        else:
            payload = np.uint64(hands[PAYLOAD, 0])
            g = payload + np.uint64(start * 2)
            if hands[DTYPE, 0] != BFLOAT16:
                g = gradient_at(payload, hands[DTYPE, 0], start, count, at.scratch)
        kind, kept = (s.kind, s.kept) if is_parameter else (BUFFER, 0)
        chunk = (start - s.low) // CHUNK
        if mixed or hands[DTYPE, 0] != BFLOAT16:
            move_span(kind, kept, coef, at, g, AS_FLOAT32, s.cursor, chunk, start, end)
        else:
            move_span(kind, kept, coef, at, g, AS_BFLOAT16, s.cursor, chunk, start, end)
        start = end
    unlock(s)


@compiled
def finish(s: Shard) -> None:
    """Makes what is fully applied count: absolute values only, so that twice is once."""
    record = s.state[0].record[s.number]
    fence()  # who sees the sequence below as applied sees the weights too
    if s.number == 0:
        put(s.control + VERSION, record.version + record.applies)
    if record.ring < np.uint64(MAX_LEARNERS):
        s.state[0].applied[s.number, record.ring] = record.sequence + ONE
    else:
        for row in range(MAX_LEARNERS):
            if s.c[0].superstep_action[row] != SKIP:
                s.state[0].applied[s.number, row] = s.c[0].superstep_upto[row]
        fence()  # the manager goes on from `applied` as soon as it sees this
        record.supersteps = record.sequence
    if record.applies > ZERO:
        record.steps = record.step + ONE
    fence()
    put(s.cursor, IDLE)
