"""The ring's protocol on plain memory, without any job: both sides are called from here."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gadei_ps import _native
from gadei_ps.memory import layout
from gadei_ps.memory.layout import AHEAD, CONTROL, ENTRY, FRAME, RING, Phase, Stop, Work

LONG_NS = 30_000_000_000
ROW, GENERATION = 5, 77
SLOTS_AT = layout.rounded(RING.itemsize, layout.PAGE)
SLOT_BYTES = layout.PAYLOAD_AT + 64

# The server's side, which compiled Python calls by symbol.
_library = ctypes.CDLL(_native.__file__)
_u64, _u32 = ctypes.c_uint64, ctypes.c_uint32
ps_release = _library.ps_release
ps_release.argtypes, ps_release.restype = [_u64, _u64, _u64], None
ps_hand_out = _library.ps_hand_out
ps_hand_out.argtypes, ps_hand_out.restype = [_u64, _u64, _u64], None
ps_shard_sleep = _library.ps_shard_sleep
ps_shard_sleep.argtypes = [_u64, _u64, _u64, _u64, _u64, _u32, _u64]
ps_shard_sleep.restype = None


class Ring:
    """A ring and its control segment in this process' memory."""

    def __init__(self, shards: int, slots: int, begin: int = 0, spin_ns: int = 0) -> None:
        self.shards, self.slots = shards, slots
        self._ring_memory = np.zeros(SLOTS_AT + slots * SLOT_BYTES, np.uint8)
        self._control_memory = np.zeros(1, CONTROL)
        self.at = self._ring_memory.ctypes.data
        self.control_at = self._control_memory.ctypes.data
        self.control = self._control_memory[0]
        self.ring = self._ring_memory[: RING.itemsize].view(RING)[0]
        self.entry = self.control["roster"][ROW]
        self.control["spin_ns"] = spin_ns
        self.control["phase"] = Phase.SERVING
        self.entry["wanted"] = GENERATION
        self.ring["header"]["index"] = ROW
        self.ring["header"]["generation"] = GENERATION
        self.ring["shards"] = shards
        self.ring["slots"] = slots
        self.ring["slot_bytes"] = SLOT_BYTES
        self.ring["slots_at"] = SLOTS_AT
        self.ring["head"] = begin
        self.ring["tail"]["value"] = begin

    def claim(self, timeout_ns: int = 0) -> int:
        return _native.claim(self.at, self.control_at, timeout_ns)

    def slot(self, sequence: int) -> int:
        return self.at + SLOTS_AT + sequence % self.slots * SLOT_BYTES

    def frame(self, sequence: int) -> np.void:
        at = self.slot(sequence) - self.at
        return self._ring_memory[at : at + FRAME.itemsize].view(FRAME)[0]

    def payload(self, sequence: int) -> np.ndarray:
        at = self.slot(sequence) - self.at + layout.PAYLOAD_AT
        return self._ring_memory[at : at + 64]

    def publish(self, clock: int = 0) -> int:
        return _native.publish(
            self.at, self.control_at, clock, 3, 1, 1, 0, 64, 9, 32, 4.0, 0.5, 1.25, 10.0, 11.0
        )

    def head(self) -> int:
        return int(self.ring["head"])

    def tail(self, shard: int) -> int:
        return int(self.ring["tail"]["value"][shard])

    def release(self, shard: int) -> None:
        ps_release(self.at, shard, self.tail(shard) + 1)

    def wait_applied(self, sequence: int, timeout_ns: int = 0) -> int:
        return _native.wait_applied(self.at, self.control_at, sequence, timeout_ns)

    def wait_grant(self, clock: int, timeout_ns: int = 0) -> int:
        return _native.wait_grant(self.at, self.control_at, clock, timeout_ns)

    def take(self, timeout_ns: int = 0) -> int:
        return _native.take_work(self.at, self.control_at, timeout_ns)

    def hand_out(self, item: int) -> None:
        ps_hand_out(self.at, int(self.ring["work_head"]), item)

    def word(self, field: str) -> int:
        return self.at + layout.offset(RING, field)

    def ring_bell(self, field: str) -> None:
        """Wakes who sleeps on a word of the roster's row."""
        roster = self.control_at + layout.offset(CONTROL, "roster") + ROW * ENTRY.itemsize
        _native.bell(roster + layout.offset(ENTRY, field))


class Later:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        self._value = call()

    def done(self) -> Any:
        self._thread.join(support.PATIENCE_S)
        assert not self._thread.is_alive()
        return self._value


