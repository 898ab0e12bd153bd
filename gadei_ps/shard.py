"""A shard: one thread of the parameter server, the only writer of its part of the weights.

`serve` walks all rings on its own, without the GIL, as long as the server lives. The shards never
wait for one another: each has its own tail in every ring, its own count of steps and its own record
of what it is doing (apply.py). The thread of shard 0 also keeps the statistics and the work ledger
(account.py).
"""

from __future__ import annotations

import numpy as np

from gadei_ps import layout
from gadei_ps.account import (
    count_applied,
    count_refused,
    count_superstep,
    depart,
    settle,
    top_up,
    top_up_all,
)
from gadei_ps.apply import (
    APPLY,
    BAD_SEQUENCE,
    IDLE,
    MAX_LEARNERS,
    OK,
    ONE,
    VERSION,
    ZERO,
    Shard,
    apply_chunks,
    begin,
    check_frame,
    compiled,
    finish,
    frame_at,
    integer,
    recover,
    shard_of,
    slot_of,
    take,
)
from gadei_ps.kernels import cpu
from gadei_ps.layout import CONTROL, RING, SHARD
from gadei_ps.places import (
    ELEMENTS,
    QUIT,
    RING_ADDRESS,
    RING_GENERATION,
    RING_SLOT_BYTES,
    RING_SLOTS_AT,
    TABLE,
    TABLE_AT,
    TABLE_VERSION,
    WORDS_AT,
)
from gadei_ps.symbols import bell, clock, get, get32, put, release, shard_sleep, spin_once, words

WORK = np.uint64(layout.offset(CONTROL, "work"))
NO_WORK = int(layout.Work.NONE)
HEAD = np.uint64(layout.offset(RING, "head"))
HOLD = np.uint64(layout.offset(RING, "hold"))
ASKED = np.uint64(layout.offset(RING, "wants"))
SHARD_BELL = np.uint64(layout.offset(CONTROL, "shard_bell"))
MANAGER_BELL = np.uint64(layout.offset(CONTROL, "manager_bell"))
PAUSE = np.uint64(layout.offset(CONTROL, "pause"))
SUPERSTEP = np.uint64(layout.offset(CONTROL, "superstep"))
HEARTBEAT = np.uint64(layout.offset(SHARD, "heartbeat"))
FRAMES = np.uint64(layout.offset(SHARD, "frames"))
SEEN_TABLE = np.uint64(layout.offset(SHARD, "seen_table"))

# The rings as this shard knows them: lines of a uint64 array of shape (KNOWN, MAX_LEARNERS). A line
# is contiguous, because shard_sleep takes the addresses and the heads as C arrays.
KNOWN = 9
RINGS = 0  # addresses
SEEN = 1  # heads that the shard has acted on
ROWS = 2
GENERATIONS = 3
TAILS = 4
HELD = 5  # requests for a consistent pull that have had their time
SLOTS_AT = 6
SLOT_BYTES = 7
WANTS = 8  # what the learner has asked for

BEAT_NS = np.uint64(100_000_000)  # a sleeping shard shows a heartbeat this often
HOLD_S = 0.02  # how long a consistent pull may keep a shard from beginning the next gradient
HOLD_POLL_NS = np.uint64(50_000)
PASSES_PER_CLOCK = 16  # polls of the rings between two looks at the clock while spinning


@compiled
def _look_up(s: Shard, table: np.ndarray, known: np.ndarray) -> int:
    """Takes the table of rings over; returns how many there are."""
    count = 0
    for row in range(MAX_LEARNERS):
        if table[row * TABLE + RING_ADDRESS] != ZERO:
            tail = s.state[0].applied[s.number, row]
            known[RINGS, count] = table[row * TABLE + RING_ADDRESS]
            known[SEEN, count] = tail
            known[ROWS, count] = np.uint64(row)
            known[GENERATIONS, count] = table[row * TABLE + RING_GENERATION]
            known[TAILS, count] = tail
            known[HELD, count] = ZERO
            known[SLOTS_AT, count] = table[row * TABLE + RING_SLOTS_AT]
            known[SLOT_BYTES, count] = table[row * TABLE + RING_SLOT_BYTES]
            known[WANTS, count] = ZERO
            count += 1
    return count


@compiled
def _slot(s: Shard, known: np.ndarray, i: int) -> np.uint64:
    """Address of the oldest frame of the i-th ring. Not from the table, which may be newer."""
    return slot_of(s.c, known[RINGS, i], known[SLOTS_AT, i], known[SLOT_BYTES, i], known[TAILS, i])


