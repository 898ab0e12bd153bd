"""Rings that learners have damaged, as shards see them; see crash/test_damaged_rings.py."""

from __future__ import annotations

import numpy as np
import pytest
from support import Rig, eventually

from gadei_ps import _native
from gadei_ps.memory import layout
from gadei_ps.memory.weights import Tensor

W = [Tensor("w", (10,))]


@pytest.mark.parametrize("jump", [3, 2**40, 2**64 - 1])
def test_a_head_that_is_nonsense(jump: int, job_name: str) -> None:
    """A learner that overwrites its own ring harms no other learner and can leave."""
    with Rig(job_name, W, learners=2, slots=2) as rig, rig.serving():
        head = rig.memory.rings[0].word(layout.RING, "head")
        _native.store(head, jump)
        rig.apply(1, rig.ones())
        np.testing.assert_array_equal(rig.weights, -1.0)
        rig.roster[0]["wanted"] = 0
        rig.bell()
        # Until the manager says that every shard knows it, one may be about to begin a frame.
        for _ in range(3):
            rig.apply(1, rig.ones())
            assert not rig.roster[0]["drained"]
        rig.roster[0]["broken"] = 1
        rig.let_look()
        assert rig.roster[0]["drained"], "the learner is evicted"
        assert int(rig.control["past_refused"]) >= 1


def test_the_next_server_reads_no_ring_that_is_known_to_be_broken(job_name: str) -> None:
    with Rig(job_name, W, learners=2) as rig:
        rig.publish(0, rig.ones())
        rig.roster[0]["broken"] = 1
        with rig.serving():
            for _ in range(3):
                rig.apply(1, rig.ones())
        np.testing.assert_array_equal(rig.weights, -3.0)
        assert rig.state["applied"][0, 0] == 0


def test_what_one_shard_has_consumed_of_a_broken_ring_is_torn_for_the_other(job_name: str) -> None:
    with Rig(job_name, [Tensor("w", (5000,))], learners=2, shards=2) as rig:
        rig.publish(0, rig.ones())
        rig.roster[0]["broken"] = 1
        record = rig.state["record"]
        rig.state["applied"][0, 0] = record["gradients"][0] = 1
        with rig.serving():
            rig.apply(1, rig.ones())
            eventually(lambda: rig.state["applied"][1, 0] == 1)
        np.testing.assert_array_equal(rig.weights, -1.0)
        assert record["torn"][:2].tolist() == [0, 1]
        # By their number a shard knows how stale the next gradient is.
        assert record["gradients"][:2].tolist() == [2, 2]
