"""Statements of the fork server, of its forks until they are servers, and of the watchdog.

As test_statements.py, in jobs that have a fork server.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lines import ROOT, Tracer
from rounds import Count
from scenes import (
    IDLE,
    Dying,
    Scene,
    adopted,
    all_go,
    all_push,
    all_rest,
    from_nothing,
    started,
    stopped,
    taken_over,
)
from served import Job, impatient
from support.quick import fork_quickly

from gadei_ps.memory import build

FILES = (
    *("gadei_ps/server/fork_server.py", "gadei_ps/job/fork_server_messages.py"),
    *("watchdog/server_starter.py", "watchdog/fork_server.py"),
)
LIMIT_S = 7200 if os.environ.get("CRASH_ALL") else 120
SHORT = 3  # scenes in the short run
# To look closer: a scene, or SCENE:PART for its lines whose text has that part.
SCENE, _, PART = os.environ.get("STATEMENTS", "").partition(":")


def _dies(job: Job, tracer: Tracer, dying: Dying) -> None:
    """The fork server dies. A server starts as a program, and there is another fork server."""
    all_go(job)
    with dying():
        job.kill(job.processes.fork_server())
        job.kill(job.processes.standby())
        job.up()
        job.until(job.processes.fork_server, "there is a fork server")
        all_push(job)
        all_rest(job)


def _refused(job: Job, tracer: Tracer, dying: Dying) -> None:
    """gadei-ps is replaced under the job, and its fork server dies: the next one is refused."""
    with dying():
        with tracer.other_build():
            job.kill(job.processes.fork_server())
            job.kill(job.processes.standby())
            job.until(
                lambda: job.status["standby_missing"] or not job.processes.server(), "it is refused"
            )
        job.up()
    job.kill_watchdog()  # the next one does not know that the files are those of another build


def _with_fork_server(
    play: Callable[[Job, Tracer, Dying], None],
) -> Callable[[Job, Tracer, Dying], None]:
    """The scene, from when there is a fork server."""

    def begun(job: Job, tracer: Tracer, dying: Dying) -> None:
        job.up()
        job.until(job.processes.fork_server, "there is a fork server")
        play(job, tracer, dying)

    return begun


SCENES = [
    Scene("failover", _with_fork_server(taken_over)),
    Scene("death of the fork server", _with_fork_server(_dies)),
    Scene("start", started, own_job=True),
    Scene("new leases", _with_fork_server(from_nothing)),
    Scene("adopt", _with_fork_server(adopted)),
    Scene("another build", _with_fork_server(_refused)),
    Scene("stop", stopped, own_job=True),
]


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    build.of_server()  # once, for all forks
    made = Tracer([ROOT / name for name in FILES])
    with impatient(), fork_quickly(fork_server=True), made.tracing():
        yield made


@pytest.mark.timeout(LIMIT_S)
def test_statements(
    tracer: Tracer, job_name: str, tmp_path: Path, whole: bool, report: list[str]
) -> None:
    numbers = itertools.count()
    count = Count(
        tracer,
        lambda how: Job(f"{job_name}-{next(numbers)}", tmp_path, **how),
        whole=whole,
        few=1,
        part=PART,
    )
    try:
        if whole:
            count.play(IDLE)
        for scene in SCENES if whole or SCENE else SCENES[:SHORT]:
            if SCENE in ("", scene.name):
                count.play(scene)
    finally:
        count.drop()
    report.append(f"statements of the fork server: {count.figures}")
    count.check()
    if whole and not SCENE:
        assert {line.role for line in count.lines} == {"fork-server", "watchdog"}