# -- slots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 63, 64])
@pytest.mark.parametrize("slots", range(1, 9))
def test_a_slot_is_free_when_every_shard_has_passed_it(shards: int, slots: int) -> None:
    ring = Ring(shards, slots)
    for sequence in range(3 * slots):
        if sequence >= slots:
            for shard in range(shards):
                assert ring.claim() == _native.PS_TIMEOUT
                ring.release((shard + sequence) % shards)
        assert ring.claim() == ring.claim() == ring.slot(sequence)
        assert ring.publish() == sequence
        assert ring.head() == sequence + 1
    assert ring.claim(1_000_000) == _native.PS_TIMEOUT


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_past_the_low_half_of_head(shards: int, slots: int) -> None:
    """The futex sees only 32 bits of it; everything else goes by all 64."""
    ring = Ring(shards, slots, begin=2**32 - 3)
    for sequence in range(2**32 - 3, 2**32 + 20):
        assert ring.claim() == ring.slot(sequence)
        assert ring.publish() == sequence
        assert ring.wait_applied(sequence) == _native.PS_TIMEOUT
        if sequence - slots + 1 >= 2**32 - 3:
            assert ring.claim() == _native.PS_TIMEOUT
            for shard in range(shards):
                assert ring.wait_applied(sequence - slots + 1) == _native.PS_TIMEOUT
                ring.release(shard)
            assert ring.wait_applied(sequence - slots + 1) == 0


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_past_the_end_of_head(slots: int) -> None:
    """No job gets there; a count of slots that divides 2**64 would even go on."""
    ring = Ring(1, slots, begin=2**64 - 2)
    for sequence in range(2**64 - 2, 2**64 + 3):
        assert ring.claim() == ring.slot(sequence % 2**64)
        assert ring.publish() == sequence % 2**64
        ring.release(0) if ring.tail(0) + 1 < 2**64 else ps_release(ring.at, 0, 0)
    assert ring.head() == ring.tail(0) == 3


def test_a_frame_is_what_was_published() -> None:
    ring = Ring(2, 2)
    for sequence in range(5):
        ring.claim()
        ring.publish(clock=sequence + 100)
        frame = ring.frame(sequence)
        assert {name: frame[name] for name in FRAME.names or () if not name.startswith("pad")} == {
            "sequence": sequence,
            "generation": GENERATION,
            "clock": sequence + 100,
            "version": 3,
            "kind": 1,
            "dtype": 1,
            "payload_bytes": 64,
            "flags": 1,
            "blocks": 0,
            "batch": 9,
            "samples": 32,
            "rate_scale": 0.5,
            "loss": 1.25,
            "started": 10.0,
            "finished": 11.0,
            "squares": 4.0,
        }
        assert ring.ring["pulled"] == 3
        for shard in range(2):
            ring.release(shard)


def test_a_release_rings_only_for_who_waits() -> None:
    ring = Ring(1, 1)
    ring.claim()
    ring.publish()
    ring.release(0)
    assert ring.ring["released"] == 0
    ring.ring["waits_slot"] = 1
    ring.claim()
    ring.publish()
    ring.release(0)
    assert ring.ring["released"] == 1


@pytest.mark.parametrize("spin_ns", [0, 1_000_000])
@pytest.mark.parametrize("shards", [1, 64])
def test_a_release_wakes_the_learner(shards: int, spin_ns: int) -> None:
    ring = Ring(shards, 1, spin_ns=spin_ns)
    for sequence in range(3):
        assert ring.claim(LONG_NS) == ring.slot(sequence)
        ring.publish()
        applied = Later(lambda s=sequence: ring.wait_applied(s, LONG_NS))
        for shard in range(shards):
            support.eventually(lambda: ring.ring["waits_slot"])
            ring.release(shard)
        assert applied.done() == 0
        assert ring.ring["waits_slot"] == 0
    ring.publish()
    claimed = Later(lambda: ring.claim(LONG_NS))
    support.eventually(lambda: ring.ring["waits_slot"])
    for shard in range(shards):
        ring.release(shard)
    assert claimed.done() == ring.slot(4)


@pytest.mark.parametrize("begin", [0, 2**32 - 1, 2**32, 2**63])
def test_a_frame_wakes_a_shard(begin: int) -> None:
    ring = Ring(1, 2, begin=begin)
    rings, seen = np.array([ring.at], np.uint64), np.array([begin], np.uint64)

    def sleep() -> None:
        ps_shard_sleep(ring.control_at, 0, rings.ctypes.data, seen.ctypes.data, 1, 0, LONG_NS)

    asleep = Later(sleep)
    support.eventually(lambda: ring.control["sleepers"] == 1)
    ring.claim()
    ring.publish()
    asleep.done()
    assert ring.control["sleepers"] == 0
    sleep()  # head has moved already: does not sleep at all
    seen[0] += 1
    asleep = Later(sleep)
    support.eventually(lambda: ring.control["sleepers"] == 1)
    _native.bell(ring.control_at + layout.offset(CONTROL, "shard_bell"))
    asleep.done()


