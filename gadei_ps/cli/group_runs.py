"""The commands `gadei-ps group run`, `status`, `join`, `leave` and `stop`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from gadei_ps.cli.exits import print_json
from gadei_ps.cli.options import Command, Json, Quiet, argument, option, print_result
from gadei_ps.show.plain import print_text

RunArgument = Annotated[str, argument("NAME", "Name of a run, as its GROUPS.toml has it.")]
Address = Annotated[
    str | None,
    option("HOST:PORT", "Address of the Ray cluster.", "that of the run, or of this host"),
]


def _say(line: str, progress: bool) -> None:
    if not progress or sys.stderr.isatty():
        print_text(f"gadei-ps: {line}")


def run(
    file: Annotated[Path, argument("GROUPS.toml", "Replicas, and how they exchange models.")],
    command: Command,
    address: Annotated[
        str | None,
        option(
            "HOST:PORT",
            "A Ray cluster that runs; this host is one of its nodes.",
            "a cluster of this host's own",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Train on several hosts: gadei-ps group run GROUPS.toml -- python my_train.py

    Each replica has a job and learners as of gadei-ps run, and exchanges its model with the others.
    Ctrl-C is passed on to all learners, which have 30 s to save what they want to; pressed again,
    it ends them at once. If the run is there already, its replicas are adopted.
    """
    from gadei_ps.replicas import commands
    from gadei_ps.show import groups

    def heard(line: str, progress: bool) -> None:
        if not (progress and quiet):
            _say(line, progress)

    summary = commands.run(file, command, address, Path(), heard)
    if as_json:
        print_json(summary)
    else:
        print_text(f"gadei-ps: {groups.ran(summary)}")
    return int(summary["exit_code"])


def status(name: RunArgument, address: Address = None, as_json: Json = False) -> int:
    """Show what the replicas of a run are doing, a row for each."""
    from gadei_ps.replicas import commands
    from gadei_ps.show import groups

    report = commands.ask("status", name, address, _say)
    print_result(as_json, report, lambda: groups.machines(report["machines"]))
    return 0


def join(
    name: RunArgument,
    group: Annotated[int, option("N", "Number of the group.", min=0)] = 0,
    node: Annotated[
        str | None,
        option("HOST", "Address of the node in Ray.", "a node without a replica of the run"),
    ] = None,
    address: Address = None,
    as_json: Json = False,
) -> int:
    """Add a replica to a run. It begins with the weights of its group."""
    from gadei_ps.replicas import commands

    told = commands.ask("join", name, address, _say, group=group, node=node)
    print_result(
        as_json, told, lambda: f"replica {told['machine']} of {name} starts at {told['host']}"
    )
    return 0


def leave(
    name: RunArgument,
    machine: Annotated[int, argument("REPLICA", "Number of it.", min=0)],
    address: Address = None,
    as_json: Json = False,
) -> int:
    """Have a replica leave its group; its job ends, and the others continue."""
    from gadei_ps.replicas import commands

    told = commands.ask("leave", name, address, _say, machine=machine)
    print_result(as_json, told, lambda: f"replica {machine} of {name} has left")
    return 0


def stop(name: RunArgument, address: Address = None, as_json: Json = False) -> int:
    """Stop all replicas of a run and wait until they are gone."""
    from gadei_ps.replicas import commands
    from gadei_ps.show.counts import counted

    told = commands.ask("stop", name, address, _say)
    replicas = counted(len(told["machines"]), "replica")
    print_result(as_json, told, lambda: f"run {name} has stopped: {replicas}")
    return 0
