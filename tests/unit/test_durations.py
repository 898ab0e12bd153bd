"""Durations: each has a name of its own, and a process that waits for another is more patient."""

from __future__ import annotations

import collections
import itertools
import re
from pathlib import Path

import pytest

from gadei_ps.commands import durations as command
from gadei_ps.commands import jobs, run
from gadei_ps.job.config import LEAST_HANG_S
from gadei_ps.learners import client
from gadei_ps.machine import launch
from gadei_ps.server import compiler, loading, manager, shard, shards
from gadei_ps.storage import checkpoint
from gadei_ps.watchdog import checkpoint_writer, job_memory, servers, sockets, supervisor
from gadei_ps.watchdog import durations as watchdog

ROOT = Path(__file__).parents[2]
LAYERS = ("cli", "commands", "job", "machine", "show", "storage")
ORDER = {
    "a start": (
        watchdog.FORK_SERVER_SILENT_S,
        watchdog.START_SILENT_S,
        watchdog.SERVER_SILENT_S,
    ),
    "a start that a command waits for": (watchdog.START_SILENT_S, command.START_SILENT_S),
    "a server's threads, the server, its watchdog": (
        shard.LEASE_NS / 1e9,
        shards.EXIT_S,
        watchdog.SERVER_END_S,
    ),
    "a server's heartbeat, the limit for it": (shard.BEAT_NS / 1e9, LEAST_HANG_S),
    "a standby's heartbeat, the limit for it": (manager.WAIT_NS / 1e9, servers.STANDBY_LIMIT_S),
    "a server without a name, another watchdog's patience": (
        manager.ORPHAN_LOOK_S,
        manager.UNNAMED_S,
        job_memory.ELSEWHERE_END_S,
    ),
    "orphaned servers, the next run of the job": (
        manager.ORPHAN_LOOK_S,
        command.ORPHAN_S,
        command.ORPHANS_END_S,
    ),
    "a process that compiles, the job's start": (
        loading.LATE_S,
        compiler.LOCK_S,
        loading.LATE_S + compiler.LOCK_S,
        watchdog.START_SILENT_S,
    ),
    "a locked directory, a pause, a stop without progress": (
        checkpoint.LOCK_TIMEOUT_S,
        checkpoint_writer.COPY_ATTEMPTS_S,
        watchdog.STOP_SILENT_S,
    ),
    "learners at a stop": (
        watchdog.LEAVE_NOW_S,
        watchdog.LEAVE_TIMEOUT_S,
        command.DRAIN_S,
        client.MOST_DRAIN_S,
    ),
    "a learner at a stop": (client.DRAIN_TIMEOUT_S, jobs.CHECKPOINT_TIMEOUT_S),
    "the rest of a stop, a client's margin": (watchdog.STOP_END_S, command.STOP_MARGIN_S),
    "the end of a watchdog": (watchdog.LONGEST_END_S, command.END_TIMEOUT_S),
    "the last checkpoint": (
        watchdog.STOP_SILENT_S,
        jobs.LAST_CHECKPOINT_TIMEOUT_S,
        jobs.CHECKPOINT_TIMEOUT_S,
    ),
    "learners that a command ends": (launch.LEARNERS_GRACE_S, command.GRACE_S),
    "a request, its answer": (command.ANSWER_TIMEOUT_S, sockets.MESSAGE_TIMEOUT_S),
    "the loop of the watchdog": (
        supervisor.BUSY_TICK_S,
        supervisor.TICK_S,
        LEAST_HANG_S,
        supervisor.SLOW_TICK_S,
    ),
    "learners without a job, a watchdog that comes back": (run.USEFUL_S, client.JOB_GONE_S),
}


@pytest.mark.parametrize("what", ORDER)
def test_who_waits_for_another_is_more_patient(what: str) -> None:
    for shorter, longer in itertools.pairwise(ORDER[what]):
        assert shorter < longer


def test_drains_agree() -> None:
    assert command.DRAIN_S == supervisor.LIMIT_DRAIN_S == client.DRAIN_TIMEOUT_S


def test_a_killed_server_is_told_before_it_is_left() -> None:
    assert watchdog.SERVER_KILL_S <= watchdog.SERVER_END_S


def test_no_two_have_one_name() -> None:
    """Those of watchdog and commands may, where one follows from the other."""
    places = collections.defaultdict(list)
    folders = ("watchdog", "learners", *(f"gadei_ps/{one}" for one in LAYERS))
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for name in re.findall(
            r"^(\w+_(?:S|NS|MS)) = (?!watchdog\.)", path.read_text(), re.MULTILINE
        ):
            places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 90
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