# -- verdicts --------------------------------------------------------------------------------------

STOPPED, EVICTED = _native.PS_STOPPED, _native.PS_EVICTED
VERDICTS: list[tuple[str, Any, int | None]] = [
    ("stop", Stop.DRAIN, None),
    ("stop", Stop.NOW, STOPPED),
    ("phase", Phase.DRAINING, None),
    ("phase", Phase.STOPPED, STOPPED),
    ("phase", Phase.FAILED, STOPPED),
    ("wanted", 0, EVICTED),
    ("wanted", GENERATION + 1, EVICTED),
]


def pronounce(ring: Ring, field: str, value: Any) -> None:
    if field == "wanted":
        ring.entry["wanted"] = value
    else:
        ring.control[field] = value


@pytest.mark.parametrize(("field", "value", "verdict"), VERDICTS)
def test_verdicts(field: str, value: Any, verdict: int | None) -> None:
    ring = Ring(2, 1)
    pronounce(ring, field, value)
    assert ring.claim() == (verdict or ring.slot(0))
    ring.publish()
    late = verdict or _native.PS_TIMEOUT
    assert ring.claim() == ring.wait_applied(0) == ring.wait_grant(0) == late
    for shard in range(2):
        ring.release(shard)
    assert ring.claim() == (verdict or ring.slot(1))


@pytest.mark.parametrize(("field", "value", "verdict"), [v for v in VERDICTS if v[2]])
def test_a_verdict_ends_a_wait(field: str, value: Any, verdict: int) -> None:
    ring = Ring(2, 1)
    ring.claim()
    ring.publish()
    waiting = Later(lambda: ring.claim(LONG_NS))
    support.eventually(lambda: ring.ring["waits_slot"])
    pronounce(ring, field, value)
    assert waiting.done() == verdict


def test_grants() -> None:
    ring = Ring(1, 1)
    ring.entry["grant"] = 2
    assert [ring.wait_grant(clock) for clock in range(4)] == [0, 0, -1, -1]
    waiting = Later(lambda: ring.wait_grant(2, LONG_NS))
    ring.entry["grant"] = 3
    ring.ring_bell("grant_seq")
    assert waiting.done() == 0
    ring.entry["grant"] = layout.UNBOUNDED
    assert ring.wait_grant(2**61) == 0


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [0, 7, 2**32 - 3])
def test_batches_come_in_order(begin: int) -> None:
    ring = Ring(1, 1)
    ring.ring["work_head"] = ring.ring["work_tail"] = begin
    assert ring.take() == _native.PS_TIMEOUT
    handed, taken = deque(range(50)), []
    items = [(epoch << 32) | 5 for epoch in range(50)]
    waiting: deque[int] = deque()
    while handed:
        while handed and len(waiting) < AHEAD:
            waiting.append(handed.popleft())
            ring.hand_out(items[waiting[-1]])
        for _ in range(len(taken) % 5 + 1):
            taken.append(ring.take())
            assert taken[-1] == items[waiting.popleft()]
    while waiting:
        taken.append(ring.take())
        waiting.popleft()
    assert taken == items
    assert ring.take() == _native.PS_TIMEOUT


def test_a_batch_wakes_the_learner() -> None:
    ring = Ring(1, 1)
    waiting = Later(lambda: ring.take(LONG_NS))
    support.eventually(lambda: ring.ring["waits_work"])
    ring.hand_out(2**33)
    assert waiting.done() == 2**33


def test_the_end_of_work() -> None:
    ring = Ring(1, 1)
    ring.hand_out(1)
    ring.hand_out(2)
    ring.control["work"] = Work.DONE
    assert [ring.take() for _ in range(3)] == [1, 2, _native.PS_FINISHED]
    ring.hand_out(3)  # another's batch comes back: it is handed out after all
    ring.control["stop"] = Stop.DRAIN
    assert ring.take() == _native.PS_FINISHED


@pytest.mark.parametrize("how", ["work", "stop", "phase", "wanted"])
def test_a_wait_for_work_ends(how: str) -> None:
    ring = Ring(1, 1)
    waiting = Later(lambda: ring.take(LONG_NS))
    support.eventually(lambda: ring.ring["waits_work"])
    value = {"work": Work.DONE, "stop": Stop.NOW, "phase": Phase.FAILED, "wanted": 0}[how]
    pronounce(ring, how, value)
    _native.futex_wake(ring.word("work_head"))
    ended = {"phase": STOPPED, "wanted": EVICTED}
    assert waiting.done() == ended.get(how, _native.PS_FINISHED)


# -- snapshots -------------------------------------------------------------------------------------


