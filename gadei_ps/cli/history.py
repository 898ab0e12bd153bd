"""Commands that show how a job's training has gone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from gadei_ps.cli import results
from gadei_ps.cli.options import Json, argument, option, print_result, recorded_jobs

HELP = "The job's name, even after it has ended; its job file, or the file of its history."
RUNS = 20  # that are listed without --last


def history(
    job: Annotated[
        str | None, argument("JOB", HELP, "list all runs", autocompletion=recorded_jobs)
    ] = None,
    last: Annotated[
        int | None,
        option(
            "N",
            "Only the last N lines of a job; without a job, only the newest N runs.",
            f"all lines; {RUNS} runs",
            min=1,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show loss, speed, staleness, learners and changes of a job over time, or list all runs."""
    from gadei_ps.commands import history as saved
    from gadei_ps.job.config import state_directory
    from gadei_ps.show.history_view import render, runs

    if job is None:
        found = [one._asdict() for one in saved.runs()]
        where = str(state_directory())
        print_result(as_json, {"runs": found[:last]}, lambda: runs(found, where, last or RUNS))
        return 0
    result = saved.read(job, last)
    print_result(as_json, result, lambda: render(result["lines"]))
    return 0


def plot(
    job: Annotated[str, argument("JOB", HELP, autocompletion=recorded_jobs)],
    out: Annotated[
        Path | None, option("FILE.svg", "File for the picture.", "JOB-history.svg")
    ] = None,
    as_json: Json = False,
) -> int:
    """Draw loss and samples/s of a job over time and versions, as SVG; needs matplotlib."""
    from gadei_ps.commands import history as saved
    from gadei_ps.show import history_view as drawing

    drawing.check_plot()
    name = Path(job).name.removesuffix(".jsonl").removesuffix(".toml").removesuffix(".sock")
    file = out or Path(f"{name}-history.svg")
    results.check("--out", file, ".svg")
    result = saved.read(job)
    results.write("--out", file, drawing.plot(result["lines"], name))
    lines = len(result["lines"])
    print_result(as_json, {"job": job, "file": str(file), "lines": lines}, lambda: f"wrote {file}")
    return 0
