"""Messages of a synchronization model's driver to shards, learners and the next server."""

from __future__ import annotations

from unittest import mock

import pytest
from support import Rig
from support.stepped import Stepped, begin, make_leases

from gadei_ps import _native, sync
from gadei_ps.job import hyperparameters, sync_change
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Action, FrameKind, Mode, Reason
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Tensor

W = [Tensor("w", (5000,))]  # enough for two shards

pytestmark = pytest.mark.usefixtures("compiled")


def test_each_superstep_is_whole_before_it_is_published(job_name: str) -> None:
    with Rig(job_name, W, learners=4, shards=2, collect=True) as rig, Stepped(rig) as one:
        make_leases(rig)
        one.lead()
        one.turns()
        assert rig.roster["grant"][:4].tolist() == [1, 1, 1, 1]
        rig.publish(0, rig.ones())
        rig.publish(1, rig.ones(), payload_bytes=8)
        rig.publish(2, rig.ones(), kind=FrameKind.EMPTY)
        rig.publish(3, rig.ones())
        published = []

        def store(at: int, value: int) -> None:
            real(at, value)
            if at == one.server.control_segment.word(layout.CONTROL, "superstep"):
                control = rig.control
                words = (control[f"superstep_{name}"] for name in ("action", "upto", "reason"))
                columns = zip(*(word[:4].tolist() for word in words), strict=True)
                published.append(
                    {row: each for row, each in enumerate(columns) if each[0] != Action.SKIP}
                )

        real = _native.store
        rig.control["superstep_reason"][2] = Reason.TORN  # of the learner before
        with mock.patch.object(_native, "store", store):
            for number in (1, 2, 3):
                one.turn()
                one.turn()
                assert (rig.control["superstep"], rig.control["supersteps_done"]) == (
                    number,
                    number - 1,
                )
                one.finish_superstep()
            assert rig.roster["grant"][:4].tolist() == [1, 1, 1, 1]
            one.turn()
        assert published == [
            {1: (Action.REFUSE, 1, Reason.BAD_SIZE)},
            {2: (Action.DROP, 1, Reason.ABANDONED)},
            {0: (Action.APPLY, 1, Reason.OK), 3: (Action.APPLY, 1, Reason.OK)},
        ]
        assert rig.control["supersteps_done"] == 3
        assert rig.roster["grant"][:4].tolist() == [2, 2, 2, 2]


def test_a_straggler_learns_that_it_may_give_up(job_name: str) -> None:
    with Rig(job_name, W, learners=2, shards=1, collect=True) as rig:
        begin(rig, sync.parse("cutoff:c=1"))
        make_leases(rig)
        with Stepped(rig) as one:
            one.lead()
            one.turns()
            rig.publish(0, rig.ones())
            one.turn()
            assert rig.roster["obsolete"][:2].tolist() == [0, 0]  # not before it is applied
            one.finish_superstep()
            one.turn()
            assert rig.roster["obsolete"][:2].tolist() == [0, 1]


def test_the_next_server_finds_the_same_clocks(job_name: str) -> None:
    with Rig(job_name, W, learners=3, shards=2) as rig:
        begin(rig, sync.parse("ssp:s=3"))
        make_leases(rig)
        rig.ring(1)["wants"] = rig.ring(2)["wants"] = 0  # they come later
        with Stepped(rig) as first:
            first.lead()
            first.turns()
            first.consume(0, 2)
            first.turns()
            rig.ring(1)["wants"] = rig.ring(2)["wants"] = layout.WANTS_TURN
            first.turns()
            first.consume(0, 3)
            first.turns()
            rig.ring(2)["wants"] = 0  # it has ended, and nobody waits for it
            first.turns()
            assert rig.roster["member"][:3].tolist() == [1, 1, 0]
            grants = rig.roster["grant"][:2].tolist()
            assert grants == [6, 4]
        rig.roster["grant"] = 0
        with Stepped(rig, 1) as second:
            second.lead()
            second.turns()
            assert rig.roster["grant"][:2].tolist() == grants
            second.consume(1, 1)
            second.turns()
            assert rig.roster["grant"][:2].tolist() == [7, 5]


def test_a_change_of_the_model(job_name: str) -> None:
    """Row 0 is free, and its counts are those of a learner before."""
    with Rig(job_name, W, learners=4, shards=2) as rig, Stepped(rig) as one:
        make_leases(rig)
        rig.memory.remove_ring(0)
        rig.roster["wanted"][0], rig.roster["retired"][0] = 0, 1
        applied, entries = rig.state["applied"], rig.roster[1:4]
        applied[:2, 0] = 7, 8
        rig.ring(2)["wants"] = 0  # it only reads, or is not awaited
        one.lead()
        one.turns()
        entries["obsolete"] = 5
        sync_change.request(rig.memory.control, sync.parse("bsp"))
        one.turns()
        # Each learner may finish the iteration in flight. One that holds up the others can be seen.
        assert entries["grant"].tolist() == [1, 1, 1]
        assert entries["member"].tolist() == [1, 0, 1]
        rig.publish(1, rig.ones())
        rig.publish(3, rig.ones())
        one.consume(1, 1)
        one.consume(3, 1)
        rig.publish(2, rig.ones())
        applied[0, 2] = 1  # and shard 1 is about to follow
        one.turns()
        assert rig.control["mode"] == 1 << sync_change.MODE_BITS | Mode.HOLD
        one.obey()
        one.turns()
        assert (rig.shards, rig.control["sync_done"]) == (2, 0)

        applied[1, 2] = 1
        at_finish = []

        def store(at: int, value: int) -> None:
            real(at, value)
            if rig.control["sync_done"]:
                at_finish.append(entries[["grant", "member", "obsolete"]].tolist())

        real = _native.store
        with mock.patch.object(_native, "store", store):
            one.turn()
        # From the number on the new model is in force, and nothing of the old one is left.
        assert at_finish[:1] == [[(1, 0, 0)] * 3]
        assert rig.control["sync_done"] == 1
        assert rig.control["mode"] == 1 << sync_change.MODE_BITS | Mode.COLLECT
        assert rig.control["report"] == 1
        one.turns()
        assert entries["grant"].tolist() == [2, 1, 2]


