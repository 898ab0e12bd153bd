"""A shard: one thread of the parameter server, the only writer of its part of the weights.

`serve` walks all rings on its own, without the GIL, as long as the server lives. The shards never
wait for one another: each has its own tail in every ring, its own count of steps and its own record
of what it is doing.

How a gradient is applied, so that whoever takes over after SIGKILL can finish it exactly once:

    record: which frame, which step, which rate          then cursor = 0
    for each chunk:  weights and slots -> undo log       then cursor = chunk << 1 | 1
                     update                              then cursor = (chunk + 1) << 1
    applied sequence, steps, version: absolute values    then cursor = IDLE
    the ring's tail                                                    SYNC POINT: slot

Every `then` is a release store through an opaque call, which no load or store crosses. `recover`
reads this backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from gadei_ps import layout, ledger
from gadei_ps.kernels import cpu
from gadei_ps.kernels.optimizers import COEFFICIENTS, Kind
from gadei_ps.kernels.optimizers import slots as optimizer_slots
from gadei_ps.layout import (
    CONTROL,
    FRAME,
    RECORD,
    RING,
    SHARD,
    STATE,
    Action,
    Reason,
    WireType,
)
from gadei_ps.symbols import (
    bell,
    clock,
    fence,
    floats,
    get,
    get32,
    halves,
    hand_out,
    put,
    release,
    shard_sleep,
    spin_once,
    structs,
    wake,
    words,
)

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compiled without the GIL; keeps the signature for the type checker."""
    made: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return made


CHUNK = layout.CHUNK
MAX_LEARNERS = layout.MAX_LEARNERS
HISTOGRAM = layout.HISTOGRAM
PAYLOAD_AT = np.uint64(layout.PAYLOAD_AT)
IDLE = np.uint64(layout.IDLE)
NO_BATCH = np.uint64(layout.NO_BATCH)
ONE = np.uint64(1)
ZERO = np.uint64(0)
CHECKED = np.uint32(layout.CHECKED)
NONFINITE = np.uint32(layout.NONFINITE)
DENSE = int(layout.FrameKind.DENSE)
FLOAT32 = int(WireType.FLOAT32)
BFLOAT16 = int(WireType.BFLOAT16)
FLOAT16 = int(WireType.FLOAT16)
APPLY = int(Action.APPLY)
DROP = int(Action.DROP)
REFUSE = int(Action.REFUSE)
SKIP = int(Action.SKIP)
NONE = int(layout.Work.NONE)
WORKING = int(layout.Work.WORKING)
OK = int(Reason.OK)
BAD_KIND = int(Reason.BAD_KIND)
BAD_DTYPE = int(Reason.BAD_DTYPE)
BAD_SIZE = int(Reason.BAD_SIZE)
BAD_GENERATION = int(Reason.BAD_GENERATION)
BAD_SEQUENCE = int(Reason.BAD_SEQUENCE)
UNCHECKED = int(Reason.UNCHECKED)
NOT_FINITE = int(Reason.NOT_FINITE)
BAD_SCALE = int(Reason.BAD_SCALE)


_control = structs(CONTROL)
_state = structs(STATE)
_frame = structs(FRAME)


def _at(struct: np.dtype[np.void], field: str) -> np.uint64:
    return np.uint64(layout.offset(struct, field))


HEAD = _at(RING, "head")
HOLD = _at(RING, "hold")
WORK_HEAD = _at(RING, "work_head")
SHARDS = _at(CONTROL, "shard")
SHARD_BYTES = np.uint64(SHARD.itemsize)
HEARTBEAT = _at(SHARD, "heartbeat")
SEQUENCE = _at(SHARD, "sequence")
FRAMES = _at(SHARD, "frames")
PARKED = _at(SHARD, "parked")
SEEN_TABLE = _at(SHARD, "seen_table")
SHARD_BELL = _at(CONTROL, "shard_bell")
MANAGER_BELL = _at(CONTROL, "manager_bell")
PAUSE = _at(CONTROL, "pause")
VERSION = _at(CONTROL, "version")
SUPERSTEP = _at(CONTROL, "superstep")
SUPERSTEPS_DONE = _at(CONTROL, "supersteps_done")
RECORDS = _at(STATE, "record")
RECORD_BYTES = np.uint64(RECORD.itemsize)
CURSOR = _at(RECORD, "cursor")

