"""Predicted cutoffs on the mini-batch times of two production jobs.

Alibaba's cluster-trace-gpu-v2020, mini-batch-time: ten learners each.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gadei_ps.benchmarks.nlc_texts import CHECKOUT, VARIABLE
from gadei_ps.benchmarks.reproduce import cutting
from gadei_ps.benchmarks.reproduce.cutting import Calibration, Driven
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.errors import UsageError
from gadei_ps.run_times import fitting, traces
from gadei_ps.run_times.traces import Trace
from gadei_ps.sync.order_statistics import NormalPredictor, SampledPredictor
from gadei_ps.sync.prediction import FloatArray
from gadei_ps.sync.run_time_model import RunTimeModel

FOLDER = "trace-pai-minibatch"
JOBS = (1, 3)
LAG = fitting.LAG


@dataclass
class Tested:
    """A model trained on one job's first half, tested on its second half or on another job."""

    trained_on: int
    tested_on: int
    times: FloatArray
    runs: dict[str, Driven]
    calibration: dict[str, Calibration]
    best_fixed: int

    @property
    def name(self) -> str:
        half = " (second half)" if self.trained_on == self.tested_on else ""
        return f"job {self.trained_on} to job {self.tested_on}{half}"


def read() -> dict[int, Trace]:
    """The jobs' traces, with gaps filled. Raises UsageError if they are missing."""
    directory = Path(os.environ.get(VARIABLE, CHECKOUT.parent / "shared" / "data")) / FOLDER
    if not directory.is_dir():
        raise UsageError(f"{directory} is not there; ${VARIABLE} names the directory of data sets")
    return {job: traces.read(directory / f"job_{job}_norm.csv") for job in JOBS}


def run(quick: bool = False) -> Part:
    """Train on each job's first half, and tests on its second half and on the other job."""
    jobs = read()
    tests = []
    seconds = []
    for job in JOBS:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "model.safetensors"
            half = len(jobs[job].times) // 2
            trained = fitting.train(
                jobs[job].part(0, half), out=file, epochs=4 if quick else fitting.EPOCHS
            )
            seconds.append(trained.seconds)
            for other in JOBS:
                times = jobs[other].filled().times[half if other == job else 0 :]
                tests.append(_test(file, job, other, times))
    return Part(
        title="Cutoff SGD: run times of production jobs",
        text=_text(jobs, tests, seconds),
        rows=[row for one in tests for row in _rows(one)],
        data={
            one.name: {
                "best_fixed": one.best_fixed,
                "share": {name: found.share.tolist() for name, found in one.runs.items()},
                "cutoffs": {name: found.cutoffs.tolist() for name, found in one.runs.items()},
                "error": {name: found.error.tolist() for name, found in one.calibration.items()},
                "covered": one.calibration["learned"].covered.tolist(),
            }
            for one in tests
        },
    )


def _test(file: Path, job: int, other: int, times: FloatArray) -> Tested:
    hindsight = cutting.best_fixed(times)
    return Tested(
        job,
        other,
        times,
        {
            "learned": cutting.drive(RunTimeModel.load(file), times),
            "order": cutting.drive(NormalPredictor(), times),
            "sampled": cutting.drive(SampledPredictor(), times),
            "best fixed": cutting.fixed(times, hindsight),
            "full": cutting.fixed(times, times.shape[1]),
        },
        {
            "learned": cutting.calibrate(RunTimeModel.load(file), times),
            "order": cutting.calibrate(NormalPredictor(), times),
            "sampled": cutting.calibrate(SampledPredictor(), times),
        },
        hindsight,
    )


def _text(jobs: dict[int, Trace], tests: list[Tested], seconds: list[float]) -> str:
    sizes = ", ".join(
        f"job {job}: {trace.times.shape[0]} times of {trace.times.shape[1]} learners, "
        f"{trace.missing} missing"
        for job, trace in jobs.items()
    )
    whole = [100 * float(np.mean(one.runs["full"].share[LAG:])) for one in tests]
    dropped = sum(int((one.runs["learned"].cutoffs < one.times.shape[1]).sum()) for one in tests)
    return f"""\
This part is not from a paper. It runs the same predictors on the mini-batch times of two production
jobs (Alibaba, cluster-trace-gpu-v2020; {sizes}). The file has only about
every tenth iteration or second. The times are used here as if they were consecutive, so neighbours
are less alike than in the job itself. A model is trained on each job's first half
({max(seconds):.0f} s) and tested on its second half and on the other
job. A missing time is replaced by the learner's previous one.

With ten learners, dropping the slowest pays only if it is more than a ninth slower than the second
slowest, which is rare here. Full synchronization has {min(whole):.1f} to {max(whole):.1f}% of the
oracle's throughput, so a cutoff can gain almost nothing; a predictor can only show that it does not
drop without need. In all four tests together, the number of supersteps in which the learned model
dropped a learner is {dropped}. Its predicted order statistics are about as good as those of the two
predictors that need no training, not better: half a job of this length, or another job, is little
to learn from.
"""


def _rows(one: Tested) -> list[Row]:
    rows = [
        Row(f"share of the oracle, {name}, {one.name}", "", cutting.percent(found.share[LAG:]))
        for name, found in one.runs.items()
    ]
    rows += [
        Row(f"error of order statistics, {name}, {one.name}", "", cutting.percent(found.error))
        for name, found in one.calibration.items()
    ]
    covered = cutting.percent(one.calibration["learned"].covered)
    rows.append(Row(f"coverage of two deviations, learned, {one.name}", "", covered))
    return rows
