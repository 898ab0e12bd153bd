"""A shard: one thread of the parameter server, the only writer of its part of the weights.

`serve` walks all rings on its own, without the GIL, as long as the server lives. The shards never
wait for one another: each has its own tail in every ring, its own count of steps and its own record
of what it is doing (apply.py). The thread of shard 0 also keeps the statistics and the work ledger
(account.py).
"""

from __future__ import annotations

import numpy as np

from gadei_ps import _native
from gadei_ps.kernels import cpu
from gadei_ps.kernels.compiled import compiled
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, RING, SHARD, STATE, Mode
from gadei_ps.server.account import (
    DROP,
    GIVEN_UP,
    REFUSE,
    book_arrival,
    book_refusal,
    book_superstep,
    depart,
    note_run,
    show_all_work,
    show_work,
    takes_work,
    top_up_all,
)
from gadei_ps.server.apply import (
    APPLY,
    IDLE,
    MAX_LEARNERS,
    OK,
    ONE,
    SKIP,
    VERSION,
    ZERO,
    Shard,
    begin,
    finish,
    frame_at,
    integer,
    shard_of,
    slot_of,
    take,
)
from gadei_ps.server.frames import BAD_SEQUENCE, check_frame
from gadei_ps.server.places import (
    HOLDS,
    QUIT,
    RING_ADDRESS,
    RING_GENERATION,
    RING_SLOT_BYTES,
    RING_SLOTS_AT,
    SEEN,
    TABLE,
    TABLE_AT,
    TABLE_VERSION,
    WORDS_AT,
)
from gadei_ps.server.recover import can_recover, recover
from gadei_ps.server.rows import applier, apply_frames
from gadei_ps.server.symbols import (
    bell,
    clock,
    cpu_here,
    get,
    get32,
    lease_take,
    put,
    put32,
    release,
    shard_sleep,
    spin_on,
    spin_once,
    thread_id,
    wide_awake,
    words,
)

NO_BATCH = np.uint64(layout.NO_BATCH)
ROSTER = np.uint64(layout.offset(CONTROL, "roster"))
ENTRY_BYTES = np.uint64(ENTRY.itemsize)
WANTED = np.uint64(layout.offset(ENTRY, "wanted"))
SERVED = np.uint64(layout.offset(ENTRY, "served"))
RETIRED = np.uint64(layout.offset(ENTRY, "retired"))
DRAINED = np.uint64(layout.offset(ENTRY, "drained"))
APPLIED = np.uint64(layout.offset(STATE, "applied"))
HEAD = np.uint64(layout.offset(RING, "head"))
HOLD = np.uint64(layout.offset(RING, "hold"))
ASKED = np.uint64(layout.offset(RING, "wants"))
SHARD_BELL = np.uint64(layout.offset(CONTROL, "shard_bell"))
MANAGER_BELL = np.uint64(layout.offset(CONTROL, "manager_bell"))
PAUSE = np.uint64(layout.offset(CONTROL, "pause"))
SUPERSTEP = np.uint64(layout.offset(CONTROL, "superstep"))
HEARTBEAT = np.uint64(layout.offset(SHARD, "heartbeat"))
FRAMES = np.uint64(layout.offset(SHARD, "frames"))
LEASE = np.uint64(layout.offset(SHARD, "lease"))
PARKED = np.uint64(layout.offset(SHARD, "parked"))
MODE = np.uint64(layout.offset(CONTROL, "mode"))
OBEYED = np.uint64(layout.offset(SHARD, "mode"))
KIND_OF_MODE = np.uint32(3)
ON_ARRIVAL = int(Mode.ON_ARRIVAL)
COLLECT = int(Mode.COLLECT)
HOLD_ALL = int(Mode.HOLD)

# The rings as this shard knows them: lines of a uint64 array of shape (KNOWN, MAX_LEARNERS). A line
# is contiguous, because shard_sleep takes the addresses and the heads as C arrays.
KNOWN = 9
RINGS = 0  # addresses
HEADS = 1  # heads that the shard has acted on
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
LEASE_NS = np.uint64(100_000_000)  # then it looks whether it shall quit
RECOVER_POLL_NS = np.uint64(1_000_000)
PAUSE_POLL_NS = np.uint64(10_000_000)
PS_TIMEOUT = _native.PS_TIMEOUT
PASSES_PER_CLOCK = 16  # polls of the rings between two looks at the clock while spinning


@compiled
def _applied_at(s: Shard, shard: int, row: int) -> np.uint64:
    """Address of the count of a row's frames that a shard has consumed."""
    word = np.uint64(shard * MAX_LEARNERS + row) * np.uint64(8)
    return np.uint64(s.state.ctypes.data) + APPLIED + word


