"""Decisions of two servers, what each reports, and what one does that is left alone."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from support import Rig
from support.lease_stages import STAGES
from support.stepped import Stepped, make_leases

from gadei_ps import _native
from gadei_ps.machine import process
from gadei_ps.memory import lifecycle
from gadei_ps.memory.layout import Phase, ServerState
from gadei_ps.memory.lifecycle import Leases
from gadei_ps.memory.weights import Tensor

W = [Tensor("w", (10,))]
ABOUT_SHARDS = ("lease_shards", "lease_state")


@pytest.fixture(autouse=True)
def _compiled(compiled: None) -> None:
    pass


def agrees(rig: Rig, one: Stepped, number: int) -> bool:
    """Return whether a server's stage is one that its leases allow."""
    return lifecycle.stage(rig.control, number) in STAGES[one.server.leases]


def test_one_after_the_other(job_name: str) -> None:
    with Rig(job_name, W) as rig, Stepped(rig, 0) as first, Stepped(rig, 1) as second:
        make_leases(rig)
        here = os.getpid(), process.start_ticks(os.getpid())
        first.server._try_leases()
        first.stand_by()
        first.server._report_ready()
        assert agrees(rig, first, 0)
        # Until its shards have all their leases, no other one may wait for any.
        assert first.server.active
        assert first.line["state"] == ServerState.STARTING
        assert [int(rig.control[word]) for word in ABOUT_SHARDS] == [0, 0]
        second.server._try_leases()
        assert second.server.leases == Leases.NONE

        first.serve()
        first.server._report_ready()
        assert (first.line["state"], first.line["confirmed"]) == (ServerState.READY, 1)
        assert [int(rig.control[word]) for word in ABOUT_SHARDS] == [1, 1]
        assert first.server.leases == Leases.ALL
        assert agrees(rig, first, 0)
        second.server._try_leases()
        assert second.server.leases == Leases.HEIR
        second.server._report_ready()  # there is no model, so nothing is to be mapped
        assert (second.line["state"], second.line["confirmed"]) == (ServerState.READY, 0)
        assert (rig.control["lease_pid"], rig.control["lease_start"]) == here
        assert rig.control["lease_generation"] == 1

        rig.control["lease_pid"] = rig.control["lease_start"] = 0  # as if it were another process
        first.die()
        second.server._try_leases()
        assert second.server.active
        assert (rig.control["lease_pid"], rig.control["lease_start"]) == here
        assert rig.control["lease_generation"] == 2


def test_a_standby_that_has_to_compile_counts_as_starting(job_name: str) -> None:
    with Rig(job_name, W) as rig, Stepped(rig) as one:
        code, one.line["state"] = one.server._code, ServerState.READY
        assert not code.is_ready(active=False)
        assert one.line["state"] == ServerState.READY
        rig.control["model_ready"] = 1  # with an optimizer whose code it has not loaded
        assert not code.is_ready(active=False)
        assert one.line["state"] == ServerState.STARTING


def test_a_beat_for_each_pass(job_name: str) -> None:
    with Rig(job_name, W) as rig, Stepped(rig) as one:
        make_leases(rig)
        beats = []

        def wait(address: int, value: int, timeout_ns: int) -> int:
            beats.append(int(one.line["beat"]))
            if len(beats) == 3:
                rig.control["phase"] = Phase.STOPPED
            return 0

        with mock.patch.object(_native, "futex_wait", wait):
            one.server.main_loop()
        assert beats == [1, 2, 3]


def test_learners_that_die_without_a_watchdog(job_name: str) -> None:
    with Rig(job_name, W, learners=3) as rig, Stepped(rig) as one:
        start = process.start_ticks(os.getpid())
        rig.roster["pid"][:3] = os.getpid()
        rig.roster["pid_start"][:3] = start, start - 1, start - 1
        rig.roster["wanted"][2] = 9  # its row was being given away
        rig.control["watchdog_start"] = 1
        assert not one.server._abandoned()
        assert rig.roster["wanted"][:3].tolist() == [1, 2, 9]  # the active one's affair
        one.server.leases, one.server._looked = Leases.MANAGERS, 0.0
        assert not one.server._abandoned()
        assert rig.roster["wanted"][:3].tolist() == [1, 0, 9]
