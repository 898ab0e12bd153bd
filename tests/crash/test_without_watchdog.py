"""The watchdog is dead, and nobody has started another one yet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support import Pusher, eventually, segments, status
from support.supervised import call, tell
from support.supervised import team as obedient
from team import Team, push_ones, send

from gadei_ps.job.faults import Role
from gadei_ps.learners.client import Client


def _in_turn(client: Client) -> None:
    client.wait_turn()
    push_ones(client)


def test_barriers_do_not_wait_for_the_dead(job_name: str, tmp_path: Path) -> None:
    """The active server looks for them itself."""
    with Team(job_name, tmp_path, learners=0, sync="bsp") as team:
        stays, dies = (Pusher(job_name, _in_turn) for _ in range(2))
        team.learners += [stays, dies]
        team.goes_on()
        send(team.find(Role.WATCHDOG))
        dies.kill()
        wanted = stays.published + 20
        eventually(lambda: stays.published > wanted, what="the barrier waits")
        team.watch()
        team.goes_on()
        team.fire()
        eventually(lambda: not status(job_name)["learners"])
        np.testing.assert_array_equal(team.weights, -status(job_name)["supersteps"])


def test_servers_that_nobody_needs_end(job_name: str, tmp_path: Path) -> None:
    """Not while a learner lives. The job's memory stays."""
    with Team(job_name, tmp_path, learners=1, orphan_s=1.0) as team:
        servers = [team.find(Role.SERVER), team.find(Role.STANDBY)]
        send(team.find(Role.WATCHDOG))
        team.goes_on(1500)
        assert all(server.alive for server in servers)
        team.fire()
        eventually(lambda: not any(server.alive for server in servers), what="their end")
        assert segments(job_name)
        team.serve_again()
        team.hire()
        team.goes_on()
        team.settle()


def test_a_learner_asks_the_next_watchdog(job_name: str, tmp_path: Path) -> None:
    with Team(job_name, tmp_path, learners=1) as team, obedient(job_name, 1) as (one,):
        send(team.find(Role.WATCHDOG))
        tell(one, "set_work", 10, 1, 1)
        team.goes_on()
        assert not one.has_sent
        team.watch()
        assert one.receive() is None
        assert isinstance(call(one, "take_batch"), int)
        assert status(job_name)["work"]["state"] == "working"