@compiled
def _look_up(s: Shard, table: np.ndarray, known: np.ndarray) -> int:
    """Takes the table of rings over; returns how many there are.

    Says once more in each ring what is consumed and handed out: a server that died may have had no
    time to.
    """
    count = 0
    for row in range(MAX_LEARNERS):
        at = np.uint64(table.ctypes.data) + np.uint64(8 * (row * TABLE + RING_ADDRESS))
        address = get(at)
        if address != ZERO:
            tail = get(_applied_at(s, s.number, row))
            # A manager that is just dying may have given the row to another learner, and our own
            # may not know it yet: then `applied` is that one's.
            entry = s.control + ROSTER + np.uint64(row) * ENTRY_BYTES
            known[RINGS, count] = address
            known[HEADS, count] = tail
            known[ROWS, count] = np.uint64(row)
            known[GENERATIONS, count] = table[row * TABLE + RING_GENERATION]
            known[TAILS, count] = tail
            known[HELD, count] = ZERO
            known[SLOTS_AT, count] = table[row * TABLE + RING_SLOTS_AT]
            known[SLOT_BYTES, count] = table[row * TABLE + RING_SLOT_BYTES]
            known[WANTS, count] = ZERO
            if get(entry + SERVED) != known[GENERATIONS, count]:
                continue
            # Forgotten meanwhile, and perhaps another's: a newer table will tell.
            if get(at) != address:
                continue
            release(known[RINGS, count], np.uint64(s.number), tail)
            if s.number == 0 and s.c[0].roster[row].drained == 0:
                show_all_work(s.c, row, known[RINGS, count])
            count += 1
    return count


@compiled
def _slot(s: Shard, known: np.ndarray, i: int) -> np.uint64:
    """Address of the oldest frame of the i-th ring. Not from the table, which may be newer."""
    return slot_of(s.c, known[RINGS, i], known[SLOTS_AT, i], known[SLOT_BYTES, i], known[TAILS, i])


@compiled
def _nap(s: Shard, bell_seen: np.uint32, timeout_ns: np.uint64) -> None:
    """Sleeps until the shards' bell rings or the time is up."""
    shard_sleep(s.control, np.uint64(s.number), ZERO, ZERO, ZERO, bell_seen, timeout_ns)


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
            _nap(s, bell_seen, HOLD_POLL_NS)
        known[HELD, i] = np.uint64(request)


@compiled
def _consume(s: Shard, known: np.ndarray, i: int, tail: np.uint64) -> None:
    """Frames below `tail` are done with: the learner may fill their slots."""
    known[TAILS, i] = tail
    known[HEADS, i] = tail
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
    ring = known[RINGS, i]
    more = s.number == 0 and takes_work(s.c, row, ring, known[GENERATIONS, i])
    shown = s.c[0].roster[row].handed
    if _is_nonsense(s, head, tail):
        _refuse(s, row, BAD_SEQUENCE, NO_BATCH, head, False)
        _consume(s, known, i, head)
        return
    slot = _slot(s, known, i)
    frame = frame_at(slot)
    reason = check_frame(s.c, slot, known[GENERATIONS, i], tail, s.places)
    if reason == OK:
        version = get(s.control + VERSION)
        steps = integer(s.state[0].record[s.number].steps)
        rate = cpu.learning_rate(s.c[0].hyper, steps) * frame[0].rate_scale
        if version > frame[0].version:
            rate = cpu.stale_rate(s.c[0].hyper, rate, integer(version - frame[0].version))
        begin(s, row, known[GENERATIONS, i], tail, rate, version, 1)
        take(s, 0, slot)
        apply_frames(s, 1, 0, False)
        if s.number == 0:
            book_arrival(s, row, frame, version, more)
            note_run(s, row, tail, frame, APPLY)
        finish(s)
    else:
        if s.number == 0:  # before it counts as consumed
            note_run(s, row, tail, frame, DROP if reason == GIVEN_UP else REFUSE)
        _refuse(s, row, reason, frame[0].batch, tail + ONE, more)
    if more:
        show_work(s.c, row, ring, shown)
    _consume(s, known, i, tail + ONE)


@compiled
def _refuse(s: Shard, row: int, reason: int, batch: np.uint64, upto: np.uint64, more: bool) -> None:
    """Frames below `upto` of this row count as consumed."""
    if s.number == 0:
        book_refusal(s, row, reason, batch, upto, more)
    else:
        s.state[0].applied[s.number, row] = upto


