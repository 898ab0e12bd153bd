"""Frames that a shard takes from a ring at a time, and wakes of learners."""

from __future__ import annotations

import pytest
from support import Rig

from gadei_ps.memory.weights import Tensor
from gadei_ps.server.arrival import VISIT_BYTES

pytestmark = pytest.mark.usefixtures("compiled")

SLOTS = 4


@pytest.mark.parametrize(
    ("values", "wakes"),
    [(10, 1), (VISIT_BYTES // 2 // 4 - 2000, 2), (VISIT_BYTES // 4, SLOTS)],
    ids=["small", "two at once", "large"],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_learner_is_woken_once_a_visit(
    shards: int, values: int, wakes: int, job_name: str
) -> None:
    with Rig(job_name, [Tensor("w", (values,))], slots=SLOTS, shards=shards) as rig:
        ring = rig.ring(0)
        for _ in range(SLOTS):
            rig.publish(0, rig.ones())
        ring["waits_slot"] = 1
        with rig.serving():
            rig.wait_tail(0, SLOTS)
        # A shard that begins releases again what the one before may have.
        assert int(ring["released"]) == rig.shards * (1 + wakes)
        assert (rig.weights[:values] == -SLOTS).all()
