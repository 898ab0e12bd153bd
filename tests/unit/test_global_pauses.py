"""Messages of a server's manager to shards, learners and the next server in a pause."""

from __future__ import annotations

import numpy as np
import pytest
from support import Rig, eventually
from support.stepped import Stepped, attach, begin, make_leases

from gadei_ps import _native, sync
from gadei_ps.job import hyperparameters, sync_change
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Action, FrameKind, Mode
from gadei_ps.memory.weights import Tensor

TIMES = 1000
W = [Tensor("w", (5000,))]  # enough for two shards

pytestmark = pytest.mark.usefixtures("compiled")


def _ask(rig: Rig, row: int, number: int, one: Stepped | None = None) -> int:
    """Ask as the learner does, and shard 0 of the server."""
    asked = number << 32 | int(rig.roster["generation"][row])
    rig.ring(row)["exclusive"] = asked
    if one is not None:
        one.board["requests"] += 1
    return asked


def _assign(rig: Rig, row: int) -> None:
    """An assignment of nothing."""
    rig.publish(row, rig.ones(), kind=FrameKind.ASSIGN, payload_bytes=0, steps=2**64 - 1)


def test_all_stand_still_before_the_learner_hears_of_it(job_name: str) -> None:
    with Rig(job_name, W, learners=3, shards=2) as rig:
        begin(rig, sync.parse("ssp:s=5"))
        make_leases(rig)
        rig.ring(0)["wants"] = 0  # the one that will ask takes no turns
        with Stepped(rig) as one:
            one.lead()
            one.turns()
            free = int(rig.roster["grant"][0])
            assert rig.roster["grant"][1:3].tolist() == [6, 6]
            _ask(rig, 0, 1, one)
            one.turns()
            assert rig.roster["grant"][:3].tolist() == [free, 1, 1]
            assert rig.control["report"] == 1
            rig.ring(0)["exclusive"] = 1 << 32  # it does not wait any longer
            one.turns()
            assert rig.roster["grant"][:3].tolist() == [free, 6, 6]
            asked = _ask(rig, 0, 2, one)
            one.turns()
            for row in (1, 2):
                rig.publish(row, rig.ones())
                one.consume(row, row - 1)  # of the first nothing yet
            one.turns()
            assert rig.control["mode"] & 3 == Mode.ON_ARRIVAL
            one.consume(1, 1)
            one.turns()
            assert rig.control["mode"] == 1 << sync_change.MODE_BITS | Mode.HOLD
            assert rig.control["pauses"] == 1
            one.turns()
            assert not rig.roster["exclusive"].any()
            one.obey()
            rig.state["applied"][1, 2] = 0  # a shard is behind
            one.turns()
            assert not rig.roster["exclusive"].any()
            one.consume(2, 1)
            one.turns()
            assert rig.roster["exclusive"][:3].tolist() == [asked, 0, 0]
            assert rig.roster["grant"][:3].tolist() == [free, 1, 1]

            # Numbers of the optimizer wait until it is over, and a joining learner has no grant.
            hyperparameters.request(rig.memory.control, OptimizerSpec(Kind.SGD, 0.5).pack()[None])
            _assign(rig, 0)
            one.turns()
            assert rig.control["superstep_action"][:3].tolist() == [Action.APPLY, 0, 0]
            one.finish_superstep()
            one.turns()
            assert (rig.control["superstep"], hyperparameters.in_force(rig.memory.control)) == (
                1,
                0,
            )

            # Another time: what the shards have answered is not an answer to that.
            _ask(rig, 0, 3)
            one.turns()
            assert rig.control["mode"] & 3 == Mode.HOLD and not rig.roster["exclusive"].any()
            one.obey()
            one.turns()
            assert hyperparameters.in_force(rig.memory.control) == 1
            one.turns()
            assert rig.control["pauses"] == 2
            assert rig.control["mode"] == 3 << sync_change.MODE_BITS | Mode.HOLD
            assert not rig.roster["exclusive"].any()
            rig.ring(0)["exclusive"] = 3 << 32
            one.turns()
            assert rig.control["mode"] == 3 << sync_change.MODE_BITS | Mode.ON_ARRIVAL
            assert rig.roster["grant"][:3].tolist() == [free, 7, 7]  # no other was reported


def test_a_pause_leaves_nothing_where_nobody_waits(job_name: str) -> None:
    """Check that others are awaited, and each push is reported, only until it ends under ASP."""
    with Rig(job_name, W, learners=2, shards=2) as rig, Stepped(rig) as one:
        make_leases(rig)
        one.lead()
        one.turns()
        for number in (1, 2):
            _ask(rig, 0, number, one)
            one.turns()
            assert (rig.control["report"], rig.roster["member"][:2].tolist()) == (1, [0, 1])
            rig.ring(0)["exclusive"] = number << 32  # it does not wait any longer
            one.turns()
            assert (rig.control["report"], rig.roster["member"][:2].tolist()) == (0, [0, 0])


