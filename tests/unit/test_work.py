"""Shards that hand out the server's batches: to whom, in which order, and what answers one."""

from __future__ import annotations

import numpy as np
import pytest
from support import Rig, eventually
from support.frames import claim

from gadei_ps import _native
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Work, batch_id
from gadei_ps.memory.weights import Tensor

pytestmark = pytest.mark.usefixtures("compiled")

W = [Tensor("w", (10,))]


def test_a_learner_takes_the_batches_that_it_must_answer(job_name: str) -> None:
    with Rig(job_name, W, learners=1, ahead=2, slots=4) as rig, rig.serving():
        rig.set_work(5, 2)
        ring, taken = rig.memory.rings[0].address, []
        while (batch := _native.take_work(ring, rig.control_at, 10**10)) >= 0:
            assert batch in rig.handed(0)
            taken.append(batch)
            rig.apply(0, rig.ones(), batch=batch)
        assert taken == [batch_id(epoch, index) for epoch in range(2) for index in range(5)]
        assert rig.roster[0]["unasked"] == 0


def test_batches_go_out_in_the_order_of_rows(job_name: str) -> None:
    """Check it even if the ring of a lower row is shown last, as the manager's speed decides."""
    with Rig(job_name, W, learners=3, ahead=1) as rig:
        shown = rig.board["ring"][1].copy()
        rig.board["ring"][1] = 0
        with rig.serving():
            rig.set_work(5, 1)
            eventually(lambda: rig.handed(0))
            rig.let_look()
            assert not rig.handed(2)
            rig.board["ring"][1] = shown
            rig.board["table_version"] += 1
            rig.bell()
            eventually(lambda: rig.handed(2))
            assert [rig.handed(row) for row in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize("gone", [{"wanted": 0}, {"retired": 2}, {"generation": 5}])
def test_batches_wait_for_nobody_who_is_gone(job_name: str, gone: dict[str, int]) -> None:
    with Rig(job_name, W, learners=3, ahead=1) as rig:
        rig.board["ring"][1] = 0
        for field, value in gone.items():
            rig.roster[1][field] = value
        with rig.serving():
            rig.set_work(5, 1)
            eventually(lambda: rig.handed(2))
            assert [rig.handed(row) for row in range(3)] == [[0], [], [1]]


def test_batches_of_the_dead_go_to_others(job_name: str) -> None:
    with Rig(job_name, W, learners=2, ahead=2) as rig, rig.serving():
        rig.set_work(3, 1)
        first = eventually(lambda: rig.handed(0))
        eventually(lambda: len(rig.handed(0)) + len(rig.handed(1)) == 3)
        rig.apply(0, rig.ones(), batch=first[0])
        rig.roster[0]["wanted"] = 0
        rig.bell()
        eventually(lambda: rig.roster[0]["drained"])
        answered = 1
        while int(rig.control["work"]) != Work.DONE:
            for batch in rig.handed(1):
                rig.apply(1, rig.ones(), batch=batch)
                answered += 1
            rig.bell()
        assert answered == 3
        assert rig.control["requeued_total"] == 1
        assert rig.roster[1]["unasked"] == 0
        np.testing.assert_array_equal(rig.weights, -3.0)


def test_a_batch_that_was_not_asked_for(job_name: str) -> None:
    with Rig(job_name, W, learners=1, ahead=1) as rig, rig.serving():
        rig.set_work(5, 1)
        (batch,) = eventually(lambda: rig.handed(0))
        rig.apply(0, rig.ones(), batch=batch_id(0, 4))
        rig.apply(0, rig.ones(), batch=batch_id(7, 7))
        assert rig.roster[0]["unasked"] == 2
        assert rig.handed(0) == [batch]


def test_a_refused_gradient_answers_its_batch(job_name: str) -> None:
    """Not one whose header is lost: what that says of a batch is not believed."""
    with Rig(job_name, W, learners=1, ahead=1, slots=2) as rig, rig.serving():
        rig.set_work(3, 1)
        (first,) = eventually(lambda: rig.handed(0))
        assert first == 0
        rig.apply(0, rig.ones(), batch=first, generation=0)
        assert (rig.handed(0), int(rig.roster[0]["refused"])) == ([first], 1)
        rig.apply(0, rig.ones(), batch=first, flags=layout.CHECKED | layout.NONFINITE)
        eventually(lambda: rig.handed(0) not in ([], [first]))
        assert rig.control["requeued_total"] == rig.roster[0]["unasked"] == 0
        np.testing.assert_array_equal(rig.weights, 0.0)


@pytest.mark.parametrize("depart_first", [True, False])
def test_who_publishes_after_leaving_takes_no_batch_along(
    depart_first: bool, job_name: str
) -> None:
    with Rig(job_name, W, learners=2, ahead=1, slots=4) as rig:
        rig.set_work(4, 1)
        ring = rig.memory.rings[0].address
        slot = claim(ring, rig.control_at, 0)
        assert slot > 0
        with rig.serving():
            eventually(lambda: rig.handed(0) and rig.handed(1))
            (batch,) = rig.handed(0)
            rig.roster[0]["wanted"] = 0
            if depart_first:
                rig.bell()
                eventually(lambda: rig.roster[0]["drained"])
            # It was in the middle of its push, and had looked at `wanted` before.
            rig.publish(0, rig.ones(), slot=slot, batch=batch)
            rig.wait_tail(0, 1)
            rig.bell()
            eventually(lambda: rig.roster[0]["drained"])
            assert rig.handed(0) == []
