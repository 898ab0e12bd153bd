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
from gadei_ps.cli import checkpoints, faults, jobs, machine, outcome, runtime_model, sync, training
from gadei_ps.cli import simulate as simulation
from gadei_ps.cli.switches import Command, Group

app = typer.Typer(
    name="gadei-ps",
    cls=Group,
    help="A parameter server for one machine.",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command(cls=Command)(training.train)
app.command(cls=Command)(training.predict)
app.command(cls=Command)(jobs.serve)
app.command(cls=Command)(jobs.run)
app.command(cls=Command)(jobs.attach)
app.command(cls=Command)(jobs.status)
app.command(cls=Command)(jobs.stop)
app.command("set", cls=Command)(sync.set_job)
app.command(cls=Command)(sync.trace)
app.command(cls=Command)(simulation.simulate)
app.command(cls=Command)(checkpoints.checkpoint)
app.command(cls=Command)(checkpoints.restore)
app.command(cls=Command)(checkpoints.export)
app.command(cls=Command)(faults.kill)
app.command(cls=Command)(faults.chaos)
app.command("ls", cls=Command)(jobs.list_jobs)
app.command(cls=Command)(jobs.gc)
app.command(cls=Command)(machine.doctor)
app.command(cls=Command)(machine.bench)
app.command(cls=Command)(machine.install_unit)
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
