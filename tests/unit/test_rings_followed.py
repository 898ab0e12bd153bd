"""Rings that a server shows to its shards, and detached learners, by the roster."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import structlog
from support import Rig
from support.stepped import Stepped, attach, make_leases

from gadei_ps import _native
from gadei_ps.memory import layout, segment
from gadei_ps.memory.layout import Gone
from gadei_ps.memory.weights import Tensor

ROW = 1  # row 0 is free
GENERATION = 2
NEXT = 7

pytestmark = pytest.mark.usefixtures("compiled")


def made(job_name: str, collect: bool = False) -> Rig:
    """Use rows 1 and 2; another server already shows the rings of both."""
    rig = Rig(job_name, [Tensor("w", (5000,))], learners=3, shards=2, slots=2, collect=collect)
    make_leases(rig)
    rig.roster[0]["retired"] = 1
    rig.memory.remove_ring(0)
    rig.roster[0]["wanted"] = 0
    assert rig.shards == 2
    return rig


@pytest.fixture
def rig(job_name: str) -> Iterator[Rig]:
    with made(job_name) as one:
        yield one


@pytest.fixture
def standby(rig: Rig) -> Iterator[Stepped]:
    with Stepped(rig, 1) as one:
        one.stand_by()
        yield one


@pytest.fixture
def active(rig: Rig) -> Iterator[Stepped]:
    with Stepped(rig) as one:
        one.lead()
        yield one


def shown(one: Stepped) -> list[int]:
    """Return rows that the shards see."""
    return [row for row, line in enumerate(one.shown) if line["address"]]


def test_a_ring_is_shown_as_long_as_its_row_is_not_retired(rig: Rig, standby: Stepped) -> None:
    standby.turn()
    first, line = standby.rings.mapped[ROW], standby.shown[ROW]
    assert shown(standby) == [1, 2]
    assert (line["address"], line["generation"]) == (first.ring.address, GENERATION)
    version = int(standby.board["table_version"])
    assert version == 2
    standby.serve()
    standby.turn()
    assert standby.rings.mapped[ROW] is first
    assert standby.board["table_version"] == version

    rig.roster[ROW]["retired"] = GENERATION
    standby.turn()
    assert shown(standby) == [2]
    assert standby.rings.forgotten == {ROW}  # no shard has seen the newer table
    assert standby.board["table_version"] == version + 1
    rig.memory.remove_ring(ROW)
    attach(rig, ROW, NEXT)
    standby.turn()
    assert ROW not in standby.rings.mapped  # that is the active server's affair
    rig.roster[ROW]["served"] = NEXT
    standby.serve()
    standby.turn()
    assert standby.rings.mapped[ROW].generation == NEXT
    assert not standby.rings.forgotten


def test_the_ring_of_a_learner_two_before(rig: Rig, standby: Stepped) -> None:
    """A server that stood still has not seen each retired learner of a row."""
    standby.turn()
    standby.serve()
    rig.memory.remove_ring(ROW)
    rig.roster[ROW]["retired"] = NEXT - 1
    attach(rig, ROW, NEXT)
    standby.turn()
    assert shown(standby) == [2]


@pytest.mark.parametrize("given", [False, True])
def test_a_row_that_passes_on_while_its_ring_is_opened(
    given: bool, rig: Rig, standby: Stepped
) -> None:
    """The ring that was opened by its name may be the next learner's."""
    rings = standby.rings
    opened = rings.map

    def late(row: int, *args: object, **how: bool) -> object:
        if row == ROW:
            rig.roster[ROW]["retired"] = GENERATION
            rig.memory.remove_ring(ROW)
            attach(rig, ROW, NEXT)
            if not given:  # its maker has not come so far
                rig.roster[ROW]["generation"] = rig.roster[ROW]["wanted"] = GENERATION
        return opened(row, *args, **how)  # type: ignore[arg-type]

    with mock.patch.object(rings, "map", late):
        standby.turn()
    assert shown(standby) == [2]


def test_a_ring_that_a_standby_cannot_map(rig: Rig, standby: Stepped) -> None:
    segment.unlink(rig.memory.rings[ROW].name)
    standby.turn()
    assert shown(standby) == [2]
    assert rig.roster[ROW]["retired"] == 0


