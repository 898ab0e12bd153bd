"""Commands that change a running job's settings and record its run times."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from gadei_ps.cli.exits import print_json
from gadei_ps.cli.options import (
    MODELS,
    JobArgument,
    Json,
    argument,
    option,
    print_result,
    running_jobs,
)
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import print_text


def set_job(
    job: JobArgument,
    settings: Annotated[
        list[str],
        argument(
            "FIELD=VALUE...",
            "Fields of the optimizer, as lr=0.01 schedule=step step_size=1000; of a group of "
            f"parameters, as groups.0.lr=0.01; or sync=MODEL, alone: {MODELS}",
        ),
    ],
    timeout: Annotated[
        float, option("S", "Seconds to wait until the change takes effect.", min=0.1)
    ] = 60.0,
    as_json: Json = False,
) -> int:
    """Change hyperparameters or the synchronization model of a running job.

    Numbers change at once, between two gradients: lr, weight_decay, momentum, betas, alpha, eps,
    clip_norm, staleness_aware, spike_compensation, schedule, warmup_steps, step_size, step_gamma,
    total_steps, min_lr.
    The model changes at the next barrier. Both are kept in the job's memory and its checkpoints.
    """
    from gadei_ps.commands import change
    from gadei_ps.job import changes
    from gadei_ps.show.optimizer_line import changed

    models = [one.removeprefix("sync=") for one in settings if one.startswith("sync=")]
    if not models:
        values = changes.parse(settings)
        result = change.set_optimizer(job, values, timeout)
        print_result(as_json, result, lambda: f"{job}: {changed(result)}")
        return 0
    if len(settings) > 1:
        raise UsageError("sync is changed at a barrier, the rest at once: give sync=MODEL alone")
    result = change.set_sync(job, models[0], timeout)
    if as_json:
        print_json(result)
    elif result["changed"]:
        print_text(f"{job}: {result['before']} -> {result['sync']}", sys.stdout)
    else:
        print_text(f"{job}: already has {result['sync']}", sys.stdout)
    return 0


def trace(
    job: Annotated[str, argument("JOB", "The job's name.", autocompletion=running_jobs)],
    out: Annotated[
        Path | None, option("FILE.csv", "File for the run times.", "JOB-trace.csv")
    ] = None,
    time_: Annotated[
        str | None,
        option(
            "TIME",
            "How long to record, such as 500ms, 60s or 2m.",
            "until the job ends",
            name="--for",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Record the run times of a job's learners, for simulate and runtime-model train.

    The recording ends with the job, after --for, or at Ctrl-C.
    """
    from gadei_ps.commands import quantities
    from gadei_ps.job import paths
    from gadei_ps.run_times import run_time_recorder
    from gadei_ps.show.counts import counted

    seconds = None if time_ is None else quantities.duration(time_)
    result = run_time_recorder.record(job, out or Path(f"{job}-trace.csv"), seconds, paths.owner())
    if as_json:
        print_json(result)
        return 0
    missed = f", {result['missed']:,} missed" if result["missed"] else ""
    print_text(
        f"{result['file']}: {counted(result['run_times'], 'run time')} of "
        f"{counted(result['learners'], 'learner')} "
        f"in {result['seconds']:.1f} s{missed}",
        sys.stdout,
    )
    return 0
