"""Commands that show how a job's training has gone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gadei_ps.cli import results
from gadei_ps.cli.options import Json, tell

Source = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="The job's name, also once it has ended; its job file, or the file of its history.",
    ),
]


def history(
    job: Source,
    last: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Only the last N lines.", show_default="all"),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show loss, samples/s, staleness, learners and changes of a job over time."""
    from gadei_ps.commands import history as saved
    from gadei_ps.show.history import shown

    result = saved.read(job, last)
    tell(as_json, result, lambda: shown(result["lines"]))
    return 0


def plot(
    job: Source,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg", help="File for the picture.", show_default="JOB-history.svg"
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Draw loss and samples/s of a job over time and versions, as SVG; needs matplotlib."""
    from gadei_ps.commands import history as saved
    from gadei_ps.show import history as drawing

    drawing.check_plot()
    name = Path(job).name.removesuffix(".jsonl").removesuffix(".toml").removesuffix(".sock")
    file = out or Path(f"{name}-history.svg")
    results.check("--out", file, ".svg")
    result = saved.read(job)
    results.write("--out", file, drawing.plot(result["lines"], name))
    lines = len(result["lines"])
    tell(as_json, {"job": job, "file": str(file), "lines": lines}, lambda: f"wrote {file}")
    return 0
