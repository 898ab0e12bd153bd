"""The ring's protocol on plain memory, without any job: both sides are called from here."""

from __future__ import annotations

import subprocess
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from clients.ring import GENERATION, LONG_NS, Later, Ring, ps_pass, ps_release, ps_shard_sleep

from gadei_ps import _native
from gadei_ps.memory import layout, weights
from gadei_ps.memory.layout import AHEAD, CHUNK, CONTROL, FRAME, Phase, Stop, Work

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


@pytest.mark.parametrize("wild", [0, 3, 2**32 - 1])
def test_the_number_of_shards_is_not_read_from_the_ring(wild: int) -> None:
    """A learner can overwrite its ring; the waits of that learner read no tail beyond it."""
    ring = Ring(2, 1)
    ring.ring["shards"] = wild
    assert ring.claim() == ring.slot(0)
    ring.publish()
    assert ring.claim() == ring.wait_applied(0) == _native.PS_TIMEOUT
    for shard in range(2):
        ring.release(shard)
    assert ring.claim() == ring.slot(1) and ring.wait_applied(0) == 0


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
    """No job gets there; a count of slots that divides 2**64 would even continue."""
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
        header = {name: frame[name] for name in FRAME.names or () if not name.startswith("pad")}
        assert (header.pop("rate_scale") == 0.5).all()
        assert header == {
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
            "momentum": 0.5,
            "loss": 1.25,
            "started": 10.0,
            "finished": 11.0,
            "squares": 4.0,
            "stream": 0,
            "steps": 0,
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
    ring.claim()
    ring.publish()
    ps_pass(ring.at, 0, 3)  # one that is awake may use the slot; the wake comes later
    assert (ring.tail(0), ring.ring["released"]) == (3, 1)


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
        ps_shard_sleep(ring.control_at, 0, rings.ctypes.data, seen.ctypes.data, 0, 1, 0, LONG_NS)

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
    ("stop", Stop.CLOSED, STOPPED),
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


@pytest.mark.parametrize(
    ("field", "value", "verdict"), [("stop", Stop.CLOSED, STOPPED), ("wanted", 0, EVICTED)]
)
def test_a_frame_that_comes_too_late(field: str, value: Any, verdict: int) -> None:
    """Nobody waits for it any more, as for a learner that is just publishing."""
    ring = Ring(1, 2)
    ring.claim()
    ring.publish()
    assert (ring.head(), ring.ring["publishing"]) == (1, 0)
    ring.claim()
    pronounce(ring, field, value)
    assert ring.publish() == verdict
    assert (ring.head(), ring.ring["publishing"]) == (1, 0)


def test_what_a_learner_wants() -> None:
    ring = Ring(1, 1)
    ring.wait_grant(0)
    assert ring.ring["wants"] == layout.WANTS_TURN
    ring.take()
    both = layout.WANTS_TURN | layout.WANTS_WORK
    assert ring.ring["wants"] == both
    _native.pause_learner(ring.at, ring.control_at, 1)
    assert ring.ring["wants"] == both | layout.WANTS_PAUSE
    _native.pause_learner(ring.at, ring.control_at, 0)
    assert ring.ring["wants"] == both
    ring.control["work"] = Work.WORKING
    ring.wait_grant(0)
    assert ring.ring["wants"] == both
    ring.control["work"] = Work.DONE  # its next gradient is of its own data
    ring.wait_grant(0)
    assert ring.ring["wants"] == layout.WANTS_TURN


def test_barriers_await_an_iteration_that_begins_at_once() -> None:
    """Await a learner that takes a turn, whether or not the grant was there before."""
    ring = Ring(1, 1)
    ring.entry["grant"] = layout.UNBOUNDED
    assert ring.wait_grant(0) == 0
    assert ring.ring["wants"] == layout.WANTS_TURN


def test_a_learner_asks_for_a_global_pause() -> None:
    """Number its requests, so that no answer to an earlier one is taken for its own."""
    ring = Ring(1, 1)
    for number in (1, 2):
        ring.ask_exclusive(1)
        assert ring.ring["exclusive"] == number << 32 | GENERATION
        assert ring.ring["wants"] == 8  # PS_WANTS_EXCLUSIVE
        assert not ring.is_exclusive()
        waiting = Later(lambda: _native.wait_exclusive(ring.at, ring.control_at, LONG_NS))
        ring.entry["exclusive"] = ring.ring["exclusive"]
        ring.ring_bell("grant_seq")
        assert waiting.done() == 0
        assert ring.is_exclusive()
        ring.ask_exclusive(0)
        assert (ring.ring["exclusive"], ring.ring["wants"]) == (number << 32, 0)
        assert not ring.is_exclusive()


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


# -- copies ----------------------------------------------------------------------------------------


def test_a_copy_waits_while_a_shard_writes() -> None:
    """Each shard's part is copied between two gradients; one that is whole is not copied again."""
    ring, model = Ring(2, 1), weights.place([weights.Tensor("w", (2 * CHUNK,))])
    memory = np.zeros(weights.segment_bytes(model), np.uint8)
    head = memory[: layout.WEIGHTS.itemsize].view(layout.WEIGHTS)[0]
    head["elements"], head["data_at"] = model.elements, weights.data_at(1)
    data = memory[weights.data_at(1) :].view(np.float32)
    data[:] = 1
    copy = np.zeros(model.elements, np.float32)
    learner = _native.Learner(ring.at, ring.control_at, _native.address(memory), 0, 0)
    learner.copy_begin(_native.address(copy))
    ring.control["shards"] = 2
    ring.control["shard"][1]["sequence"] = 7
    assert learner.copy_on(1_000_000) == _native.PS_TIMEOUT
    assert ring.ring["hold"] == 1, "the shards are asked to hold back gradients"
    assert copy[:CHUNK].all() and not copy[CHUNK:].any()
    data += 1
    ring.control["shard"][1]["sequence"] = 8
    assert learner.copy_on(1_000_000) == 0
    np.testing.assert_array_equal(copy, np.repeat(np.float32([1, 2]), CHUNK))
    learner.copy_end()
    assert ring.ring["hold"] == 0


@pytest.mark.parametrize("job", ["1 1 1 0", "1 2 2 2000", "3 4 3 0", "3 8 8 0 hurry"])
def test_under_threads(programs: Any, job: str) -> None:
    """learners, shards, slots, spin_ns; as `make stress` does it for longer, and with TSan too."""
    root = Path(__file__).parents[2]
    source, native = root / "tests/stress/ring.c", root / "native/ps_ring.c"
    program = programs.build(source, native, "-pthread", "-Wl,--wrap=syscall")
    done = subprocess.run([program, "0.2", *job.split()], capture_output=True, text=True)
    assert done.returncode == 0 and "0 lost wake-ups" in done.stdout, done.stderr