# The table of rings, process-local: columns of a uint64 array of shape (MAX_LEARNERS, TABLE).
TABLE = 4
RING_ADDRESS = 0  # 0: the row is not served
RING_GENERATION = 1
RING_SLOT_BYTES = 2
RING_SLOTS_AT = 3

# Words between the manager and its shards, process-local: a uint64 array of shape (WORDS,).
WORDS = 2
TABLE_VERSION = 0
QUIT = 1

# Addresses and sizes that a shard works with: a uint64 array of shape (PLACES,).
PLACES = 10
CONTROL_AT = 0
STATE_AT = 1
WEIGHTS_AT = 2
SLOT0_AT = 3
SLOT1_AT = 4
UNDO_AT = 5
TABLE_AT = 6
WORDS_AT = 7
ELEMENTS = 8
PARAMETERS = 9

BEAT_NS = np.uint64(100_000_000)  # a sleeping shard shows a heartbeat this often
HOLD_S = 0.02  # how long a consistent pull may keep a shard from beginning the next gradient
PASSES_PER_CLOCK = 16  # polls of the rings between two looks at the clock while spinning


def streams(kind: int) -> int:
    """Optimizer slots of a kind: 0, 1 or 2."""
    return optimizer_slots(Kind(kind))


@compiled
def _int(value: Any) -> int:
    """As a signed word: Numba makes a float of signed and unsigned words mixed."""
    return np.int64(value)  # type: ignore[return-value]


@compiled
def check_frame(
    c: np.ndarray, frame: np.ndarray, generation: np.uint64, sequence: np.uint64, elements: int
) -> int:
    """Why the frame must not be applied; OK if it may. Every shard comes to the same answer.

    c: CONTROL, shape (1,). frame: FRAME, shape (1,).
    """
    if frame[0].generation != generation:
        return BAD_GENERATION
    if frame[0].sequence != sequence:
        return BAD_SEQUENCE
    if frame[0].kind != DENSE:
        return BAD_KIND
    if frame[0].dtype == FLOAT32:
        size = 4
    elif frame[0].dtype == BFLOAT16 or frame[0].dtype == FLOAT16:
        size = 2
    else:
        return BAD_DTYPE
    if frame[0].payload_bytes != np.uint64(elements * size):
        return BAD_SIZE
    if c[0].refuse_nonfinite:
        if not frame[0].flags & CHECKED:
            return UNCHECKED
        if frame[0].flags & NONFINITE:
            return NOT_FINITE
    scale = frame[0].rate_scale
    if not (scale >= 0.0 and math.isfinite(scale)):
        return BAD_SCALE
    return OK


@compiled
def staleness_bin(staleness: np.uint64) -> int:
    """0 to 15 have a bin each, then one bin for each power of two; the last takes the rest."""
    if staleness < np.uint64(16):
        return _int(staleness)
    bin_ = 16
    rest = staleness >> np.uint64(5)
    while rest > ZERO and bin_ < HISTOGRAM - 1:
        rest >>= ONE
        bin_ += 1
    return bin_


@compiled
def _gradient(dtype: int, payload: np.uint64, begin: int, count: int, scratch: np.ndarray):  # type: ignore[no-untyped-def]
    """Values begin to begin + count of a dense payload, as float32; decoded ones in `scratch`."""
    if dtype == FLOAT32:
        return floats(payload + np.uint64(begin * 4), count)
    source = halves(payload + np.uint64(begin * 2), count)
    if dtype == BFLOAT16:
        cpu.decode_bfloat16(source, scratch[:count])
    else:
        cpu.decode_float16(source, scratch[:count])
    return scratch[:count]


@compiled
def _copy(to: np.ndarray, source: np.ndarray) -> None:
    for i in range(source.size):
        to[i] = source[i]