@pytest.mark.parametrize("model", ["asp", "ssp:s=5"])
def test_an_iteration_that_just_began_is_awaited(model: str, job_name: str) -> None:
    """A learner may have read its grant before it was revoked, and asked for its turn after that.

    It may also wait, so it is granted one iteration; and no other one after that.
    """
    with Rig(job_name, W, learners=2, shards=2) as rig:
        begin(rig, sync.parse(model))
        make_leases(rig)
        with Stepped(rig) as one:
            one.lead()
            one.turns()
            rig.ring(1)["wants"] = 0  # it leaves the model, and keeps its grant
            one.turns()
            granted = int(rig.roster["grant"][1])
            for _ in range(2):
                rig.publish(0, rig.ones())
            one.consume(0, 2)
            one.turns()
            asked = _ask(rig, 0, 1, one)
            one.turn()
            assert rig.roster["grant"][1] == 0 < granted
            rig.ring(1)["wants"] = layout.WANTS_TURN
            one.turns()
            assert (rig.roster["grant"][1], rig.roster["member"][1]) == (1, 1)
            assert rig.roster["base"][1] == (0 if model == "asp" else 2)  # the others' clock
            assert rig.control["mode"] & 3 == Mode.ON_ARRIVAL
            rig.publish(1, rig.ones())
            one.consume(1, 1)
            for _ in range(3):
                one.turns()
                one.obey()
            assert rig.roster["exclusive"][:2].tolist() == [asked, 0]
            assert rig.roster["grant"][1] == 1
            rig.ring(0)["exclusive"] = 1 << 32
            one.turns()
            assert rig.roster["grant"][1] > 1


def test_a_learner_that_waits_for_its_first_turn_is_not_awaited(job_name: str) -> None:
    with Rig(job_name, W, learners=1, shards=2) as rig:
        begin(rig, sync.parse("ssp:s=5"))
        make_leases(rig)
        attach(rig, 1, 2)
        rig.ring(1)["wants"] = 0
        with Stepped(rig) as one:
            one.lead()
            one.turns()
            _ask(rig, 0, 1, one)
            rig.ring(1)["wants"] = layout.WANTS_TURN
            one.turns()
            assert (rig.roster["grant"][1], rig.roster["member"][1]) == (0, 0)
            assert rig.control["mode"] & 3 == Mode.HOLD


@pytest.mark.parametrize("model", ["asp", "ssp:s=5", "bsp"])
def test_the_next_server_goes_on_with_a_stand(model: str, job_name: str) -> None:
    with Rig(job_name, W, learners=3, shards=2, collect=model == "bsp") as rig:
        begin(rig, sync.parse(model))
        make_leases(rig)
        rig.ring(0)["wants"] = 0
        with Stepped(rig) as first:
            first.lead()
            first.turns()
            asked = _ask(rig, 0, 1, first)
            first.turns()
            for row in (1, 2):
                rig.publish(row, rig.ones())
                first.consume(row, 1 - (model == "bsp"))
            first.turns()
            if model == "bsp":
                assert rig.control["superstep"] == 1
                first.finish_superstep()
                first.turns()
            first.obey()
            first.turns()
            assert rig.roster["exclusive"][0] == asked
            _assign(rig, 0)
            first.turns()  # and dies before the superstep is made
            before = int(rig.control["superstep"])
        with Stepped(rig, 1) as second:
            make_leases(rig)
            rig.control["shard"]["mode"] = Mode.ON_ARRIVAL  # as a shard begins
            second.lead()
            second.turns()
            second.obey()
            # The one that is published is not published again, and nobody continues.
            assert rig.control["superstep"] == before
            second.finish_superstep()
            second.turns()
            assert (rig.control["superstep"], rig.state["applied"][0, 0]) == (before, 1)
            assert rig.control["mode"] & 3 == Mode.HOLD
            assert rig.roster["grant"][1:3].tolist() == [1, 1]
            assert rig.roster["exclusive"][0] == asked
            # The learner dies with an assignment on its way. Made later, it would undo gradients.
            _assign(rig, 0)
            rig.roster["wanted"][0] = 0
            second.turns()
            assert (rig.control["superstep"], rig.control["mode"] & 3) == (before + 1, Mode.HOLD)
            assert rig.roster["exclusive"][0] == asked
            second.finish_superstep()
            second.turns()
            wanted = Mode.COLLECT if model == "bsp" else Mode.ON_ARRIVAL
            assert (rig.roster["exclusive"][0], rig.control["mode"] & 3) == (0, wanted)
            grants = {"asp": layout.UNBOUNDED, "ssp:s=5": 7, "bsp": 2}
            assert rig.roster["grant"][1:3].tolist() == [grants[model]] * 2
            assert rig.roster["member"][1:3].tolist() == [int(model != "asp")] * 2


def test_a_stray_word_asks_for_nothing(job_name: str) -> None:
    with Rig(job_name, W, learners=2, shards=1) as rig, Stepped(rig) as one:
        make_leases(rig)
        one.lead()
        one.turns()
        for word in (1 << 32 | 2, 5 << 32, 2**64 - 1, 0x3FF0000000000000):
            rig.ring(0)["exclusive"] = word
            one.board["requests"] += 1
            one.turns()
            assert rig.roster["grant"][0] == rig.roster["grant"][1] == layout.UNBOUNDED
        assert _native.load(rig.memory.control.word(layout.CONTROL, "mode")) & 3 == Mode.ON_ARRIVAL


def test_shards_that_hold_make_a_superstep_once(job_name: str) -> None:
    """A shard that was not notified sees that another one has consumed the frame."""
    with Rig(job_name, [Tensor("w", (2000,))], shards=4) as rig, rig.serving():
        obeyed = rig.control["shard"]["mode"][: rig.shards]
        word = sync_change.set_mode(rig.memory.control, 1, Mode.HOLD)
        eventually(lambda: (obeyed == word).all())
        for number in range(1, TIMES + 1):
            sequence = rig.publish(0, rig.ones())
            rig.superstep({0: Action.APPLY})
            rig.wait_applied(0, sequence)
            eventually(rig.superstep_done)
            assert (rig.state["record"]["steps"][: rig.shards] == number).all()
        np.testing.assert_array_equal(rig.weights, -TIMES)
