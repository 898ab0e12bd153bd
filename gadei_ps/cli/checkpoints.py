"""Commands that write checkpoints and read them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from gadei_ps.cli.jobs import serve_job
from gadei_ps.cli.options import JobArgument, Json, tell


def checkpoint(job: JobArgument, as_json: Json = False) -> int:
    """Write a checkpoint of a running job now; training pauses for milliseconds."""
    from gadei_ps.commands import jobs
    from gadei_ps.show import view

    made = jobs.checkpoint(job)
    tell(as_json, made, lambda: view.checkpointed(made))
    return 0


def restore(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|JOB.toml",
            help="A checkpoint, a directory of them, a job file, or the name of a job.",
        ),
    ],
    version: Annotated[
        int | None, typer.Option(metavar="N", help="Of several, that version. [default: newest]")
    ] = None,
    json_log: Annotated[bool, typer.Option("--json-log", help="Log in JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
    as_json: Json = False,
) -> int:
    """Serve a job from a checkpoint, with the configuration that it holds or the job file's.

    What a dead watchdog of the job has left in memory is dropped; a running job is stopped first by
    gadei-ps stop.
    """
    from gadei_ps.commands import saved
    from gadei_ps.watchdog.supervisor import Options

    found = saved.find(source, version)
    _warn(found.problems)
    options = Options(checkpoint=found.path, verbose=verbose, as_json=json_log)
    return serve_job(found.job_config(), options, as_json)


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="JOB|CHECKPOINT",
            help="A running job, a checkpoint, a directory of them, or a job file.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Ends in .safetensors, .npz or .pt (torch).")
    ],
    version: Annotated[
        int | None, typer.Option(metavar="N", help="Of several checkpoints, that version.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Write plain weights for PyTorch or NumPy, from a running job or from a checkpoint."""
    from gadei_ps.commands import saved
    from gadei_ps.show import view

    result = saved.export(source, out, version)
    if not as_json:
        _warn(result["problems"])
    tell(as_json, result, lambda: view.exported(result))
    return 0


def _warn(problems: Iterable[str]) -> None:
    """Checkpoints that cannot be used are named; the one before them is taken."""
    for problem in problems:
        print(f"gadei-ps: warning: {problem}", file=sys.stderr)