@compiled
def _wait_for_pulls(s: Shard, known: np.ndarray, count: int, bell_seen: np.uint32) -> None:
    """Lets a learner that asks for a consistent pull finish it, for a bounded time."""
    for i in range(count):
        at = known[RINGS, i] + HOLD
        request = get32(at)
        if request == 0 or request == known[HELD, i]:
            continue
        end = clock() + HOLD_S
        while get32(at) == request and clock() < end:
            shard_sleep(s.control, ZERO, ZERO, ZERO, bell_seen, HOLD_POLL_NS)
        known[HELD, i] = np.uint64(request)


@compiled
def _consume(s: Shard, known: np.ndarray, i: int, tail: np.uint64) -> None:
    """Frames below `tail` are done with: the learner may fill their slots."""
    known[TAILS, i] = tail
    known[SEEN, i] = tail
    release(known[RINGS, i], np.uint64(s.number), tail)


@compiled
def _is_nonsense(s: Shard, head: np.uint64, tail: np.uint64) -> bool:
    """Whether a ring's head cannot be: it holds at most its slots. Somebody wrote over it."""
    return bool(head - tail > np.uint64(s.c[0].slots))


@compiled
def _on_arrival(s: Shard, known: np.ndarray, i: int) -> None:
    """Applies, or refuses, the oldest frame of the i-th ring."""
    row = integer(known[ROWS, i])
    tail = known[TAILS, i]
    head = get(known[RINGS, i] + HEAD)
    if _is_nonsense(s, head, tail):
        if s.number == 0:
            count_refused(s.c, row, BAD_SEQUENCE)
        s.state[0].applied[s.number, row] = head
        _consume(s, known, i, head)
        return
    slot = _slot(s, known, i)
    frame = frame_at(slot)
    batch = frame[0].batch
    reason = check_frame(s.c, frame, known[GENERATIONS, i], tail, integer(s.places[ELEMENTS]))
    if reason == OK:
        version = get(s.control + VERSION)
        steps = integer(s.state[0].record[s.number].steps)
        rate = cpu.learning_rate(s.c[0].hyper, steps) * frame[0].rate_scale
        if version > frame[0].version:
            rate = cpu.stale_rate(s.c[0].hyper, rate, integer(version - frame[0].version))
        begin(s, row, known[GENERATIONS, i], tail, rate, version, 1)
        take(s, 0, slot)
        apply_chunks(s, 1, 0)
        if s.number == 0:
            count_applied(s.c, row, frame, version)
        finish(s)
    else:
        if s.number == 0:
            count_refused(s.c, row, reason)
        s.state[0].applied[s.number, row] = tail + ONE
    if s.number == 0:
        settle(s.c, row, batch)
        if (
            get32(s.control + WORK) != NO_WORK
            and s.c[0].roster[row].wanted == known[GENERATIONS, i]
        ):
            top_up(s.c, row, known[RINGS, i])
    _consume(s, known, i, tail + ONE)


@compiled
def _superstep(s: Shard, known: np.ndarray, count: int, number: np.uint64) -> None:
    """Applies the mean of the gradients that the sync model has chosen; consumes the others."""
    members = 0
    scale = 0.0
    for i in range(count):
        row = integer(known[ROWS, i])
        if s.c[0].superstep_action[row] == APPLY:
            slot = _slot(s, known, i)
            take(s, members, slot)
            scale += frame_at(slot)[0].rate_scale
            members += 1
    rate = 0.0
    if members > 0:
        steps = integer(s.state[0].record[s.number].steps)
        rate = cpu.learning_rate(s.c[0].hyper, steps) * scale / members
    version = get(s.control + VERSION)
    begin(s, MAX_LEARNERS, ZERO, number, rate, version, members)
    if members > 0:
        apply_chunks(s, members, 0)
    if s.number == 0:
        for i in range(count):
            row = integer(known[ROWS, i])
            count_superstep(s.c, row, _slot(s, known, i), version)
    finish(s)
    for i in range(count):
        # Not by superstep_action: the manager may be writing the next superstep already.
        tail = s.state[0].applied[s.number, integer(known[ROWS, i])]
        if tail != known[TAILS, i]:
            _consume(s, known, i, tail)


@compiled
def _empty(s: Shard, row: int, head: np.uint64) -> bool:
    """Whether every shard has consumed all that was published."""
    for shard in range(s.c[0].shards):  # noqa: SIM110 (compiled: no generators)
        if s.state[0].applied[shard, row] != head:
            return False
    return True


