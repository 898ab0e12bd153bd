"""Records the run times of a running job's learners. Reads its shared memory and asks it nothing.

The thread of shard 0 keeps the times of each learner's last RUNS iterations (ps_run in the layout).
The recorder reads often enough that usually none is overwritten before. It counts those that are.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gadei_ps.errors import JobNotFound, SegmentError, UsageError
from gadei_ps.machine.interrupts import Interrupted
from gadei_ps.memory import layout, segment, shm
from gadei_ps.memory.layout import CONTROL, STATE, Action, Phase, SegmentKind
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.shm import segment_name
from gadei_ps.run_times import traces

POLL_S: Final = 0.01


@dataclass
class _Learner:
    """The learner in a row, and how far the recorder has read."""

    generation: int
    next: int
    """The next sequence number to read."""
    ahead: int
    """Number of an iteration in the trace minus its sequence number."""


class Recorder:
    """Records one job. Raises JobNotFound if the job is not running or has no model yet."""

    def __init__(self, job: str, owner: int | None = None) -> None:
        """owner: the user whose job it is, by default ourselves."""
        shm.check_job_name(job)

        def attach(part: str, kind: SegmentKind) -> Segment:
            name = segment_name(job, part, owner)
            return segment.attach(name, kind, writable=False, owner=owner)

        try:
            self._control = attach("control", SegmentKind.CONTROL)
            self._view = self._control.view(CONTROL)
            if not int(self._view["model_ready"]):  # its segments may be half made
                raise FileNotFoundError
            self._state = attach("state", SegmentKind.STATE)
        except FileNotFoundError:
            raise JobNotFound(
                f"no job {job!r} with a model is running; gadei-ps ls shows the jobs there are", job
            ) from None
        except SegmentError as error:
            raise JobNotFound(str(error)) from None
        self._applied = self._state.view(STATE)["applied"][0]
        self._runs = self._state.view(STATE)["runs"]
        self._learners: dict[int, _Learner] = {}
        self._begun = False  # who is found later has come since, and is recorded from the start
        self._last = -1  # highest number of an iteration so far
        self.rows = 0
        self.missed = 0
        self.seen: set[int] = set()

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return int(self._view["phase"]) >= Phase.STOPPED

    def read(self) -> list[str]:
        """Return the trace's lines for the run times since the last call, learner by learner."""
        roster = self._view["roster"]
        lines: list[str] = []
        begin = self._last + 1
        for row in range(layout.MAX_LEARNERS):
            generation = int(roster[row]["generation"])
            served = int(roster[row]["served"]) == generation > int(roster[row]["retired"])
            if not served:
                self._learners.pop(row, None)
                continue
            one = self._learners.get(row)
            if one is None or one.generation != generation:
                # The first iteration of a late learner has the next number of the trace.
                first = 0 if self._begun else int(self._applied[row])
                one = self._learners[row] = _Learner(generation, first, begin - first)
            lines += self._read(row, one)
        self._begun = True
        return lines

    def _read(self, row: int, one: _Learner) -> list[str]:
        lines: list[str] = []
        upto = int(self._applied[row])
        while one.next < upto:
            run = self._runs[row, one.next % layout.RUNS]
            sequence = int(run["sequence"])
            started, finished = float(run["started"]), float(run["finished"])
            given_up, action = bool(run["censored"]), int(run["action"])
            if sequence != one.next + 1 or int(run["sequence"]) != sequence:
                if sequence <= one.next and one.next + 1 == upto:
                    break  # applied is counted, but its times are not written yet
                self.missed += 1
            elif action != Action.REFUSE and 0 <= finished - started < math.inf:
                iteration = one.next + one.ahead
                self._last = max(self._last, iteration)
                lines.append(traces.line(iteration, row, started, finished - started, given_up))
                self.rows += 1
                self.seen.add(row)
            one.next += 1
        return lines


def record(job: str, out: Path, seconds: float | None, owner: int | None = None) -> dict[str, Any]:
    """Record into the file `out` until `seconds` are over, the job ends, or SIGINT arrives.

    owner: the user whose job it is, by default ourselves. Returns what `gadei-ps trace --json`
    prints. Raises JobNotFound, and UsageError if the file cannot be written.
    """
    recorder = Recorder(job, owner)
    begin = time.monotonic()
    until = begin + seconds if seconds is not None else float("inf")
    try:
        with open(out, "w", encoding="utf-8") as file:
            file.write(",".join(traces.HEADER) + "\n")
            try:
                while True:
                    over = recorder.over or time.monotonic() >= until
                    file.writelines(recorder.read())
                    if over:
                        break
                    time.sleep(min(POLL_S, max(0.0, until - time.monotonic())))
            except Interrupted as signalled:
                if signalled.number != signal.SIGINT:
                    raise
                file.writelines(recorder.read())
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror})") from None
    return {
        "file": str(out),
        "run_times": recorder.rows,
        "learners": len(recorder.seen),
        "missed": recorder.missed,
        "seconds": time.monotonic() - begin,
    }
