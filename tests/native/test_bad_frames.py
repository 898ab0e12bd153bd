"""Bad frames in a learner's ring: refused, counted, named, not applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import PATIENCE_S
from support.frames import claim

from gadei_ps import _native
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, FRAME, NO_BATCH, PAYLOAD_AT, REASON_TEXT, RING, Reason

SMALL = {"tensors": [{"name": "w", "shape": [3, 5]}, {"name": "b", "shape": [7]}]}
WIDE = {"tensors": [{"name": "w", "shape": [50, 401]}, {"name": "b", "shape": [33]}]}
JOBS = {
    "one shard": SMALL,
    "four shards": WIDE | {"shards": 4, "slots": 3},
    "superstep": WIDE | {"shards": 3, "sync": "bsp"},
}
POISON = 1e6  # in every bad frame: it cannot go unseen

NONE, ALL = 0, 2**64 - 1
WAIT_NS = 30_000_000_000
# The field of the header, its wrong value (or how to make it from the right one), and the reason.
BAD: list[tuple[str, Any, Reason]] = [
    ("generation", lambda right: right + 1, Reason.BAD_GENERATION),
    ("generation", NONE, Reason.BAD_GENERATION),
    ("sequence", lambda right: right + 1, Reason.BAD_SEQUENCE),
    ("sequence", lambda right: (right - 1) % 2**64, Reason.BAD_SEQUENCE),
    ("sequence", lambda right: right + 2**32, Reason.BAD_SEQUENCE),
    ("kind", NONE, Reason.BAD_KIND),
    ("kind", 5, Reason.BAD_KIND),
    ("kind", 2**32 - 1, Reason.BAD_KIND),
    ("kind", layout.FrameKind.ROWS, Reason.BAD_ROWS),
    ("kind", layout.FrameKind.ASSIGN, Reason.BAD_ROWS),
    ("dtype", NONE, Reason.BAD_DTYPE),
    ("dtype", 4, Reason.BAD_DTYPE),
    ("dtype", 2**32 - 1, Reason.BAD_DTYPE),
    ("dtype", 2, Reason.BAD_SIZE),
    ("payload_bytes", NONE, Reason.BAD_SIZE),
    ("payload_bytes", lambda right: right + 4, Reason.BAD_SIZE),
    ("payload_bytes", lambda right: right - 4, Reason.BAD_SIZE),
    ("payload_bytes", lambda right: right + 2**32, Reason.BAD_SIZE),
    ("payload_bytes", ALL, Reason.BAD_SIZE),
    ("flags", NONE, Reason.UNCHECKED),
    ("flags", layout.NONFINITE, Reason.UNCHECKED),
    ("flags", layout.CHECKED | layout.NONFINITE, Reason.NOT_FINITE),
    ("rate_scale", -1.0, Reason.BAD_SCALE),
    ("rate_scale", float("nan"), Reason.BAD_SCALE),
    ("rate_scale", float("inf"), Reason.BAD_SCALE),
    ("rate_scale", -float("inf"), Reason.BAD_SCALE),
]


class Writer:
    """A learner that writes its frames by itself."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.client = Client(str(job.socket))
        place = self.client.place
        self.ring = place.ring.view(RING)
        self.published = 0
        self._rings = place.ring.address, place.control.address
        self._head_at = place.ring.word(RING, "head")

    def publish(self, value: float, **wrong: Any) -> None:
        """A frame as it should be, except the fields in `wrong`."""
        client = self.client
        ring = client.place.ring
        assert _native.wait_grant(*self._rings, self.published, WAIT_NS) == 0
        at = claim(*self._rings, WAIT_NS) - ring.address
        count = client.model.elements
        ring.array(np.float32, count, at + PAYLOAD_AT)[:] = value
        frame = ring.array(FRAME, 1, at)
        right = {
            "sequence": self.published,
            "generation": client.generation,
            "clock": self.published,
            "version": client.current_version,
            "kind": layout.FrameKind.DENSE,
            "dtype": layout.WireType.FLOAT32,
            "payload_bytes": 4 * count,
            "flags": layout.CHECKED,
            "blocks": 1,  # meant by a frame of rows only
            "batch": NO_BATCH,
            "samples": 1,
            "rate_scale": 1.0,
        }
        for field, value_ in right.items():
            if field in wrong:
                value_ = wrong[field](value_) if callable(wrong[field]) else wrong[field]
            frame[0][field] = value_
        self.published += 1
        _native.store(self._head_at, self.published)
        _native.futex_wake(self._head_at)

    def wait_applied(self) -> None:
        assert _native.wait_applied(*self._rings, self.published - 1, WAIT_NS) == 0

    def status(self) -> dict[str, Any]:
        (row,) = self.job.status()["learners"]
        return dict(row)


@pytest.fixture(scope="module", params=JOBS)
def served(request: pytest.FixtureRequest, job_of: Callable[..., Any]) -> Iterator[Any]:
    with job_of(JOBS[request.param]) as started:
        yield started


@pytest.fixture
def writer(served: Any) -> Iterator[Writer]:
    made = Writer(served)
    with made.client:
        yield made
    served.gone()