@compiled
def _save(places: np.ndarray, kept: int, begin: int, count: int) -> None:
    """The chunk's weights and slots go into the undo log."""
    at = np.uint64(begin * 4)
    step = np.uint64(CHUNK * 4)
    _copy(floats(places[UNDO_AT], count), floats(places[WEIGHTS_AT] + at, count))
    if kept > 0:
        _copy(floats(places[UNDO_AT] + step, count), floats(places[SLOT0_AT] + at, count))
    if kept > 1:
        _copy(floats(places[UNDO_AT] + step + step, count), floats(places[SLOT1_AT] + at, count))


@compiled
def _restore(places: np.ndarray, kept: int, begin: int, count: int) -> None:
    at = np.uint64(begin * 4)
    step = np.uint64(CHUNK * 4)
    _copy(floats(places[WEIGHTS_AT] + at, count), floats(places[UNDO_AT], count))
    if kept > 0:
        _copy(floats(places[SLOT0_AT] + at, count), floats(places[UNDO_AT] + step, count))
    if kept > 1:
        _copy(floats(places[SLOT1_AT] + at, count), floats(places[UNDO_AT] + step + step, count))


@compiled
def _apply_chunks(
    places: np.ndarray,
    kind: int,
    kept: int,
    low: int,
    high: int,
    first: int,
    cursor: np.uint64,
    coef: np.ndarray,
    payloads: np.ndarray,
    dtypes: np.ndarray,
    members: int,
    scratch: np.ndarray,
    mean: np.ndarray,
) -> None:
    """Applies one gradient, or the mean of several, to values low to high, from a chunk on.

    payloads, dtypes: of the gradients, the first `members` of them. Parameters are moved by the
    optimizer, buffers by plain addition.
    """
    parameters = _int(places[PARAMETERS])
    chunk = first
    for begin in range(low + first * CHUNK, high, CHUNK):
        count = min(CHUNK, high - begin)
        is_parameter = begin < parameters
        _save(places, kept if is_parameter else 0, begin, count)
        put(cursor, (np.uint64(chunk) << ONE) | ONE)
        if members == 1:
            g = _gradient(dtypes[0], payloads[0], begin, count, scratch)
        else:
            _copy(mean, _gradient(dtypes[0], payloads[0], begin, count, scratch))
            for k in range(1, members):
                cpu.accumulate(
                    mean[:count], _gradient(dtypes[k], payloads[k], begin, count, scratch)
                )
            cpu.scale(mean[:count], 1.0 / members)
            g = mean[:count]
        at = np.uint64(begin * 4)
        w = floats(places[WEIGHTS_AT] + at, count)
        if is_parameter:
            s0 = floats(places[SLOT0_AT] + at, count if kept > 0 else 0)
            s1 = floats(places[SLOT1_AT] + at, count if kept > 1 else 0)
            cpu.update(kind, coef, w, s0, s1, g)
        else:
            cpu.add(w, g)
        chunk += 1
        put(cursor, np.uint64(chunk) << ONE)


@compiled
def _account(c: np.ndarray, row: int, frame: np.ndarray, version: np.uint64) -> None:
    """Shard 0: what the statistics keep of a gradient that is applied."""
    e = c[0].roster[row]
    e.applied += ONE
    e.samples += np.uint64(frame[0].samples)
    e.loss = frame[0].loss
    e.started = frame[0].started
    e.finished = frame[0].finished
    e.version = frame[0].version
    e.clock = frame[0].clock
    pulled = frame[0].version
    staleness = version - pulled if version > pulled else ZERO
    e.staleness_sum += staleness
    e.staleness_max = max(e.staleness_max, staleness)
    c[0].roster[row].histogram[staleness_bin(staleness)] += ONE


@compiled
def _settle(c: np.ndarray, row: int, batch: np.uint64) -> None:
    if batch != NO_BATCH and not ledger.settle(c, row, batch):
        c[0].roster[row].unasked += ONE


@compiled
def _top_up(c: np.ndarray, row: int, ring: np.uint64) -> bool:
    """Hands out batches until the learner holds as many as it may. True if it got one."""
    got = False
    missing = _int(c[0].ahead) - ledger.held(c, row)
    for _ in range(missing):
        batch = ledger.assign(c, row)
        if batch == NO_BATCH:
            break
        hand_out(ring, batch)
        got = True
    return got