@compiled
def _superstep(
    s: Shard, table: np.ndarray, known: np.ndarray, count: int, number: np.uint64
) -> None:
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
        apply_frames(s, members, 0, False)
    if s.number == 0:
        book_superstep(s, table, version)
    finish(s)
    for i in range(count):
        # Not by superstep_action: the manager may be writing the next superstep already.
        tail = s.state[0].applied[s.number, integer(known[ROWS, i])]
        if tail != known[TAILS, i]:
            _consume(s, known, i, tail)


@compiled
def _all_known(s: Shard, known: np.ndarray, count: int) -> bool:
    """Whether the rings of the published superstep are mapped.

    After a take-over the manager may have to map one yet, of a learner that came just before.
    """
    missing = 0
    for row in range(MAX_LEARNERS):
        missing += s.c[0].superstep_action[row] != SKIP
    for i in range(count):
        row = integer(known[ROWS, i])
        same = known[GENERATIONS, i] == s.c[0].roster[row].generation
        missing -= same and s.c[0].superstep_action[row] != SKIP
    return missing == 0


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
        entry = s.control + ROSTER + np.uint64(row) * ENTRY_BYTES
        if get(entry + WANTED) == known[GENERATIONS, i] or get32(entry + DRAINED) != 0:
            continue
        # The server before may have retired it without our manager knowing yet; then the entry is
        # another learner's, or will be.
        if get(entry + RETIRED) >= known[GENERATIONS, i]:
            continue
        head = get(known[RINGS, i] + HEAD)
        if _empty(s, row, head) or _is_nonsense(s, head, known[TAILS, i]):
            depart(s, row)
            bell(s.control + MANAGER_BELL)
        else:
            again = True
    top_up_all(s, table)
    return again


@compiled
def _most_applied(s: Shard, row: int) -> np.uint64:
    """Frames of this row that the shard has consumed which is furthest."""
    most = ZERO
    for shard in range(s.c[0].shards):
        most = max(most, get(_applied_at(s, shard, row)))  # acquire: its frame's head is read next
    return most


@compiled
def _catch_up(s: Shard, known: np.ndarray, count: int, mode: np.uint32) -> bool:
    """While the shards stand still: consumes what another one has consumed already.

    mode: that the pass began with. True if there was any, or if the mode is another one now: what
    somebody has consumed by that one, a superstep perhaps, is not to be applied on arrival.
    """
    found = False
    for i in range(count):
        row = integer(known[ROWS, i])
        most = _most_applied(s, row)
        if most <= s.state[0].applied[s.number, row]:
            continue
        if get32(s.control + MODE) != mode:  # SYNC POINT: mode
            return True
        if _is_nonsense(s, most, known[TAILS, i]):
            # Somebody wrote over the head, and another shard has taken it for consumed.
            _refuse(s, row, BAD_SEQUENCE, NO_BATCH, most, False)
            _consume(s, known, i, most)
        else:
            _on_arrival(s, known, i)
        found = True
    return found


