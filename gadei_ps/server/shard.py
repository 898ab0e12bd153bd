"""A shard: one thread of the parameter server, the only writer of its part of the weights.

`serve` walks all rings on its own, without the GIL, as long as the server lives. The shards never
wait for one another: each has its own tail in every ring, its own count of steps and its own record
of what it is doing (record.py). The thread of shard 0 also keeps the statistics and the work ledger
(account.py).

    stand_by   waits for the lease, recovers, serves
    serve      pass after pass: looks at the table of rings, pauses for a checkpoint, applies
               frames, records them, spins or sleeps
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from gadei_ps import _native
from gadei_ps.kernels.compiled import compiled, inner
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, RING, SHARD
from gadei_ps.server.account import depart, others_may_get, top_up_all
from gadei_ps.server.arrival import MODE, SUPERSTEP, catch_up, on_arrivals, settle_broken
from gadei_ps.server.constants import COLLECT, HOLD, IDLE, ON_ARRIVAL, ONE, ZERO
from gadei_ps.server.context import Shard, integer, is_broken, mark_broken, part_at, shard_of
from gadei_ps.server.known import (
    BROKEN,
    HEAD,
    entry_at,
    has_news,
    is_nonsense,
    look_up,
    sleep,
    wait_for_pulls,
)
from gadei_ps.server.order import choose, had_news, sort_out
from gadei_ps.server.recover import can_recover, recover
from gadei_ps.server.structs import BOARD
from gadei_ps.server.superstep import all_known, apply_superstep
from gadei_ps.server.symbols import (
    address,
    bell,
    clock,
    cpu_here,
    get,
    get32,
    lease_take,
    put,
    put32,
    spin_on,
    spin_once,
    thread_id,
    wide_awake,
)

WANTED = np.uint64(layout.offset(ENTRY, "wanted"))
RETIRED = np.uint64(layout.offset(ENTRY, "retired"))
DRAINED = np.uint64(layout.offset(ENTRY, "drained"))
ASKED = np.uint64(layout.offset(RING, "wants"))
SHARD_BELL = np.uint64(layout.offset(CONTROL, "shard_bell"))
MANAGER_BELL = np.uint64(layout.offset(CONTROL, "manager_bell"))
PAUSE = np.uint64(layout.offset(CONTROL, "pause"))
HEARTBEAT = np.uint64(layout.offset(SHARD, "heartbeat"))
FRAMES = np.uint64(layout.offset(SHARD, "frames"))
LEASE = np.uint64(layout.offset(SHARD, "lease"))
PARKED = np.uint64(layout.offset(SHARD, "parked"))
ADOPTED_MODE = np.uint64(layout.offset(SHARD, "mode"))
KIND_OF_MODE = np.uint32(3)
TABLE_VERSION = np.uint64(layout.offset(BOARD, "table_version"))
QUIT = np.uint64(layout.offset(BOARD, "quit"))
SEEN = np.uint64(layout.offset(BOARD, "seen"))
HOLDS = np.uint64(layout.offset(BOARD, "holds"))
REQUESTS = np.uint64(layout.offset(BOARD, "requests"))
WORD = np.uint64(8)

BEAT_NS = np.uint64(100_000_000)  # a sleeping shard shows a heartbeat this often
LEASE_NS = np.uint64(100_000_000)  # then it looks whether it shall quit
RECOVER_POLL_NS = np.uint64(1_000_000)
PAUSE_POLL_NS = np.uint64(10_000_000)
PS_TIMEOUT = _native.PS_TIMEOUT
PASSES_PER_CLOCK = 16  # polls of the rings between two looks at the clock while spinning

# What a pass has come upon.
PROGRESS = 1  # frames were consumed
NEWS = 2  # something that the manager must know
REQUEST = 4  # a request of a learner


@inner
def _empty(s: Shard, row: int, head: np.uint64) -> bool:
    """Return whether every shard has consumed all that was published."""
    for shard in range(s.c[0].shards):  # noqa: SIM110 (compiled: no generators)
        if s.state[0].applied[shard, row] != head:
            return False
    return True


@inner
def _is_settled(s: Shard, row: int) -> bool:
    """Return whether all shards are done with a broken ring: equal counts, and no current frame.

    What it may still hold is not looked at.
    """
    for shard in range(s.c[0].shards):
        record = s.state[0].record[shard]
        if record.cursor != IDLE and record.ring == np.uint64(row):
            return False
    return _empty(s, row, s.state[0].applied[s.number, row])


@inner
def _update_accounts(s: Shard, count: int) -> bool:
    """Account for learners that have left, and hand out work (shard 0). True: one remains."""
    again = False
    for i in range(count):
        ring = s.known[i]
        row = ring.row
        entry = entry_at(s, row)
        if get(entry + WANTED) == ring.generation or get32(entry + DRAINED) != 0:
            continue
        # The server before may have retired the learner, which the manager of this process may not
        # know yet. Then the entry is another learner's, or will be.
        if get(entry + RETIRED) >= ring.generation:
            continue
        head = get(ring.address + HEAD)
        if is_nonsense(s, head, ring.tail):
            mark_broken(s, row, ring.generation)
        broken = is_broken(s, row, ring.generation)
        if broken:  # once every shard knows it, so that none is about to begin a frame of it
            noted = get(entry + BROKEN) == ring.generation  # SYNC POINT: broken
            settled = noted and _is_settled(s, row)
        else:
            settled = _empty(s, row, head)
        if settled:
            depart(s, row, broken)
            bell(s.control + MANAGER_BELL)
        else:
            again = True
    top_up_all(s)
    return again


@inner
def _has_requests(s: Shard, looks: int) -> bool:
    """Return whether a learner has a new request since this shard's last look. looks: as chosen.

    Notifies the manager: the request may be for a global pause.
    """
    is_new = False
    for i in range(looks):
        line = s.part[0].looked[i]
        ring = s.known[line]
        wants = np.uint64(get32(ring.address + ASKED))
        if wants != ring.wants:
            ring.wants = wants
            had_news(s, line)
            is_new = True
    if is_new:
        at = s.part[0].board + REQUESTS
        put(at, get(at) + ONE)
        bell(s.control + MANAGER_BELL)
    return is_new


@inner
def _pauses(
    s: Shard, count: int, superstep: np.uint64, mode: np.uint32, bell_seen: np.uint32
) -> bool:
    """Pause the shard for a checkpoint; True: this is all that the pass does."""
    pause = get(s.control + PAUSE)  # SYNC POINT: pause
    record = s.state[0].record[s.number]
    if pause != ZERO and superstep <= record.supersteps and clock() * 1e9 < float(pause):
        if integer(mode & KIND_OF_MODE) != COLLECT and catch_up(s, count, superstep, mode):
            return True
        if get(s.me + PARKED) != pause:
            put(s.me + PARKED, pause)  # SYNC POINT: pause
            bell(s.control + SHARD_BELL)  # the others look again whether they are behind
            bell(s.control + MANAGER_BELL)
            return True
        sleep(s, 0, bell_seen, PAUSE_POLL_NS)
        return True
    if s.c[0].shard[s.number].parked != ZERO:
        put(s.me + PARKED, ZERO)
    return False


@inner
def _pass_held(s: Shard, count: int, superstep: np.uint64, mode: np.uint32) -> int:
    """Leave frames until the manager publishes a superstep, or another mode."""
    found = 0
    if superstep > s.state[0].record[s.number].supersteps and all_known(s, count):
        apply_superstep(s, count, superstep)
        found = PROGRESS
    elif integer(mode & KIND_OF_MODE) == HOLD:
        if catch_up(s, count, superstep, mode):
            found = PROGRESS
        elif get32(s.me + ADOPTED_MODE) != mode:
            put32(s.me + ADOPTED_MODE, mode)  # SYNC POINT: mode
            bell(s.control + SHARD_BELL)  # the others look again whether they are behind
            found = NEWS
    if s.number == 0:
        for i in range(count):
            if has_news(s, s.known[i]):
                found |= NEWS
    return found


@inner
def _pass_on_arrival(s: Shard, looks: int, mode: np.uint32) -> int:
    """Apply each frame as it comes: a few at most of each ring, so that all have their turn.

    looks: as chosen (order.py).
    """
    found = 0
    if get32(s.me + ADOPTED_MODE) != mode:
        put32(s.me + ADOPTED_MODE, mode)
    for i in range(looks):
        line = s.part[0].looked[i]
        ring = s.known[line]
        if is_broken(s, ring.row, ring.generation):
            if settle_broken(s, line):
                found = PROGRESS
        elif get(ring.address + HEAD) != ring.tail:  # SYNC POINT: frame
            on_arrivals(s, line)
            had_news(s, line)
            found = PROGRESS
    return found


@inner
def _pass(s: Shard, count: int, looks: int, superstep: np.uint64, mode: np.uint32) -> int:
    """Handle the frames that have come, as the mode requires; return what the pass has found."""
    if integer(mode & KIND_OF_MODE) == ON_ARRIVAL:
        found = _pass_on_arrival(s, looks, mode)
    else:
        found = _pass_held(s, count, superstep, mode)
    if s.number == 0 and _has_requests(s, looks):
        found |= REQUEST
    sort_out(s, looks)
    if found & PROGRESS:
        put(s.me + FRAMES, s.state[0].record[s.number].steps)
    return found


@inner
def _makes_due(s: Shard, found: int, kind: int) -> bool:
    """Return whether the accounts are to be updated because of what a pass has found (shard 0)."""
    if found & REQUEST:
        return True
    # On arrival, each learner gets its next batches with its frame.
    waits = kind != ON_ARRIVAL or (s.number == 0 and others_may_get(s.c))
    return found & PROGRESS != 0 and waits


@inner
def _spins(passes: int, idle_since: float, spin_s: float) -> bool:
    """Spin once, unless the shard has done so for long enough; return whether it did."""
    if passes % PASSES_PER_CLOCK:
        spin_once()
    elif clock() < idle_since + spin_s:
        spin_on(idle_since)
    else:
        return False
    return True


@compiled
def serve(part: np.ndarray) -> int:
    """Serve a part of the weights until the manager sets `quit`; return the passes made.

    Parameter server, the thread that holds the lease of this shard; recover() has been called.
    part: PART, shape (1,); all memory that it names stays mapped meanwhile.
    """
    s = shard_of(address(part))
    board = part[0].board
    seen_version = board + SEEN + np.uint64(s.number) * WORD
    spin_s = s.c[0].spin_ns * 1e-9
    count = 0
    known_table = IDLE
    due = True  # the accounts of shard 0
    due_bell = last_bell = np.uint32(0)
    look_at_all = True  # in the next pass
    beat = ZERO
    passes = 0  # since there was anything to do
    idle_since = 0.0
    wide_awake(s.control, np.uint64(s.number))  # the server before may have died asleep
    put(s.me + FRAMES, s.state[0].record[s.number].steps)  # or before it reported

    while True:
        beat += ONE
        put(s.me + HEARTBEAT, beat)
        bell_seen = get32(s.control + SHARD_BELL)  # SYNC POINT: bells
        superstep = get(s.control + SUPERSTEP)  # SYNC POINT: superstep. Before the ring table.
        table = get(board + TABLE_VERSION)  # SYNC POINT: ring table
        if table != known_table:
            known_table = table
            count = look_up(s)
            put(seen_version, known_table)
            bell(s.control + MANAGER_BELL)
            due = True
        if get(board + QUIT) != ZERO:
            return integer(beat)
        mode = get32(s.control + MODE)  # SYNC POINT: mode
        kind = integer(mode & KIND_OF_MODE)
        if _pauses(s, count, superstep, mode, bell_seen):
            continue

        everything = look_at_all or kind != ON_ARRIVAL or bell_seen != last_bell
        look_at_all = False
        last_bell = bell_seen
        looks = choose(s, count, everything)
        wait_for_pulls(s, looks, bell_seen)
        found = _pass(s, count, looks, superstep, mode)
        due = due or _makes_due(s, found, kind)
        if s.number == 0 and (due or bell_seen != due_bell):
            due_bell = bell_seen
            due = _update_accounts(s, count)
        if found != 0:
            if kind != ON_ARRIVAL or s.c[0].report != 0:
                bell(s.control + MANAGER_BELL)
            passes = 0
            continue

        passes += 1
        if passes == 1:
            idle_since = clock()
            s.c[0].shard[s.number].cpu = cpu_here()
        if _spins(passes, idle_since, spin_s):
            continue
        look_at_all = True  # once more before it sleeps, and when it wakes up
        if everything:
            sleep(s, count if kind == ON_ARRIVAL or s.number == 0 else 0, bell_seen, BEAT_NS)
        passes = 0 if everything else -1


def stand_by(at: np.uint64) -> None:
    """Run a shard's thread: wait for its lease, recover, serve until `quit`.

    A C function. All of it without Python: at a failover no thread waits for the interpreter's
    lock. at: address of PART.
    """
    s = shard_of(at)
    part = part_at(at)
    board = s.part[0].board
    number = np.uint64(s.number)
    taken = lease_take(s.me + LEASE, LEASE_NS)
    while taken < 0:
        if get(board + QUIT) != ZERO:
            return
        if taken != PS_TIMEOUT:  # written over: the watchdog makes new ones once no server lives
            sleep(s, 0, get32(s.control + SHARD_BELL), LEASE_NS)
        taken = lease_take(s.me + LEASE, LEASE_NS)
    s.c[0].shard[s.number].tid = thread_id()
    put32(s.me + ADOPTED_MODE, np.uint32(ON_ARRIVAL))  # not what the server before had seen
    # From here on the manager must not unmap what this thread may read.
    put(board + SEEN + number * WORD, ZERO)
    bell(s.control + MANAGER_BELL)
    seen_version = get(board + TABLE_VERSION)
    while not can_recover(part):
        # This thread reads no ring now: those forgotten before this version may be unmapped.
        put(board + SEEN + number * WORD, seen_version)
        seen_version = get(board + TABLE_VERSION)
        if get(board + QUIT) != ZERO:
            return
        bell_seen = get32(s.control + SHARD_BELL)  # SYNC POINT: bells
        bell(s.control + MANAGER_BELL)  # it maps what is missing
        sleep(s, 0, bell_seen, RECOVER_POLL_NS)
    if recover(part):
        s.c[0].shard[s.number].recovered += np.uint32(1)
    put(board + HOLDS + number * WORD, ONE)
    bell(s.control + MANAGER_BELL)
    serve(part)


SIGNATURE = types.void(types.uint64)


def source(name: str) -> tuple[Any, Callable[..., None]]:
    """Return the source of the unit."""
    return SIGNATURE, stand_by