@compiled
def _ledger_pass(c: np.ndarray, table: np.ndarray) -> None:
    """Shard 0: closes epochs and hands out what can be handed out."""
    if c[0].work == NONE:
        return
    changed = ledger.close_epochs(c)
    for row in range(MAX_LEARNERS):
        ring = table[row * TABLE + RING_ADDRESS]
        if ring != ZERO and c[0].roster[row].wanted == table[row * TABLE + RING_GENERATION]:
            _top_up(c, row, ring)
            if changed:
                wake(ring + WORK_HEAD)


@compiled
def _depart(c: np.ndarray, row: int) -> None:
    """Shard 0: a learner is gone and its ring is empty; its unanswered batches go to others."""
    ledger.requeue_all(c, row)
    e = c[0].roster[row]
    c[0].past_applied += e.applied
    c[0].past_dropped += e.dropped
    c[0].past_refused += e.refused
    c[0].past_samples += e.samples
    e.applied = ZERO
    e.dropped = ZERO
    e.refused = ZERO
    e.samples = ZERO
    e.drained = np.uint32(1)


@compiled
def _refuse(c: np.ndarray, row: int, reason: int) -> None:
    """Shard 0: counts a bad frame and keeps its reason."""
    c[0].roster[row].refused += ONE
    c[0].roster[row].reason = np.uint32(reason)


@compiled
def _empty(state: np.ndarray, shards: int, row: int, head: np.uint64) -> bool:
    """Whether every shard has consumed all that was published."""
    for shard in range(shards):  # noqa: SIM110 (compiled: no generators)
        if state[0].applied[shard, row] != head:
            return False
    return True


@compiled
def _finish(c: np.ndarray, state: np.ndarray, shard: int) -> None:
    """Makes a gradient that is fully applied count: absolute values only, so twice is once."""
    r = state[0].record[shard]
    if r.ring < np.uint64(MAX_LEARNERS):
        state[0].applied[shard, r.ring] = r.sequence + ONE
    else:
        for row in range(MAX_LEARNERS):
            if c[0].superstep_action[row] != SKIP:
                state[0].applied[shard, row] = c[0].superstep_upto[row]
        r.supersteps = r.sequence
    if r.applies > ZERO:
        r.steps = r.step + ONE
    fence()


@compiled
def _begin(
    state: np.ndarray,
    shard: int,
    ring: int,
    generation: np.uint64,
    sequence: np.uint64,
    rate: float,
    version: np.uint64,
    applies: int,
    cursor: np.uint64,
) -> None:
    """Writes down what is about to be applied."""
    record = state[0].record[shard]
    record.ring = np.uint64(ring)
    record.generation = generation
    record.sequence = sequence
    record.step = record.steps
    record.rate = rate
    record.version = version
    record.applies = np.uint64(applies)
    put(cursor, ZERO)


@compiled
def _wait_for_pulls(
    rings: np.ndarray, held: np.ndarray, count: int, control: np.uint64, bell_seen: np.uint32
) -> None:
    """Lets a learner that asks for a consistent pull finish it, for a bounded time.

    held: for each ring the request that has had its time and is ignored from now on.
    """
    for i in range(count):
        request = get32(rings[i] + HOLD)
        if request == 0 or request == held[i]:
            continue
        end = clock() + HOLD_S
        while get32(rings[i] + HOLD) == request and clock() < end:
            shard_sleep(control, ZERO, ZERO, ZERO, bell_seen, np.uint64(50_000))
        held[i] = request


