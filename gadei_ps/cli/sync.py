"""Commands that change a job's synchronization model and record its run times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gadei_ps.cli.options import MODELS, JobArgument, Json
from gadei_ps.cli.outcome import print_json
from gadei_ps.errors import UsageError

SETTABLE = ("sync",)


def set_job(
    job: JobArgument,
    settings: Annotated[
        list[str], typer.Argument(metavar="sync=MODEL", help=f"The new model: {MODELS}")
    ],
    timeout: Annotated[
        float,
        typer.Option(metavar="S", min=0.1, help="Seconds to wait until the change takes effect."),
    ] = 60.0,
    as_json: Json = False,
) -> int:
    """Change the synchronization model of a running job at its next barrier."""
    from gadei_ps.commands import jobs

    result = jobs.set_sync(job, _settings(settings)["sync"], timeout)
    if as_json:
        print_json(result)
    elif result["changed"]:
        print(f"{job}: {result['before']} -> {result['sync']}")
    else:
        print(f"{job}: already has {result['sync']}")
    return 0


def _settings(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"cannot read {item!r}; write sync=MODEL")
        if key not in SETTABLE:
            raise UsageError(f"{key!r} cannot be set in a running job; only sync can")
        if key in found:
            raise UsageError(f"{key} is given twice")
        found[key] = value
    return found


def trace(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv", help="File for the run times.", show_default="JOB-trace.csv"
        ),
    ] = None,
    time_: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="TIME",
            help="How long to record, such as 500ms, 60s or 2m.",
            show_default="until the job ends",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Record the run times of a job's learners, for simulate and runtime-model train.

    The recording ends with the job, after --for, or at Ctrl-C.
    """
    from gadei_ps.commands import quantities
    from gadei_ps.job import paths
    from gadei_ps.run_times import record
    from gadei_ps.show.counts import counted

    seconds = None if time_ is None else quantities.duration(time_)
    result = record.record(job, out or Path(f"{job}-trace.csv"), seconds, paths.owner())
    if as_json:
        print_json(result)
        return 0
    missed = f", {result['missed']:,} missed" if result["missed"] else ""
    print(
        f"{result['file']}: {counted(result['run_times'], 'run time')} of "
        f"{counted(result['learners'], 'learner')} "
        f"in {result['seconds']:.1f} s{missed}"
    )
    return 0