def test_the_words_of_a_model(job_name: str) -> None:
    """Two texts take turns; a long one leaves nothing behind."""
    with Rig(job_name, W) as rig:
        control = rig.memory.control
        asked = [sync.parse(text) for text in ("ssp:s=300", "wsp:D=2,s_local=3", "bsp", "asp")]
        for number, model in enumerate(asked, start=1):
            sync_change.request(control, model)
            assert sync_change.requested(control) == number
            assert sync_change.text(control, number) == str(model)
            sync_change.enforce(control, number, model)
            _native.store(control.word(layout.CONTROL, "sync_done"), number)
            assert (rig.control["wave"], rig.control["report"]) == (model.wave, model.uses_pushes)
        assert {model.wave for model in asked} == {1, 4}


class _Killed(Exception):
    """The server dies here."""


@pytest.mark.parametrize("collect", [False, True])
@pytest.mark.parametrize("last", ["hyper", "numbers_done", "mode"])
def test_new_numbers_whichever_store_is_the_last(last: str, collect: bool, job_name: str) -> None:
    """No shard may continue before the numbers are whole, whichever server makes them so."""
    with Rig(job_name, W, learners=2, shards=2, collect=collect, optimizer={"lr": 1.0}) as rig:
        make_leases(rig)
        memory = rig.memory.control
        packed = OptimizerSpec(Kind.SGD, 0.25, weight_decay=0.5, clip_norm=3.0).pack()[None]
        with Stepped(rig) as one:
            one.lead()
            one.turns()
            assert hyperparameters.request(memory, packed)
            assert not hyperparameters.request(memory, packed * 2)  # one after the other

            real = hyperparameters.apply

            def halfway(control: Segment, number: int) -> None:
                if last == "hyper":
                    control.view(layout.CONTROL)["hyper"][0, :3] = packed[0, :3]
                    raise _Killed
                real(control, number)
                if last == "mode":
                    sync_change.enforce(control, 0, sync.parse("bsp" if collect else "asp"))
                raise _Killed

            with (
                mock.patch.object(hyperparameters, "apply", halfway),
                pytest.raises(_Killed),
            ):
                for _ in range(5):
                    one.obey()
                    one.turn()
            version, held = hyperparameters.in_force(memory), rig.control["mode"] & 3
            assert version == int(last != "hyper")
            if not collect and last != "mode":
                assert held == Mode.HOLD  # so that the next server's shards apply nothing
        with Stepped(rig, 1) as other:
            make_leases(rig)
            rig.control["shard"]["mode"] = Mode.ON_ARRIVAL  # as a shard begins
            other.lead()
            for _ in range(3):
                if last == "hyper" and not collect and not hyperparameters.in_force(memory):
                    assert rig.control["mode"] & 3 == Mode.HOLD
                other.turn()
                other.serve()
                other.obey()
            assert hyperparameters.are_in_force(memory, packed)
            wanted = Mode.COLLECT if collect else Mode.ON_ARRIVAL
            assert rig.control["mode"] == 1 << sync_change.MODE_BITS | wanted
            assert hyperparameters.read(rig.control, rig.control_at)[0] == 1


def test_new_numbers_wait_for_the_slowest_shard(job_name: str) -> None:
    with Rig(job_name, W, learners=1, shards=2, optimizer={"lr": 1.0}) as rig, Stepped(rig) as one:
        make_leases(rig)
        one.lead()
        one.turns()
        memory = rig.memory.control
        for number, rate in enumerate((0.5, 0.25), start=1):
            packed = OptimizerSpec(Kind.SGD, rate).pack()[None]
            hyperparameters.request(memory, packed)
            one.turns()
            # What a shard has answered to the change before is not an answer to this one.
            assert rig.control["mode"] == number << sync_change.MODE_BITS | Mode.HOLD
            one.turns()
            assert hyperparameters.in_force(memory) == number - 1
            one.obey()
            rig.state["applied"][:2, 0] = 2 * number, 2 * number - 1
            one.turns()
            assert hyperparameters.in_force(memory) == number - 1
            rig.state["applied"][1, 0] = 2 * number
            rig.control["version"] = 2 * number
            one.turns()
            assert hyperparameters.are_in_force(memory, packed)
            assert rig.control["numbers_version"] == 2 * number
            assert rig.control["mode"] == number << sync_change.MODE_BITS | Mode.ON_ARRIVAL


def test_new_numbers_wait_for_the_open_superstep(job_name: str) -> None:
    with Rig(job_name, W, learners=1, shards=2, collect=True) as rig, Stepped(rig) as one:
        make_leases(rig)
        one.lead()
        one.turns()
        rig.publish(0, rig.ones())
        one.turns()
        assert rig.control["superstep"] == 1
        hyperparameters.request(rig.memory.control, OptimizerSpec(Kind.SGD, 0.5).pack()[None])
        one.turns()
        assert hyperparameters.in_force(rig.memory.control) == 0
        one.finish_superstep()
        one.turns()
        assert hyperparameters.in_force(rig.memory.control) == 1