def test_a_snapshot_is_refused_while_the_shard_writes() -> None:
    ring = Ring(2, 1)
    weights, copy = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)

    def snapshot(shard: int) -> bool:
        at = (copy.ctypes.data, weights.ctypes.data)
        return _native.snapshot(ring.control_at, shard, *at, weights.nbytes)

    ring.control["shard"][1]["sequence"] = 7
    assert not snapshot(1)
    assert not copy.any()
    assert snapshot(0)
    np.testing.assert_array_equal(copy, weights)
    weights += 1
    ring.control["shard"][1]["sequence"] = 8
    assert snapshot(1)
    np.testing.assert_array_equal(copy, weights)


# -- all together ----------------------------------------------------------------------------------


class RingMachine(RuleBasedStateMachine):
    """Any order of both sides' steps against plain queues."""

    @initialize(
        shards=st.integers(1, 64),
        slots=st.integers(1, 8),
        begin=st.sampled_from([0, 1, 2**31, 2**32 - 5, 2**63]),
    )
    def make(self, shards: int, slots: int, begin: int) -> None:
        self.ring = Ring(shards, slots, begin)
        self.begin = begin
        self.published: list[int] = []  # the first byte of each payload
        self.done = [0] * shards  # frames that each shard has consumed
        self.handed: deque[int] = deque()
        self.batches = 0
        self.verdict = 0
        self.stop = False

    @property
    def free(self) -> bool:
        return len(self.published) - min(self.done) < self.ring.slots

    @rule(mark=st.integers(0, 255))
    def push(self, mark: int) -> None:
        sequence = self.begin + len(self.published)
        claimed = self.ring.claim()
        if self.verdict or not self.free:
            assert claimed == (self.verdict or _native.PS_TIMEOUT)
            return
        assert claimed == self.ring.slot(sequence)
        self.ring.payload(sequence)[:] = mark
        assert self.ring.publish(clock=len(self.published)) == sequence
        self.published.append(mark)

    @rule(mark=st.integers(0, 255))
    def die_while_writing(self, mark: int) -> None:
        """What is in a claimed slot but not published is nothing; the next claim gets the slot."""
        if not self.verdict and self.free:
            assert self.ring.claim() == self.ring.slot(self.begin + len(self.published))
            self.ring.payload(self.begin + len(self.published))[:] = mark

    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        behind = [s for s, done in enumerate(self.done) if done < len(self.published)]
        if not behind:
            return
        shard = data.draw(st.sampled_from(behind))
        sequence = self.begin + self.done[shard]
        assert self.ring.frame(sequence)["sequence"] == sequence
        assert (self.ring.payload(sequence) == self.published[self.done[shard]]).all()
        self.ring.release(shard)
        self.done[shard] += 1

    @rule()
    def consume_all(self) -> None:
        for shard, done in enumerate(self.done):
            for _ in range(len(self.published) - done):
                self.ring.release(shard)
            self.done[shard] = len(self.published)

    @precondition(lambda self: len(self.handed) < AHEAD)
    @rule()
    def hand_out(self) -> None:
        self.ring.hand_out(self.batches << 32 | 1)
        self.handed.append(self.batches << 32 | 1)
        self.batches += 1

    @rule()
    def take(self) -> None:
        taken = self.ring.take()
        if self.stop:
            assert taken == _native.PS_FINISHED
        elif self.handed:
            assert taken == self.handed.popleft()
        else:
            assert taken == (self.verdict or _native.PS_TIMEOUT)

    @rule(verdict=st.sampled_from([0, 0, STOPPED, EVICTED]))
    def judge(self, verdict: int) -> None:
        self.verdict = verdict
        self.stop = verdict == STOPPED
        self.ring.control["stop"] = Stop.NOW if self.stop else Stop.GO
        self.ring.entry["wanted"] = 0 if verdict == EVICTED else GENERATION

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "ring"):
            return
        assert self.ring.head() == self.begin + len(self.published)
        assert [self.ring.tail(s) - self.begin for s in range(len(self.done))] == self.done
        last = self.begin + min(self.done) - 1
        if min(self.done):
            assert self.ring.wait_applied(last) == 0
        assert self.ring.wait_applied(last + 1) == (self.verdict or _native.PS_TIMEOUT)


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("job", ["1 1 1 0", "1 2 2 2000", "3 4 3 0", "3 8 8 0 hurry"])
def test_under_threads(programs: Any, job: str) -> None:
    """learners, shards, slots, spin_ns; as `make stress` does it for longer, and with TSan too."""
    root = Path(__file__).parents[2]
    source, native = root / "tests/stress/ring.c", root / "native/ps_ring.c"
    program = programs.build(source, native, "-pthread", "-Wl,--wrap=syscall")
    done = subprocess.run([program, "0.2", *job.split()], capture_output=True, text=True)
    assert done.returncode == 0 and "0 lost wake-ups" in done.stdout, done.stderr