def test_a_new_ring_that_cannot_be_mapped_is_refused(rig: Rig, active: Stepped) -> None:
    segment.unlink(rig.memory.rings[ROW].name)
    rig.roster[ROW]["served"] = 0
    active.turn()
    assert shown(active) == [2]
    assert rig.roster["retired"][:3].tolist() == [1, GENERATION, 0]


def test_zeros_in_the_place_of_a_ring_that_shards_may_have_in_hand(
    rig: Rig, active: Stepped
) -> None:
    segment.unlink(rig.memory.rings[ROW].name)
    active.turn()
    assert shown(active) == [1, 2]
    assert active.shown["broken"][:3].tolist() == [0, GENERATION, 0]
    assert rig.roster["broken"][:3].tolist() == [0, 0, 0]
    active.turns()
    assert rig.roster["broken"][:3].tolist() == [0, GENERATION, 0]
    assert rig.roster["wanted"][:3].tolist() == [0, 0, 3]


def test_a_ring_that_is_known_to_be_broken(rig: Rig, standby: Stepped) -> None:
    rig.roster[ROW]["broken"] = GENERATION
    rig.roster[2]["broken"] = GENERATION  # of another learner, two before
    seen = []

    def store(at: int, value: int) -> None:
        real(at, value)
        seen.extend(standby.shown["broken"][row] for row in shown(standby) if row == ROW)

    real = _native.store
    with mock.patch.object(_native, "store", store):
        standby.turn()
    assert shown(standby) == [1, 2]
    assert set(seen) == {GENERATION}  # before any shard could read a frame
    assert standby.shown["broken"][2] == 0

    # It was found by the active server, which dies.
    rig.roster[2]["broken"] = 3
    standby.server._try_leases()
    standby.turn()
    assert standby.shown["broken"][:3].tolist() == [0, GENERATION, 3]


def test_a_learner_that_leaves(rig: Rig, active: Stepped) -> None:
    active.turns()
    driver = active.server.driver
    assert driver is not None
    rig.roster[ROW]["wanted"] = 0
    active.turns()
    assert [one.leaving for one in driver.members.values()] == [True, False]
    assert shown(active) == [1, 2]
    rig.roster["drained"][:3] = 1
    active.turn()
    assert shown(active) == [2]
    assert rig.roster["retired"][:3].tolist() == [1, 0, 0]  # shards may still look at it
    active.serve()
    active.turn()
    assert rig.roster["retired"][:3].tolist() == [1, GENERATION, 0]


def test_a_broken_ring_goes_when_all_shards_know_it(rig: Rig, active: Stepped) -> None:
    active.turns()
    entry = rig.roster[ROW]
    active.shown[ROW]["broken"] = GENERATION  # as a shard has found
    with structlog.testing.capture_logs() as events:
        active.turn()
        active.turn()
        assert (entry["broken"], entry["wanted"]) == (0, GENERATION)
        assert rig.roster[2]["broken"] == 0
        for _ in range(2):
            active.serve()
            active.turn()
        assert (entry["broken"], entry["wanted"], entry["gone"]) == (GENERATION, 0, Gone.DAMAGED)
        assert rig.roster["wanted"][2] == 3
    assert len(events) == 1


def test_a_learner_that_died_before_its_ring_was_found_broken(rig: Rig, active: Stepped) -> None:
    active.turns()
    entry = rig.roster[ROW]
    entry["gone"], entry["wanted"] = Gone.DIED, 0
    active.shown[ROW]["broken"] = GENERATION
    active.turns()
    assert (entry["broken"], entry["gone"]) == (GENERATION, Gone.DIED)


def test_a_broken_ring_whose_gradient_is_part_of_a_superstep(job_name: str) -> None:
    """The model has counted it, so its learner stays until the superstep is done."""
    with made(job_name, collect=True) as rig, Stepped(rig) as active:
        active.lead()
        active.turns()
        rig.publish(ROW, rig.ones())
        active.turns()
        head = rig.memory.rings[ROW].word(layout.RING, "head")
        _native.store(head, 100)
        active.turns()
        assert (rig.roster[ROW]["broken"], rig.roster[ROW]["wanted"]) == (GENERATION, GENERATION)
        rig.publish(2, rig.ones())
        active.turn()
        active.finish_superstep()
        active.turn()
        assert (rig.roster[ROW]["wanted"], rig.roster[ROW]["gone"]) == (0, Gone.DAMAGED)
