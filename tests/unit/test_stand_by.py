"""Reports of a shard's thread when it gets its lease, before it serves, and when it rests."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import pytest
from support import PATIENCE_S, Rig, eventually

from gadei_ps import _native
from gadei_ps.memory import layout
from gadei_ps.memory.layout import SHARD, Mode
from gadei_ps.memory.weights import Tensor
from gadei_ps.server.structs import NOT_READING

VALUES = 1 << 24  # of a gradient whose rest takes long enough to be watched
PREVIOUS = 1 << 8 | Mode.HOLD  # what the server before had obeyed
ASLEEP = 1 << 31  # in the first word of a lease: a thread sleeps until it is free


@contextlib.contextmanager
def _standing_by(rig: Rig) -> Iterator[threading.Thread]:
    """The thread of the first shard, as a server starts it."""
    rig.units.load()
    part = rig.part(0)
    rig.board["quit"], rig.board["seen"] = 0, NOT_READING
    thread = threading.Thread(target=rig.units.stand_by, args=(part.ctypes.data,))
    thread.start()
    try:
        yield thread
    finally:
        rig.board["quit"] = 1
        rig.bell()
        thread.join()


@pytest.mark.parametrize("lease", ["held", "written over"])
def test_a_shard_serves_with_its_lease_only(lease: str, job_name: str) -> None:
    with Rig(job_name, [Tensor("w", (4,))], shards=1) as rig, contextlib.ExitStack() as held:
        shard, at = rig.control["shard"][0], rig.word("shard") + layout.offset(SHARD, "lease")

        def hold() -> None:
            _native.lease_make(at)
            assert _native.lease_take(at, 0) == 0
            held.callback(_native.lease_release, at)

        if lease == "held":
            hold()
        else:
            shard["lease"] = 2**64 - 1
        with _standing_by(rig) as thread:
            if lease == "written over":
                eventually(lambda: rig.control["sleepers"] or shard["tid"])
                hold()
                rig.bell()
            eventually(lambda: _native.load32(at) & ASLEEP or shard["tid"])
            assert (shard["tid"], rig.board["seen"][0]) == (0, NOT_READING)
            assert not rig.board["holds"][0]
            held.close()
            rig.let_look()
            assert (rig.board["holds"][0], shard["tid"]) == (1, thread.native_id)


def test_what_a_shard_tells_that_takes_over(job_name: str) -> None:
    """Report while it applies; on a busy machine it may be done before it is observed."""
    assert any(_is_seen_to_take_over(job_name) for _ in range(50))


def _is_seen_to_take_over(job_name: str) -> bool:
    with Rig(job_name, [Tensor("w", (VALUES,))], shards=1, slots=2) as rig:
        shard = rig.control["shard"][0]
        at = rig.word("shard")
        _native.lease_make(at + layout.offset(SHARD, "lease"))
        rig.publish(0, rig.ones())
        record = rig.state["record"][0]
        record["ring"], record["generation"], record["applies"] = 0, 1, 1
        record["next_step"] = 1
        record["span"][:2] = layout.IDLE
        record["cursor"] = 0  # nothing of it is applied
        shard["mode"] = PREVIOUS
        # Apart: on one core, the one that looks would have its turn when all is done.
        cores = os.sched_getaffinity(0)
        mine = {min(cores)} if len(cores) > 1 else cores
        os.sched_setaffinity(0, (cores - mine) or cores)
        try:
            with _standing_by(rig) as thread:
                os.sched_setaffinity(0, mine)
                end = time.monotonic() + PATIENCE_S
                while not (cursor := int(record["cursor"])):
                    assert time.monotonic() < end
                if cursor >= layout.ALL_APPLIED:
                    return False
                # What this thread reads must stay mapped, and nobody may count on what was obeyed.
                meanwhile = [int(rig.board["seen"][0]), int(shard["mode"]), int(shard["tid"])]
                meanwhile += [int(shard["heartbeat"])]
                if record["cursor"] >= layout.ALL_APPLIED:
                    return False
                assert meanwhile == [0, Mode.ON_ARRIVAL, thread.native_id, 0]
                rig.wait_applied(0, 0)
                rig.let_look()
                assert shard["recovered"] == 1
                assert rig.board["seen"][0] == rig.board["table_version"]
                assert shard["cpu"]  # it rests
                return True
        finally:
            os.sched_setaffinity(0, cores)


def test_a_shard_that_waits_for_a_ring_lets_others_be_unmapped(job_name: str) -> None:
    """It has a gradient to finish whose ring the manager has not mapped yet; it reads none then."""
    with Rig(job_name, [Tensor("w", (4,))], shards=1, slots=2) as rig:
        _native.lease_make(rig.word("shard") + layout.offset(SHARD, "lease"))
        rig.publish(0, rig.ones())
        record = rig.state["record"][0]
        record["ring"], record["generation"], record["applies"] = 0, 1, 1
        record["next_step"] = 1
        record["span"][:2] = layout.IDLE
        record["cursor"] = 0
        ring = rig.board["ring"][0].copy()
        rig.board["ring"][0] = 0
        rig.board["table_version"] += 1
        with _standing_by(rig):
            for _ in range(2):
                rig.board["table_version"] += 1  # another ring is forgotten
                rig.bell()
                eventually(lambda: rig.board["seen"][0] == rig.board["table_version"])
                assert record["cursor"] == 0, "it still waits"
            rig.board["ring"][0] = ring
            rig.board["table_version"] += 1
            rig.bell()
            rig.wait_applied(0, 0)
