"""The rounds of the counts of statements, and what came of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from lines import Line, Tracer
from scenes import IDLE, Scene
from served import Job

OFTEN = range(2, 20)  # a line that runs so often in a scene is also reached a second time
# Beginnings are alike: only these files are looked at in each of them, all others once.
AGAIN = ("job_memory.py", "stopping.py", "cleanup.py", "initial_model.py", "checkpoints.py")
MISSED = 0.25  # of the rounds; a line need not run in each play of a scene


class Count:
    """Rounds, in each of which a process dies before one line."""

    def __init__(
        self,
        tracer: Tracer,
        job: Callable[[Mapping[str, Any]], Job],
        *,
        whole: bool,
        few: int = 2,
        part: str = "",
    ) -> None:
        """few: lines of a scene, if not the whole is counted; of a job's begin or end, one.

        part: only lines whose text has it.
        """
        self._tracer = tracer
        self._make = job
        self._whole = whole
        self._few = few
        self._part = part
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

    @property
    def figures(self) -> str:
        return (
            f"{len(self.lines)} lines, {self.deaths} deaths, "
            f"{len(self.missed)} not reached again, {len(self.failures)} failures"
        )

    def check(self) -> None:
        """Nothing went wrong, and the deaths came where they were to come."""
        assert not self.failures, "\n".join(self.failures)
        assert self.deaths, "nobody has died"
        rounds = self.deaths + len(self.missed)
        missed = f"{len(self.missed)} of {rounds} deaths did not come"
        assert len(self.missed) <= max(1, MISSED * rounds), "\n".join([missed, *self.missed])

    def begin(self) -> None:
        """See which lines run in every scene."""
        self._round(IDLE, None, 0)
        self._always = self._tracer.ran().keys()

    def play(self, scene: Scene) -> None:
        """All rounds of a scene."""
        begin = time.monotonic()
        self._round(scene, None, 0)
        ran = self._tracer.ran()
        if scene is not IDLE:
            ran = {line: times for line, times in ran.items() if line not in self._always}
        if scene.own_job:
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
        """Return lines and times at which to die: the first and, in the whole count, the second."""
        lines = [one for one in sorted(ran) if self._part in str(one)]
        if not self._whole:
            step = max(1, len(lines) // (1 if scene.own_job else self._few))
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
            job = self._born(scene) if scene.own_job else self._living()
            scene.play(job, self._tracer, dying)
            if scene.own_job:
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
