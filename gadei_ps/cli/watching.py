"""Commands that show jobs: live in a terminal, in a browser and to Prometheus, and over time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gadei_ps.cli.exits import print_json
from gadei_ps.cli.options import (
    Json,
    argument,
    check_file,
    option,
    path_option,
    print_result,
    recorded_jobs,
    running_jobs,
    switch,
    write_file,
)
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import print_text

if TYPE_CHECKING:
    from gadei_ps.dashboard.access import Access


def top(
    job: Annotated[
        str | None,
        argument("JOB", "Show only the job of this name.", "all jobs", autocompletion=running_jobs),
    ] = None,
) -> int:
    """Show jobs and their processes, full screen, with keys to act.

    Root sees the jobs of all users, and acts on its own. Tab changes between jobs and processes.
    """
    from gadei_ps.dashboard import top as display
    from gadei_ps.job import paths
    from gadei_ps.memory import shm

    if job is not None:
        shm.check_job_name(job)
    uid = paths.owner()
    display.run(None if uid == 0 and job is None else uid, job)
    return 0


def dashboard(
    listen: Annotated[
        str,
        option(
            "HOST:PORT",
            "Address for browsers; port 0 takes a free one. Others than 127.0.0.1 are not "
            "encrypted.",
        ),
    ] = "127.0.0.1:8470",
    read_only: Annotated[bool, switch("--read-only", "Only show; refuse all actions.")] = False,
    no_token: Annotated[
        bool,
        switch(
            "--no-token",
            "Need no token: every user of this machine sees the jobs. Implies --read-only.",
        ),
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        option("NAME", "Another host name by which browsers reach the dashboard.", "none"),
    ] = None,
    as_json: Json = False,
) -> int:
    """Serve a page with all jobs: live curves, processes, events, and actions.

    It prints a link with a token once; a user who has it may act as you. No job depends on the
    dashboard.
    """
    from gadei_ps.machine import listening

    place = listening.listen(listen)
    try:
        from gadei_ps.dashboard import serving
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "gadei_ps":
            raise
        raise UsageError(
            "dashboard needs starlette, uvicorn and jinja2: pip install 'gadei-ps[dashboard]'"
        ) from None

    def started(access: Access) -> None:
        if as_json:
            print_json({"url": access.link, "read_only": access.read_only})
        else:
            print_text(f"dashboard: {access.link}", sys.stdout)
            print_text("gadei-ps: Ctrl-C ends it; jobs continue")
        sys.stdout.flush()

    serving.serve(
        *place, started, read_only=read_only, token=not no_token, allow_hosts=allow_host or ()
    )
    return 0


def metrics(
    listen: Annotated[
        str, option("HOST:PORT", "Address for Prometheus; port 0 takes a free one.")
    ] = "127.0.0.1:9469",
    once: Annotated[bool, switch("--once", "Print the metrics once, and serve nothing.")] = False,
) -> int:
    """Export metrics of all jobs to Prometheus, at http://HOST:PORT/metrics.

    As root, of the jobs of all users. The metrics are read from shared memory: no job is asked.
    """
    import asyncio

    from gadei_ps.machine import listening
    from gadei_ps.monitoring import web
    from gadei_ps.monitoring.exporter import Exporter

    exporter = Exporter()
    if once:
        sys.stdout.buffer.write(exporter.text()[0])
        return 0
    server = web.Server(exporter.text, listen)
    where = listening.shown(server.host, server.port)
    print_text(f"gadei-ps: metrics are at http://{where}/metrics")
    asyncio.run(web.until_signal(server))
    return 0


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
        Path | None, path_option("FILE.svg", "File for the picture.", "JOB-history.svg")
    ] = None,
    as_json: Json = False,
) -> int:
    """Draw loss and samples/s of a job over time and versions, as SVG; needs matplotlib."""
    from gadei_ps.commands import history as saved
    from gadei_ps.monitoring import series

    path = Path(job).resolve()
    name = path.stem if path.suffix in (".jsonl", ".toml", ".sock") else path.name
    file = out or Path(f"{name}-history.svg")
    check_file("--out", file, ".svg")
    result = saved.read(job)
    write_file("--out", file, series.plot(result["lines"], name))
    lines = len(result["lines"])
    print_result(as_json, {"job": job, "file": str(file), "lines": lines}, lambda: f"wrote {file}")
    return 0
