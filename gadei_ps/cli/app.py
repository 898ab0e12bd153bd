"""The command line: one app, put together from the modules beside this one.

A command returns its exit code, prints its result on stdout and everything else on stderr; with
--json the result is one JSON object. A command raises its errors, and outcome.py prints them. Each
command imports what it needs when it runs, so that --help and completion are quick.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import gadei_ps
from gadei_ps.cli import (
    checkpoints,
    faults,
    groups,
    history,
    jobs,
    machine,
    outcome,
    partition,
    runtime_model,
    serving,
    sync,
    training,
)
from gadei_ps.cli import simulate as simulation
from gadei_ps.cli.switches import App

app = App(
    name="gadei-ps",
    help="A parameter server for one machine.",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(training.train)
app.command()(training.predict)
app.command()(serving.serve)
app.command()(jobs.run)
app.command()(jobs.attach)
app.command()(jobs.status)
app.command()(jobs.stop)
app.command("set")(sync.set_job)
app.command()(serving.reload)
app.command()(history.history)
app.command()(history.plot)
app.command()(sync.trace)
app.command()(simulation.simulate)
app.command()(partition.partition)
app.command()(checkpoints.checkpoint)
app.command()(checkpoints.restore)
app.command()(checkpoints.export)
app.command()(faults.kill)
app.command()(faults.chaos)
app.command("ls")(jobs.list_jobs)
app.command()(jobs.gc)
app.command()(machine.doctor)
app.command()(machine.bench)
# They refuse the name of a job with better words than the parser's.
app.command(context_settings={"allow_extra_args": True})(machine.install_unit)
app.command(context_settings={"allow_extra_args": True})(machine.uninstall_unit)
app.add_typer(groups.app, name="group")
app.add_typer(runtime_model.app, name="runtime-model")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"gadei-ps {gadei_ps.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """A parameter server for one machine: jobs, learners and the models they train."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Entry point of `gadei-ps` and of `python -m gadei_ps`."""
    sys.exit(outcome.execute(app, sys.argv[1:]))
