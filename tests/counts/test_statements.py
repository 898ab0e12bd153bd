"""Statements: SIGKILL before each line of manager, watchdog and saver that may change something.

A scene is played once to see which lines run. Then it is played again for each of these lines: the
process that comes to it dies before it. Afterwards the job is brought to rest and its books are
checked: each published gradient counts once in weights and counters, rows and rings are free,
learners go on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import served
from lines import ROOT, Line, Tracer
from scenes import BIRTHS, IDLE, LIVING, Scene
from served import Job, impatient
from support.quick import fork_quickly

from gadei_ps.memory import build

FOLDERS = ("watchdog", "gadei_ps/server", "gadei_ps/job", "gadei_ps/memory", "gadei_ps/storage")
LIMIT_S = 7200 if os.environ.get("CRASH_ALL") else 300
FEW = 2  # lines of a scene of a job's life in the short run; of its begin and end, one
SHORT = 5  # scenes of begin and end in the short run
OFTEN = range(2, 20)  # a line that runs so often in a scene is also reached a second time
# Beginnings are alike: only these files are looked at in each of them, all others once.
AGAIN = ("memory.py", "stopping.py", "dead.py", "model.py", "checkpoints.py")
MISSED = 0.25  # of the rounds; a line need not run in each play of a scene
# To look closer: a scene, or SCENE:PART for its lines whose text has that part.
SCENE, _, PART = os.environ.get("STATEMENTS", "").partition(":")


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    build.of_server()  # once, for all forks
    made = Tracer([path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")])
    with impatient(), fork_quickly(), made.tracing():
        yield made


class Count:
    """Rounds, and what came of them."""

    def __init__(
        self, tracer: Tracer, job: Callable[[Mapping[str, Any]], Job], whole: bool
    ) -> None:
        self._tracer = tracer
        self._make = job
        self._whole = whole
        self._job: Job | None = None
        self._always: Set[Line] = frozenset()  # lines that run in every scene
        self.lines: set[Line] = set()
        self.deaths = 0
        self.missed: list[str] = []
        self.failures: list[str] = []

    def _living(self) -> Job:
        """The job of all rounds; after a failure another one."""
        if self._job is None:
            self._job = self._make({})
            self._job.up()
            self._job.hire()
        return self._job

    def _born(self, scene: Scene) -> Job:
        self.drop()
        self._job = self._make(scene.how)
        return self._job

    def drop(self) -> None:
        if self._job is not None:
            self._job.drop()
            self._job = None

    def check(self) -> None:
        """Nothing went wrong, and the deaths came where they were to come."""
        assert not self.failures, "\n".join(self.failures)
        assert self.deaths, "nobody has died"
        rounds = self.deaths + len(self.missed)
        missed = f"{len(self.missed)} of {rounds} deaths did not come"
        assert len(self.missed) <= max(1, MISSED * rounds), "\n".join([missed, *self.missed])

    def begin(self) -> None:
        """Sees which lines run in every scene."""
        self._round(IDLE, None, 0)
        self._always = self._tracer.ran().keys()

    def play(self, scene: Scene) -> None:
        """All rounds of a scene."""
        begin = time.monotonic()
        self._round(scene, None, 0)
        ran = self._tracer.ran()
        if scene is not IDLE:
            ran = {line: times for line, times in ran.items() if line not in self._always}
        if scene in BIRTHS:
            ran = {
                line: 1
                for line, times in ran.items()
                if line not in self.lines or Path(line.path).name in AGAIN
            }
        chosen = self._choose(scene, ran)
        for line, number in chosen:
            self._round(scene, line, number)
        seconds = time.monotonic() - begin
        print(f"{scene.name}: {len(ran)} lines, {len(chosen)} rounds, {seconds:.1f} s", flush=True)

    def _choose(self, scene: Scene, ran: dict[Line, int]) -> list[tuple[Line, int]]:
        """Lines and times at which to die: the first and, in the whole count, the second."""
        lines = [one for one in sorted(ran) if PART in str(one)]
        if not self._whole:
            step = max(1, len(lines) // (1 if scene in BIRTHS else FEW))
            return [(one, 1) for one in lines[len(scene.name) % step :: step]]
        return [(one, time) for one in lines for time in (1, 2) if time == 1 or ran[one] in OFTEN]

    def _round(self, scene: Scene, line: Line | None, number: int) -> None:
        """One play of the scene; `line`: before which a process dies at the n-th time."""
        died = 0

        @contextlib.contextmanager
        def dying() -> Iterator[None]:
            nonlocal died
            if line is None:
                self._tracer.clear()
            else:
                self._tracer.arm(line, number)
            yield
            died = self._tracer.disarm()
            self._tracer.stop()

        try:
            job = self._born(scene) if scene in BIRTHS else self._living()
            scene.play(job, self._tracer, dying)
            if scene in BIRTHS:
                job.end()
                self.drop()
            else:
                job.settle()
        except Exception as error:
            self._tracer.disarm()
            self.failures.append(f"{scene.name}: {line} ({number}): {error!r}")
            print(f"FAILED {self.failures[-1]}", flush=True)
            self.drop()
            return
        if line is None:
            return
        if died:
            self.deaths += 1
            self.lines.add(line)
        else:
            self.missed.append(f"{scene.name}: {line} ({number})")


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("scenes", [LIVING, BIRTHS], ids=["life", "begin-and-end"])
def test_statements(
    request: pytest.FixtureRequest,
    scenes: list[Scene],
    tracer: Tracer,
    job_name: str,
    tmp_path: Path,
    whole: bool,
    told: list[str],
) -> None:
    numbers = itertools.count()
    count = Count(tracer, lambda how: Job(f"{job_name}-{next(numbers)}", tmp_path, **how), whole)
    try:
        count.begin()
        for scene in scenes if whole or SCENE or scenes is LIVING else scenes[:SHORT]:
            if SCENE in ("", scene.name):
                count.play(scene)
    finally:
        count.drop()
    told.append(
        f"statements, {request.node.callspec.id}: {len(count.lines)} lines, {count.deaths} deaths, "
        f"{len(count.missed)} not reached again, {len(count.failures)} failures"
    )
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