@compiled
def serve(shard: int, low: int, high: int, places: np.ndarray) -> int:
    """Serves values low to high of the weights until the manager says quit; returns frames applied.

    Parameter server, the thread of this shard. low and high are multiples of CHUNK, but for the end
    of the weights. places: see the constants above; all memory behind it stays mapped meanwhile.
    """
    control = places[CONTROL_AT]
    c = _control(control)
    state = _state(places[STATE_AT])
    me = control + SHARDS + np.uint64(shard) * SHARD_BYTES
    cursor = places[STATE_AT] + RECORDS + np.uint64(shard) * RECORD_BYTES + CURSOR
    table = words(places[TABLE_AT], MAX_LEARNERS * TABLE)
    table_version = places[WORDS_AT] + np.uint64(8 * TABLE_VERSION)
    quit_word = places[WORDS_AT] + np.uint64(8 * QUIT)
    elements = _int(places[ELEMENTS])
    kind = _int(c[0].optimizer)
    kept = 0
    if places[SLOT0_AT] != ZERO:
        kept = 1
    if places[SLOT1_AT] != ZERO:
        kept = 2
    collect = c[0].collect != 0
    report = c[0].report != 0
    slots = np.uint64(c[0].slots)
    spin_s = c[0].spin_ns * 1e-9
    hyper = c[0].hyper
    record = state[0].record[shard]

    rows = np.zeros(MAX_LEARNERS, np.int64)
    rings = np.zeros(MAX_LEARNERS, np.uint64)
    generations = np.zeros(MAX_LEARNERS, np.uint64)
    tails = np.zeros(MAX_LEARNERS, np.uint64)
    seen = np.zeros(MAX_LEARNERS, np.uint64)  # heads that this shard has acted on
    held = np.zeros(MAX_LEARNERS, np.uint32)
    payloads = np.zeros(MAX_LEARNERS, np.uint64)
    dtypes = np.zeros(MAX_LEARNERS, np.int64)
    scratch = np.zeros(CHUNK, np.float32)
    mean = np.zeros(CHUNK, np.float32)
    coef = np.zeros(COEFFICIENTS, np.float64)
    count = 0
    known_table = IDLE
    ledger_bell = np.uint32(0)
    ledger_looked = False
    consumed = 0
    beat = ZERO
    idle_since = 0.0
    passes = 0

    while True:
        beat += ONE
        put(me + HEARTBEAT, beat)
        bell_seen = get32(control + SHARD_BELL)
        superstep = get(control + SUPERSTEP)  # before the table, so that its rings are known
        version_of_table = get(table_version)
        if version_of_table != known_table:
            count = 0
            for row in range(MAX_LEARNERS):
                if table[row * TABLE + RING_ADDRESS] != ZERO:
                    rows[count] = row
                    rings[count] = table[row * TABLE + RING_ADDRESS]
                    generations[count] = table[row * TABLE + RING_GENERATION]
                    tails[count] = state[0].applied[shard, row]
                    seen[count] = tails[count]
                    held[count] = np.uint32(0)
                    count += 1
            known_table = version_of_table
            put(me + SEEN_TABLE, known_table)
            ledger_looked = False
            bell(control + MANAGER_BELL)
        if get(quit_word) != ZERO:
            return consumed
        if get32(control + PAUSE) != 0:
            c[0].shard[shard].parked = np.uint32(1)
            bell(control + MANAGER_BELL)
            shard_sleep(control, ZERO, ZERO, ZERO, bell_seen, BEAT_NS)
            continue
        c[0].shard[shard].parked = np.uint32(0)
        progress = False

        if collect:
            if superstep > record.supersteps:
                _wait_for_pulls(rings, held, count, control, bell_seen)
                members = 0
                scale = 0.0
                for i in range(count):
                    row = rows[i]
                    if c[0].superstep_action[row] != APPLY:
                        continue
                    slot = (tails[i] % slots) * table[row * TABLE + RING_SLOT_BYTES]
                    at = rings[i] + table[row * TABLE + RING_SLOTS_AT] + slot
                    frame = _frame(at)
                    payloads[members] = at + PAYLOAD_AT
                    dtypes[members] = _int(frame[0].dtype)
                    scale += frame[0].rate_scale
                    members += 1
                rate = 0.0
                if members > 0:
                    rate = cpu.learning_rate(hyper, _int(record.steps)) * scale / members
                _begin(
                    state, shard, MAX_LEARNERS, ZERO, superstep, rate, c[0].version, members, cursor
                )
                if members > 0:
                    cpu.coefficients(kind, hyper, rate, _int(record.step) + 1, coef)
                    put(me + SEQUENCE, get(me + SEQUENCE) + ONE)
                    _apply_chunks(
                        places,
                        kind,
                        kept,
                        low,
                        high,
                        0,
                        cursor,
                        coef,
                        payloads,
                        dtypes,
                        members,
                        scratch,
                        mean,
                    )
                    put(me + SEQUENCE, get(me + SEQUENCE) + ONE)
                    consumed += members
                if shard == 0:
                    for i in range(count):
                        row = rows[i]
                        action = c[0].superstep_action[row]
                        if action == SKIP:
                            continue
                        slot = (tails[i] % slots) * table[row * TABLE + RING_SLOT_BYTES]
                        frame = _frame(rings[i] + table[row * TABLE + RING_SLOTS_AT] + slot)
                        if action == APPLY:
                            _account(c, row, frame, c[0].version)
                            _settle(c, row, frame[0].batch)
                        elif action == DROP:
                            c[0].roster[row].dropped += ONE
                            ledger.requeue(c, row, frame[0].batch)
                        else:
                            _refuse(c, row, _int(c[0].superstep_reason[row]))
                            _settle(c, row, frame[0].batch)
                    put(control + VERSION, record.version + np.uint64(members))
                _finish(c, state, shard)
                put(cursor, IDLE)
                for i in range(count):
                    if c[0].superstep_action[rows[i]] != SKIP:
                        tails[i] = state[0].applied[shard, rows[i]]
                        release(rings[i], np.uint64(shard), tails[i])
                put(me + FRAMES, record.steps)
                bell(control + MANAGER_BELL)
                progress = True
                ledger_looked = False
            if shard == 0:
                for i in range(count):
                    head = get(rings[i] + HEAD)
                    if head != seen[i]:
                        seen[i] = head
                        bell(control + MANAGER_BELL)
                        progress = True
        else:
            _wait_for_pulls(rings, held, count, control, bell_seen)
            for i in range(count):
                head = get(rings[i] + HEAD)  # SYNC POINT: frame
                seen[i] = tails[i]
                if head == tails[i]:
                    continue
                row = rows[i]
                slot = (tails[i] % slots) * table[row * TABLE + RING_SLOT_BYTES]
                at = rings[i] + table[row * TABLE + RING_SLOTS_AT] + slot
                frame = _frame(at)
                reason = check_frame(c, frame, generations[i], tails[i], elements)
                if reason == OK:
                    version = get(control + VERSION)
                    rate = cpu.learning_rate(hyper, _int(record.steps)) * frame[0].rate_scale
                    pulled = frame[0].version
                    if version > pulled:
                        rate = cpu.stale_rate(hyper, rate, _int(version - pulled))
                    _begin(state, shard, row, generations[i], tails[i], rate, version, 1, cursor)
                    cpu.coefficients(kind, hyper, rate, _int(record.step) + 1, coef)
                    payloads[0] = at + PAYLOAD_AT
                    dtypes[0] = _int(frame[0].dtype)
                    put(me + SEQUENCE, get(me + SEQUENCE) + ONE)
                    _apply_chunks(
                        places,
                        kind,
                        kept,
                        low,
                        high,
                        0,
                        cursor,
                        coef,
                        payloads,
                        dtypes,
                        1,
                        scratch,
                        mean,
                    )
                    put(me + SEQUENCE, get(me + SEQUENCE) + ONE)
                    if shard == 0:
                        _account(c, row, frame, version)
                        put(control + VERSION, version + ONE)
                    _finish(c, state, shard)
                    put(cursor, IDLE)
                    consumed += 1
                    put(me + FRAMES, record.steps)
                else:
                    if shard == 0:
                        _refuse(c, row, reason)
                    state[0].applied[shard, row] = tails[i] + ONE
                if shard == 0:
                    _settle(c, row, frame[0].batch)
                    if c[0].work == WORKING:
                        _top_up(c, row, rings[i])
                        ledger_looked = False
                tails[i] += ONE
                seen[i] = tails[i]
                release(rings[i], np.uint64(shard), tails[i])
                if report:
                    bell(control + MANAGER_BELL)
                progress = True

        if shard == 0 and (not ledger_looked or bell_seen != ledger_bell):
            ledger_looked = True
            ledger_bell = bell_seen
            for i in range(count):
                row = rows[i]
                if c[0].roster[row].wanted != generations[i] and c[0].roster[row].drained == 0:
                    if _empty(state, _int(c[0].shards), row, get(rings[i] + HEAD)):
                        _depart(c, row)
                        bell(control + MANAGER_BELL)
                    else:
                        ledger_looked = False
            if c[0].work == WORKING:
                _ledger_pass(c, table)
                if collect or report:
                    bell(control + MANAGER_BELL)

        if progress:
            idle_since = 0.0
            passes = 0
            continue
        passes += 1
        spin_once()
        if passes % PASSES_PER_CLOCK:
            continue
        if idle_since == 0.0:
            idle_since = clock()
        if clock() - idle_since < spin_s:
            continue
        watched = count
        if collect and shard != 0:
            watched = 0
        shard_sleep(
            control, rings.ctypes.data, seen.ctypes.data, np.uint64(watched), bell_seen, BEAT_NS
        )
        idle_since = 0.0