def test_every_reason_is_tried() -> None:
    # Of slots that the optimizer does not have in tests/unit/test_shard.py.
    others = {Reason.OK, Reason.ABANDONED, Reason.TORN, Reason.BAD_ASSIGN}
    assert {reason for _, _, reason in BAD} == set(Reason) - others


def test_bad_frames_never_reach_the_weights(writer: Writer) -> None:
    """Each bad header, then a good gradient behind it."""
    before = writer.job.weights()
    for count, (field, wrong, reason) in enumerate(BAD, 1):
        writer.publish(POISON, **{field: wrong})
        writer.wait_applied()
        row = writer.status()
        assert row["refused"] == count, (field, wrong)
        assert row["refused_because"] == REASON_TEXT[reason], (field, wrong)
        writer.publish(1.0)
        writer.wait_applied()
        assert writer.status()["applied"] == count
        np.testing.assert_array_equal(writer.job.weights(), before - np.float32(count))


def test_bad_and_good_frames_in_one_ring(writer: Writer) -> None:
    """Published without waiting, so that they stand in the ring together."""
    before, refused = writer.job.weights(), writer.job.status()["gradients_refused"]
    for count in range(60):
        if count % 3:
            writer.publish(1.0)
        else:
            field, wrong, _ = BAD[count % len(BAD)]
            writer.publish(POISON, **{field: wrong})
    writer.wait_applied()
    np.testing.assert_array_equal(writer.job.weights(), before - 40)
    status = writer.job.status()
    assert status["gradients_refused"] == refused + 20
    assert (status["learners"][0]["applied"], status["learners"][0]["refused"]) == (40, 20)


@pytest.mark.parametrize("served", ["superstep"], indirect=True)
def test_a_superstep_goes_on_without_the_refused(served: Any) -> None:
    """The mean is over the good gradients; the barrier does not wait for a better one."""
    before, bad, good = served.weights(), Writer(served), Writer(served)
    with bad.client, good.client:
        for each in (bad, good):
            each.client.wait_turn(PATIENCE_S)  # then both are members of the first superstep
        for count in range(1, 4):
            bad.publish(POISON, kind=9)
            good.publish(1.0)
            good.wait_applied()
            np.testing.assert_array_equal(served.weights(), before - np.float32(count))
        rows = sorted(served.status()["learners"], key=lambda row: row["generation"])
        assert [row["refused"] for row in rows] == [3, 0]
        assert [row["applied"] for row in rows] == [0, 3]
    served.gone()


def test_wild_values_that_only_statistics_see(writer: Writer) -> None:
    """Check that versions of the future, batches never handed out, and losses of NaN do no harm."""
    before = writer.job.weights()
    unasked = writer.status()["unasked"]
    writer.publish(1.0, version=ALL, clock=ALL, samples=2**32 - 1, loss=float("nan"))
    writer.publish(1.0, version=NONE, batch=(5 << 32) | 7, blocks=2**32 - 1)
    writer.wait_applied()
    np.testing.assert_array_equal(writer.job.weights(), before - 2)
    assert writer.status()["unasked"] == unasked + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head", 1000),
        ("head", 2**40),
        ("head", 2**64 - 1),
        ("tail", 2**60),
        ("work_tail", 2**63),
        ("hold", 1),
        ("header", 0),
        ("shards", 2**32 - 1),
    ],
)
def test_wild_words_in_a_ring_hurt_no_other(served: Any, field: str, value: int) -> None:
    wild, good = Writer(served), Writer(served)
    before = served.weights()
    with wild.client, good.client:
        for each in (wild, good):
            each.client.wait_turn(PATIENCE_S)
        ring = wild.ring
        if ring[field].dtype.names:
            ring[field] = np.zeros((), ring[field].dtype)
            if field == "tail":
                ring[field]["value"] = value
        else:
            ring[field] = value
        served.status()
        wild.client.detach()
        for _ in range(3):
            good.publish(1.0)
            good.wait_applied()
    np.testing.assert_array_equal(served.weights(), before - 3)
    served.gone()


@pytest.mark.parametrize("served", ["one shard"], indirect=True)
def test_the_status_believes_no_ring(writer: Writer) -> None:
    ring = writer.ring
    shards = int(ring["shards"])
    ring["shards"] = 0
    try:
        assert writer.status()["queue"] == 0
    finally:
        ring["shards"] = shards


@pytest.mark.parametrize("field", ["slots_at", "slot_bytes"])
def test_a_superstep_believes_no_ring(job: Callable[..., Any], field: str) -> None:
    started = job(**SMALL, sync="bsp")
    wild = Writer(started)
    with wild.client:
        wild.publish(1.0)
        wild.wait_applied()
        right = wild.ring[field]
        started.pause(True)
        wild.publish(1.0)
        wild.ring[field] = 2**40
        started.pause(False)
        wild.wait_applied()
        wild.ring[field] = right
    np.testing.assert_array_equal(started.weights(), -2)


def test_a_learner_can_write_nothing_but_its_ring(writer: Writer) -> None:
    for part in (writer.client.place.control, writer.client.place.weights):
        with pytest.raises((ValueError, TypeError)):
            part.memory[0:8] = bytes(8)
    assert not writer.client.flat.flags.writeable
    assert writer.client.place.control.view(CONTROL)["header"]["magic"] == layout.MAGIC