@compiled
def _keep_books(s: Shard, table: np.ndarray, known: np.ndarray, count: int) -> bool:
    """Shard 0: lets the gone depart and hands out work. True if one is to be looked at again."""
    again = False
    for i in range(count):
        row = integer(known[ROWS, i])
        e = s.c[0].roster[row]
        if e.wanted == known[GENERATIONS, i] or e.drained != 0:
            continue
        head = get(known[RINGS, i] + HEAD)
        if _empty(s, row, head) or _is_nonsense(s, head, known[TAILS, i]):
            depart(s.c, row)
            bell(s.control + MANAGER_BELL)
        else:
            again = True
    top_up_all(s.c, table)
    return again


@compiled
def serve(index: int, low: int, high: int, places: np.ndarray) -> int:
    """Serves values low to high of the weights until the manager says quit; returns passes made.

    Parameter server, the thread of this shard. low and high are multiples of CHUNK, but for the end
    of the weights. places: see places.py; all memory behind it stays mapped meanwhile.
    """
    s = shard_of(index, low, high, places)
    table = words(places[TABLE_AT], MAX_LEARNERS * TABLE)
    table_version = places[WORDS_AT] + np.uint64(8 * TABLE_VERSION)
    quit_word = places[WORDS_AT] + np.uint64(8 * QUIT)
    record = s.state[0].record[index]
    collect = s.c[0].collect != 0
    report = collect or s.c[0].report != 0
    spin_s = s.c[0].spin_ns * 1e-9
    known = np.zeros((KNOWN, MAX_LEARNERS), np.uint64)
    count = 0
    known_table = IDLE
    books_bell = np.uint32(0)
    books_due = True
    beat = ZERO
    passes = 0
    spin_until = 0.0

    while True:
        beat += ONE
        put(s.me + HEARTBEAT, beat)
        bell_seen = get32(s.control + SHARD_BELL)
        superstep = get(s.control + SUPERSTEP)  # before the table, so that its rings are known
        if get(table_version) != known_table:
            known_table = get(table_version)
            count = _look_up(s, table, known)
            put(s.me + SEEN_TABLE, known_table)
            bell(s.control + MANAGER_BELL)
            books_due = True
        if get(quit_word) != ZERO:
            return integer(beat)
        s.c[0].shard[index].parked = np.uint32(get32(s.control + PAUSE) != 0)
        if s.c[0].shard[index].parked != 0:
            bell(s.control + MANAGER_BELL)
            shard_sleep(s.control, ZERO, ZERO, ZERO, bell_seen, BEAT_NS)
            continue

        progress = False
        heard = False
        _wait_for_pulls(s, known, count, bell_seen)
        if collect:
            if superstep > record.supersteps:
                _superstep(s, known, count, superstep)
                progress = True
            if index == 0:
                for i in range(count):
                    head = get(known[RINGS, i] + HEAD)  # SYNC POINT: frame
                    heard = heard or head != known[SEEN, i]
                    known[SEEN, i] = head
        else:
            for i in range(count):
                if get(known[RINGS, i] + HEAD) != known[TAILS, i]:  # SYNC POINT: frame
                    _on_arrival(s, known, i)
                    progress = True
        if index == 0:
            for i in range(count):
                wants = np.uint64(get32(known[RINGS, i] + ASKED))
                if wants != known[WANTS, i]:
                    known[WANTS, i] = wants
                    books_due = True
                    heard = True
        if progress:
            put(s.me + FRAMES, record.steps)
            books_due = True
        if index == 0 and (books_due or bell_seen != books_bell):
            books_bell = bell_seen
            books_due = _keep_books(s, table, known, count)
        if report and (progress or heard):
            bell(s.control + MANAGER_BELL)

        if progress or heard:
            passes = 0
            continue
        passes += 1
        spin_once()
        if passes == 1:
            spin_until = clock() + spin_s
        if passes % PASSES_PER_CLOCK or clock() < spin_until:
            continue
        watched = count
        if collect and index != 0:
            watched = 0
        shard_sleep(
            s.control,
            known[RINGS].ctypes.data,
            known[SEEN].ctypes.data,
            np.uint64(watched),
            bell_seen,
            BEAT_NS,
        )
        passes = 0


SIGNATURE = "int64(int64, int64, int64, uint64[::1])"


def load() -> None:
    """Loads `serve` and `recover` from Numba's cache, or compiles them (some 20 s, once)."""
    for function in (recover, serve):
        function.compile(SIGNATURE)  # type: ignore[attr-defined]
