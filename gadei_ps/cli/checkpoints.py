"""Commands that write checkpoints and read them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from gadei_ps.cli.options import (
    Details,
    JobArgument,
    Json,
    JsonLog,
    argument,
    option,
    path_argument,
    path_option,
    print_result,
)
from gadei_ps.cli.serving import serve_job
from gadei_ps.show.plain import print_text


def checkpoint(job: JobArgument, as_json: Json = False) -> int:
    """Write a checkpoint of a running job now; training pauses for a few milliseconds."""
    from gadei_ps.commands import jobs
    from gadei_ps.show import view

    made = jobs.checkpoint(job)
    print_result(as_json, made, lambda: view.checkpointed(made))
    return 0


def restore(
    source: Annotated[
        str,
        argument(
            "CHECKPOINT|JOB.toml",
            "A checkpoint, a directory of checkpoints, a job file, or a job's name.",
        ),
    ],
    version: Annotated[
        int | None, option("N", "Version to take, if there are several.", "newest")
    ] = None,
    job_file: Annotated[
        Path | None,
        path_option(
            "JOB.toml",
            "Job file to serve the checkpoint with.",
            "no learners, and checkpoints beside this one",
        ),
    ] = None,
    json_log: JsonLog = False,
    verbose: Details = False,
    as_json: Json = False,
) -> int:
    """Serve a job from a checkpoint, with the configuration of the job file.

    Without a job file, the optimizer and the synchronization model are those of the checkpoint, and
    all else has its default. Stop the job first if it is running. If it is dead, its shared memory
    is discarded.
    """
    from gadei_ps.commands import saved
    from gadei_ps.watchdog.serve_options import Options

    found = saved.find(source, version, job_file)
    job = found.job_config()
    _warn(found.problems)
    options = Options(checkpoint=found.path, notice=found.notice, verbose=verbose, as_json=json_log)
    return serve_job(job, options, as_json)


def export(
    source: Annotated[
        str,
        argument(
            "JOB|CHECKPOINT",
            "A job's name, a checkpoint, a directory of checkpoints, or a job file.",
        ),
    ],
    out: Annotated[
        Path,
        path_argument("OUT", "File to write; ends in .safetensors, .npz or .pt (needs PyTorch)."),
    ],
    version: Annotated[
        int | None,
        option(
            "N", "Version of the checkpoint to take.", "a job's memory, or its newest checkpoint"
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Write the weights of a job or of a checkpoint to a file for PyTorch or NumPy."""
    from gadei_ps.commands import saved
    from gadei_ps.show import view

    result = saved.export(source, out, version)
    if not as_json:
        _warn(result["problems"])
    print_result(as_json, result, lambda: view.exported(result))
    return 0


def _warn(problems: Iterable[str]) -> None:
    """Print the checkpoints that cannot be used; an older one is used instead."""
    for problem in problems:
        print_text(f"gadei-ps: warning: {problem}")
