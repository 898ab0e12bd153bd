"""Statements: SIGKILL before each line of manager, watchdog and checkpoint writer with effects.

A scene is played once to see which lines run. Then it is played again for each of these lines: the
process that comes to it dies before it. Afterwards the job is brought to rest and its accounts are
checked: each published gradient counts once in weights and counters, rows and rings are free,
learners continue. Jobs have no fork server here; test_fork_server_statements.py has those jobs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import served
from lines import ROOT, Tracer
from pauses import PAUSES
from rounds import Count
from scenes import BIRTHS, LIVING, Scene
from served import Job, impatient
from support.quick import fork_quickly

from gadei_ps.memory import build

FOLDERS = ("watchdog", "gadei_ps/server", "gadei_ps/job", "gadei_ps/memory", "gadei_ps/storage")
LIMIT_S = 7200 if os.environ.get("CRASH_ALL") else 300
SHORT = 5  # scenes of begin and end in the short run
# To look closer: a scene, or SCENE:PART for its lines whose text has that part.
SCENE, _, PART = os.environ.get("STATEMENTS", "").partition(":")


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    build.of_server()  # once, for all forks
    made = Tracer([path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")])
    with impatient(), fork_quickly(), made.tracing():
        yield made


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("scenes", [LIVING + PAUSES, BIRTHS], ids=["life", "begin-and-end"])
def test_statements(
    request: pytest.FixtureRequest,
    scenes: list[Scene],
    tracer: Tracer,
    job_name: str,
    tmp_path: Path,
    whole: bool,
    report: list[str],
) -> None:
    numbers = itertools.count()
    count = Count(
        tracer,
        lambda how: Job(f"{job_name}-{next(numbers)}", tmp_path, **how),
        whole=whole,
        part=PART,
    )
    try:
        count.begin()
        if not (whole or SCENE):
            scenes = scenes[:SHORT] if scenes is BIRTHS else [*LIVING, PAUSES[0]]
        for scene in scenes:
            if SCENE in ("", scene.name):
                count.play(scene)
    finally:
        count.drop()
    report.append(f"statements, {request.node.callspec.id}: {count.figures}")
    count.check()


def _loses_one(job: Job, tracer: Tracer, dying: Callable[[], Any]) -> None:
    """A gradient that nobody has published is missing."""
    job.buried += 1


def test_what_is_lost_is_noticed(tracer: Tracer, job_name: str, tmp_path: Path) -> None:
    count = Count(tracer, lambda how: Job(job_name, tmp_path, **how), whole=False)
    with pytest.raises(AssertionError, match="nobody has died"):
        count.check()
    try:
        count._living()
        with mock.patch.object(served, "PATIENCE_S", 3.0):
            count._round(Scene("one is lost", _loses_one), None, 0)
    finally:
        count.drop()
    with pytest.raises(AssertionError, match=r"one is lost.*: counts"):
        count.check()


def test_deaths_that_do_not_come_are_noticed(tracer: Tracer, tmp_path: Path) -> None:
    count = Count(tracer, lambda how: Job("none", tmp_path, **how), whole=False)
    count.deaths, count.missed = 5, ["a line"] * 3
    with pytest.raises(AssertionError, match="3 of 8 deaths did not come"):
        count.check()