@compiled
def serve(index: int, low: int, high: int, places: np.ndarray) -> int:
    """Serves values low to high of the weights until the manager says quit; returns passes made.

    Parameter server, the thread that holds the lease of this shard; recover() has been called. low
    and high are multiples of CHUNK, but for the end of the weights. places: see places.py; all
    memory behind it stays mapped meanwhile.
    """
    s = shard_of(index, low, high, places)
    table = words(places[TABLE_AT], MAX_LEARNERS * TABLE)
    table_version = places[WORDS_AT] + np.uint64(8 * TABLE_VERSION)
    seen_version = places[WORDS_AT] + np.uint64(8 * (SEEN + index))
    quit_word = places[WORDS_AT] + np.uint64(8 * QUIT)
    record = s.state[0].record[index]
    spin_s = s.c[0].spin_ns * 1e-9
    known = np.zeros((KNOWN, MAX_LEARNERS), np.uint64)
    count = 0
    known_table = IDLE
    books_bell = np.uint32(0)
    books_due = True
    beat = ZERO
    passes = 0
    idle_since = 0.0
    wide_awake(s.control, np.uint64(index))  # the one before may have died asleep

    while True:
        beat += ONE
        put(s.me + HEARTBEAT, beat)
        bell_seen = get32(s.control + SHARD_BELL)
        superstep = get(s.control + SUPERSTEP)  # before the table, so that its rings are known
        if get(table_version) != known_table:
            known_table = get(table_version)
            count = _look_up(s, table, known)
            put(seen_version, known_table)
            bell(s.control + MANAGER_BELL)
            books_due = True
        if get(quit_word) != ZERO:
            return integer(beat)
        mode = get32(s.control + MODE)  # SYNC POINT: mode
        kind = integer(mode & KIND_OF_MODE)
        collect = kind == COLLECT
        report = kind != ON_ARRIVAL or s.c[0].report != 0
        pause = get(s.control + PAUSE)
        if pause != ZERO and superstep <= record.supersteps and clock() * 1e9 < float(pause):
            if not collect and _catch_up(s, known, count, mode):
                continue
            if get(s.me + PARKED) != pause:
                put(s.me + PARKED, pause)  # SYNC POINT: pause
                bell(s.control + SHARD_BELL)  # the others look again whether they are behind
                bell(s.control + MANAGER_BELL)
                continue
            _nap(s, bell_seen, PAUSE_POLL_NS)
            continue
        if s.c[0].shard[index].parked != ZERO:
            put(s.me + PARKED, ZERO)

        progress = False
        heard = False
        _wait_for_pulls(s, known, count, bell_seen)
        if kind != ON_ARRIVAL:
            if superstep > record.supersteps and _all_known(s, known, count):
                _superstep(s, table, known, count, superstep)
                progress = True
            elif kind == HOLD_ALL:
                progress = _catch_up(s, known, count, mode)
                if not progress and get32(s.me + OBEYED) != mode:
                    put32(s.me + OBEYED, mode)  # SYNC POINT: mode
                    bell(s.control + SHARD_BELL)  # the others look again whether they are behind
                    heard = True
            if index == 0:
                for i in range(count):
                    head = get(known[RINGS, i] + HEAD)  # SYNC POINT: frame
                    heard = heard or head != known[HEADS, i]
                    known[HEADS, i] = head
        else:
            if get32(s.me + OBEYED) != mode:
                put32(s.me + OBEYED, mode)
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
        if passes == 1:
            idle_since = clock()
            s.c[0].shard[index].cpu = cpu_here()
        if passes % PASSES_PER_CLOCK:
            spin_once()
            continue
        if clock() < idle_since + spin_s:
            spin_on(idle_since)
            continue
        watched = count
        if kind != ON_ARRIVAL and (index != 0 or kind == HOLD_ALL):
            watched = 0
        shard_sleep(
            s.control,
            np.uint64(index),
            known[RINGS].ctypes.data,
            known[HEADS].ctypes.data,
            np.uint64(watched),
            bell_seen,
            BEAT_NS,
        )
        passes = 0


@compiled
def stand_by(index: int, low: int, high: int, places: np.ndarray) -> int:
    """The life of a shard's thread: waits for its lease, recovers, serves until told to quit.

    All of it without Python: at a take-over nobody waits for the interpreter's lock.
    """
    s = shard_of(index, low, high, places)
    words_at = places[WORDS_AT]
    quit_word = words_at + np.uint64(8 * QUIT)
    taken = lease_take(s.me + LEASE, LEASE_NS)
    while taken < 0:
        if get(quit_word) != ZERO:
            return 0
        if taken != PS_TIMEOUT:  # written over: the watchdog makes new ones once nobody serves
            _nap(s, get32(s.control + SHARD_BELL), LEASE_NS)
        taken = lease_take(s.me + LEASE, LEASE_NS)
    s.c[0].shard[index].tid = thread_id()
    put32(s.me + OBEYED, np.uint32(ON_ARRIVAL))  # what the one before had seen is of no use
    # From here on the manager must not unmap what this thread may read.
    put(words_at + np.uint64(8 * (SEEN + index)), ZERO)
    bell(s.control + MANAGER_BELL)
    table_version = words_at + np.uint64(8 * TABLE_VERSION)
    seen_version = get(table_version)
    while not can_recover(index, low, high, places):
        # Nothing of the table is in hand here: what was forgotten before this version may go.
        put(words_at + np.uint64(8 * (SEEN + index)), seen_version)
        seen_version = get(table_version)
        if get(quit_word) != ZERO:
            return 0
        bell_seen = get32(s.control + SHARD_BELL)
        bell(s.control + MANAGER_BELL)  # it maps what is missing
        _nap(s, bell_seen, RECOVER_POLL_NS)
    if recover(index, low, high, places):
        s.c[0].shard[index].recovered += np.uint32(1)
    put(words_at + np.uint64(8 * (HOLDS + index)), ONE)
    bell(s.control + MANAGER_BELL)
    return serve(index, low, high, places)


SIGNATURE = "int64(int64, int64, int64, uint64[::1])"


def load() -> None:
    """Loads what follows from Numba's cache, or compiles it (a minute or so, once)."""
    applier()
    for function in (can_recover, recover, serve, stand_by):
        function.compile(SIGNATURE)  # type: ignore[attr-defined]
