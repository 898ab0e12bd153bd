"""The command line: one app, put together from the modules beside this one.

A command returns its exit code, prints its result on stdout and everything else on stderr; with
--json the result is one JSON object. A command raises its errors, and exits.py prints them. Each
command imports what it needs when it runs, so that --help and completion are quick.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

import gadei_ps
from gadei_ps.cli import (
    checkpoints,
    exits,
    faults,
    groups,
    jobs,
    machine,
    partition,
    research,
    serving,
    training,
    watching,
)
from gadei_ps.cli.switches import App
from gadei_ps.machine import process

app = App(
    name="gadei-ps",
    help="A parameter server for one machine.",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Panels of --help, in their order.
TRAIN, JOBS, CHECKPOINTS = "Train", "Jobs", "Checkpoints"
FAULTS, MACHINE, RESEARCH = "Faults", "This machine", "Research"
# They refuse the name of a job with better words than the parser's.
ANY: Final = {"allow_extra_args": True}
# `set` takes --lr for a setting: its error names the form FIELD=VALUE.
UNKNOWN: Final = {"ignore_unknown_options": True}

app.command(rich_help_panel=TRAIN)(training.train)
app.command(rich_help_panel=TRAIN)(training.predict)
app.command(rich_help_panel=TRAIN)(jobs.run)
app.command(rich_help_panel=TRAIN)(jobs.attach)
app.add_typer(groups.app, name="group", rich_help_panel=TRAIN)
app.command(rich_help_panel=TRAIN)(partition.partition)
app.command(rich_help_panel=JOBS)(serving.serve)
app.command(rich_help_panel=JOBS)(jobs.status)
app.command(rich_help_panel=JOBS)(watching.top)
app.command(rich_help_panel=JOBS)(watching.dashboard)
app.command("ls", rich_help_panel=JOBS)(jobs.list_jobs)
app.command(rich_help_panel=JOBS)(watching.history)
app.command(rich_help_panel=JOBS)(watching.plot)
app.command(rich_help_panel=JOBS)(watching.metrics)
app.command("set", context_settings=UNKNOWN, rich_help_panel=JOBS)(serving.set_job)
app.command(rich_help_panel=JOBS)(serving.reload)
app.command(rich_help_panel=JOBS)(jobs.stop)
app.command(rich_help_panel=CHECKPOINTS)(checkpoints.checkpoint)
app.command(rich_help_panel=CHECKPOINTS)(checkpoints.restore)
app.command(rich_help_panel=CHECKPOINTS)(checkpoints.export)
app.command(rich_help_panel=FAULTS)(faults.kill)
app.command(rich_help_panel=FAULTS)(faults.chaos)
app.command(rich_help_panel=MACHINE)(machine.doctor)
app.command(rich_help_panel=MACHINE)(machine.docs)
app.command(rich_help_panel=MACHINE)(jobs.gc)
app.command(context_settings=ANY, rich_help_panel=MACHINE)(machine.install_unit)
app.command(context_settings=ANY, rich_help_panel=MACHINE)(machine.uninstall_unit)
app.command(rich_help_panel=RESEARCH)(research.simulate)
app.command(rich_help_panel=RESEARCH)(research.trace)
app.add_typer(research.runtime_model, name="runtime-model", rich_help_panel=RESEARCH)
app.command(rich_help_panel=RESEARCH)(machine.bench)


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


@functools.cache
def command_tree() -> Any:
    """Return the tree of all commands, which takes some 30 ms to build."""
    return typer.main.get_command(app)


def tree_for(args: Sequence[str]) -> Any:
    """Return the tree with the command alone that a command line names, or with all if none is."""
    named = copy.copy(app)
    word = args[0] if args else ""
    named.registered_groups = [one for one in app.registered_groups if one.name == word]
    named.registered_commands = [one for one in app.registered_commands if _name(one) == word]
    found = named.registered_groups or named.registered_commands
    return typer.main.get_command(named) if found else command_tree()


def _name(command: typer.models.CommandInfo) -> str:
    assert command.callback is not None
    return command.name or typer.main.get_command_name(command.callback.__name__)


def main() -> None:
    """Entry point of `gadei-ps` and of `python -m gadei_ps`."""
    gc.set_threshold(100_000)  # what a command imports stays; garbage is looked for less often
    args = sys.argv[1:]
    process.leave(exits.execute(lambda: tree_for(args), args))