@compiled
def recover(shard: int, low: int, high: int, places: np.ndarray) -> int:
    """Finishes what a server that died was applying; whoever has taken the lease, before `serve`.

    Rolls the open chunk back from the undo log and goes on from it. Returns 1 if a gradient was in
    hand. The frame is still in its ring, because its tail moves last.
    """
    control = places[CONTROL_AT]
    c = _control(control)
    state = _state(places[STATE_AT])
    table = words(places[TABLE_AT], MAX_LEARNERS * TABLE)
    cursor = places[STATE_AT] + RECORDS + np.uint64(shard) * RECORD_BYTES + CURSOR
    me = control + SHARDS + np.uint64(shard) * SHARD_BYTES
    record = state[0].record[shard]
    position = get(cursor)
    in_hand = 0
    if position != IDLE:
        in_hand = 1
        kind = _int(c[0].optimizer)
        kept = 0
        if places[SLOT0_AT] != ZERO:
            kept = 1
        if places[SLOT1_AT] != ZERO:
            kept = 2
        chunk = _int(position >> ONE)
        begin = low + chunk * CHUNK
        if position & ONE:
            count = min(CHUNK, high - begin)
            _restore(places, kept if begin < _int(places[PARAMETERS]) else 0, begin, count)
            put(cursor, np.uint64(chunk) << ONE)
        payloads = np.zeros(MAX_LEARNERS, np.uint64)
        dtypes = np.zeros(MAX_LEARNERS, np.int64)
        scratch = np.zeros(CHUNK, np.float32)
        mean = np.zeros(CHUNK, np.float32)
        coef = np.zeros(COEFFICIENTS, np.float64)
        members = 0
        for row in range(MAX_LEARNERS):
            ring = table[row * TABLE + RING_ADDRESS]
            if ring == ZERO:
                continue
            if record.ring == np.uint64(row):
                sequence = record.sequence
            elif record.ring == np.uint64(MAX_LEARNERS) and c[0].superstep_action[row] == APPLY:
                sequence = c[0].superstep_upto[row] - ONE
            else:
                continue
            slot = (sequence % np.uint64(c[0].slots)) * table[row * TABLE + RING_SLOT_BYTES]
            at = ring + table[row * TABLE + RING_SLOTS_AT] + slot
            payloads[members] = at + PAYLOAD_AT
            dtypes[members] = _int(_frame(at)[0].dtype)
            members += 1
        if members > 0:
            cpu.coefficients(kind, c[0].hyper, record.rate, _int(record.step) + 1, coef)
            _apply_chunks(
                places,
                kind,
                kept,
                low,
                high,
                chunk,
                cursor,
                coef,
                payloads,
                dtypes,
                members,
                scratch,
                mean,
            )
        if shard == 0:
            put(control + VERSION, record.version + record.applies)
        _finish(c, state, shard)
        put(cursor, IDLE)
    if get(me + SEQUENCE) & ONE:
        put(me + SEQUENCE, get(me + SEQUENCE) + ONE)
    for row in range(MAX_LEARNERS):
        ring = table[row * TABLE + RING_ADDRESS]
        if ring != ZERO:
            release(ring, np.uint64(shard), state[0].applied[shard, row])
    return in_hand


SIGNATURE = "int64(int64, int64, int64, uint64[::1])"


def load() -> None:
    """Loads `serve` and `recover` from Numba's cache, or compiles them (some 20 s, once)."""
    for function in (recover, serve):
        function.compile(SIGNATURE)  # type: ignore[attr-defined]
