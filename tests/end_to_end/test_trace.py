"""Run times that are recorded from a running job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import daemon, eventually, fork, learner, status
from support.steered import TENSORS, all_granted, push_when_told, tell

from gadei_ps.chaos.observer import Observer
from gadei_ps.errors import JobNotFound
from gadei_ps.job.faults import Processes
from gadei_ps.memory import shm
from gadei_ps.memory.layout import RUNS
from gadei_ps.run_times import run_time_recorder, traces


def test_trace_records_every_iteration(job_name: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.csv"
    with (
        daemon(job_name, sync="bsp", tensors=TENSORS),
        fork(2, push_when_told, job_name) as team,
    ):
        all_granted(team)
        result: dict[str, Any] = {}
        stop = run_time_recorder.Recorder(job_name)
        assert stop.read() == []
        for number in range(300):  # more than the memory keeps
            for child in team:
                child.send(1)
            all_granted(team)
            if number % 50 == 0:
                result[str(number)] = stop.read()
        lines = [line for part in result.values() for line in part]
        # A turn may be granted before the iteration's times are written.
        eventually(lambda: lines.extend(stop.read()) or stop.rows >= 600)
        assert stop.rows == len(lines) == 600
        assert stop.missed == 0
        out.write_text(",".join(traces.HEADER) + "\n" + "".join(lines))
    recorded = traces.read(out)
    assert recorded.times.shape == (300, 2)
    assert not np.isnan(recorded.times).any()
    assert (recorded.times > 0).all()
    with pytest.raises(JobNotFound, match="no job"):
        run_time_recorder.Recorder(job_name)


def test_a_model_that_is_being_made(job_name: str) -> None:
    """Check that a segment that has its name and not yet its size is not read."""
    half_made = shm.path_of(shm.segment_name(job_name, "state"))
    with daemon(job_name):
        half_made.touch(0o600)
        try:
            with pytest.raises(JobNotFound, match=r"no job .* with a model is running"):
                run_time_recorder.Recorder(job_name)
            with pytest.raises(FileNotFoundError):
                Observer(Processes(job_name))
        finally:
            half_made.unlink()


def test_trace_tells_what_was_cut_short(job_name: str) -> None:
    with (
        daemon(job_name, sync="cutoff:c=1", tensors=TENSORS),
        fork(2, push_when_told, job_name) as (fast, slow),
    ):
        all_granted([fast, slow])
        recorder = run_time_recorder.Recorder(job_name)
        recorder.read()
        assert tell(fast, 1) == "granted"
        assert tell(slow, 1) == "granted"  # computed, and not wanted any more
        assert tell(fast, 1) == "granted"
        assert tell(slow, "abandon") == "granted"
        lines: list[str] = []
        eventually(lambda: (lines.extend(recorder.read()), len(lines) == 4)[1])
        row = learner(job_name, slow.pid)
        assert row
        mine = [line for line in lines if line.split(",")[1] == str(row["row"])]
        assert [line.rsplit(",", 1)[1].strip() for line in mine] == ["0", "1"]


def test_trace_counts_what_it_missed(job_name: str) -> None:
    with (
        daemon(job_name, tensors=TENSORS),
        fork(1, push_when_told, job_name) as (one,),
    ):
        all_granted([one])
        recorder = run_time_recorder.Recorder(job_name)
        recorder.read()
        for _ in range(200):
            tell(one, 1)
        eventually(lambda: status(job_name)["gradients_applied"] == 200)
        # The times of the last one are perhaps just being written, over those of an older one.
        eventually(lambda: (recorder.read(), recorder.rows + recorder.missed == 200)[1])
        assert RUNS <= recorder.rows <= RUNS + 1


def test_trace_has_all_iterations_of_a_learner_that_comes_later(job_name: str) -> None:
    """However many there were when the recorder first sees it; none of the learner before it."""
    with daemon(job_name, tensors=TENSORS):
        recorder = run_time_recorder.Recorder(job_name)
        recorder.read()
        for total, pushes in ((7, 7), (12, 5)):
            with fork(1, push_when_told, job_name) as (one,):
                all_granted([one])
                for _ in range(pushes):
                    tell(one, 1)
                eventually(lambda n=total: status(job_name)["gradients_applied"] == n)
                eventually(lambda n=total: (recorder.read(), recorder.rows == n)[1])
                assert recorder.missed == 0
