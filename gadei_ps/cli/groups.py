"""The commands of `gadei-ps group`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

from gadei_ps.cli.exits import print_json
from gadei_ps.cli.options import Command, Json, Quiet, argument, option, path_argument, print_result
from gadei_ps.cli.research import ProblemName
from gadei_ps.cli.switches import App
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import print_text

app = App(help="Groups of replicas that train together.")

RunArgument = Annotated[str, argument("NAME", "Name of a run, as its GROUPS.toml has it.")]
Address = Annotated[
    str | None,
    option("HOST:PORT", "Address of the Ray cluster.", "that of the run, or of this host"),
]


def _print(line: str, progress: bool) -> None:
    if not progress or sys.stderr.isatty():
        print_text(f"gadei-ps: {line}")


@app.command()
def run(
    file: Annotated[Path, path_argument("GROUPS.toml", "Replicas, and how they exchange models.")],
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

    def report(line: str, progress: bool) -> None:
        if not (progress and quiet):
            _print(line, progress)

    summary = commands.run(file, command, address, Path(), report)
    if as_json:
        print_json(summary)
    else:
        print_text(f"gadei-ps: {groups.ran(summary)}")
    return int(summary["exit_code"])


def _ask(request: str, run: str, address: str | None, **more: Any) -> dict[str, Any]:
    from gadei_ps.replicas import commands

    return commands.ask(request, run, address, _print, **more)


@app.command()
def status(name: RunArgument, address: Address = None, as_json: Json = False) -> int:
    """Show what the replicas of a run are doing, a row for each."""
    from gadei_ps.show import groups

    report = _ask("status", name, address)
    print_result(as_json, report, lambda: groups.machines(report["machines"]))
    return 0


@app.command()
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
    reply = _ask("join", name, address, group=group, node=node)
    print_result(
        as_json, reply, lambda: f"replica {reply['machine']} of {name} starts at {reply['host']}"
    )
    return 0


@app.command()
def leave(
    name: RunArgument,
    machine: Annotated[int, argument("REPLICA", "Number of it.", min=0)],
    address: Address = None,
    as_json: Json = False,
) -> int:
    """Have a replica leave its group; its job ends, and the others continue."""
    reply = _ask("leave", name, address, machine=machine)
    print_result(as_json, reply, lambda: f"replica {machine} of {name} has left")
    return 0


@app.command()
def stop(name: RunArgument, address: Address = None, as_json: Json = False) -> int:
    """Stop all replicas of a run and wait until they are gone."""
    from gadei_ps.show.counts import counted

    reply = _ask("stop", name, address)
    replicas = counted(len(reply["machines"]), "replica")
    print_result(as_json, reply, lambda: f"run {name} has stopped: {replicas}")
    return 0


@app.command()
def simulate(
    rules: Annotated[
        list[str],
        argument(
            "RULE",
            "Rules of exchange to compare: replace, mix:WEIGHT such as mix:0.5, and "
            "outer:RATE:MOMENTUM or outer:RATE:MOMENTUM:N such as outer:0.7:0.9.",
        ),
    ],
    machines: Annotated[
        int | None, option("N", "Number of replicas, at most 100000.", "two in each group")
    ] = None,
    groups: Annotated[
        str, option("P", "Number of groups, or the replicas of each group as 3,5,2.")
    ] = "4",
    neighbours: Annotated[
        str,
        option("WHO", "Groups that broadcast to each other: ring, all, none, or pairs as 0-1,1-2."),
    ] = "ring",
    k: Annotated[
        str,
        option(
            "K",
            "Mini-batches that each replica trains in a round, or epochs of its subset as 1epoch.",
            name="--k",
        ),
    ] = "10",
    rounds: Annotated[
        int, option("R", "End when the groups have made R rounds on average.", min=1)
    ] = 100,
    times: Annotated[
        str,
        option(
            "SPEC",
            "Run times of mini-batches, as in simulate: normal:mean=1,std=0.2, "
            "speeds:1,1.5,2,4, a trace, FILE.csv, and others.",
        ),
    ] = "normal:mean=1,std=0.2",
    model_size: Annotated[
        str, option("SIZE", "Size of the model in float32, such as 25MB.")
    ] = "100MB",
    bandwidth: Annotated[
        str,
        option(
            "SIZE,...",
            "Bytes a second that a replica sends; several values are taken in turn. 1 Gbit/s "
            "is 125MB.",
        ),
    ] = "125MB",
    latency: Annotated[str | None, option("TIME", "Latency of a message.", "none")] = None,
    wire: Annotated[str, option("FORMAT", "What is sent: float32, bfloat16 or int8.")] = "float32",
    broadcast: Annotated[
        str,
        option(
            "HOW",
            "Each replica sends its counterpart in a neighbouring group a whole model, as the "
            "paper counts (whole), or the part that it has summed (parts).",
        ),
    ] = "whole",
    train: Annotated[
        ProblemName | None, option(None, "Also train this problem, and show loss and accuracy.")
    ] = None,
    lr: Annotated[
        float | None, option("RATE", "With --train: learning rate.", "by problem")
    ] = None,
    batch: Annotated[int, option("B", "Samples in a mini-batch.", min=1)] = 32,
    samples: Annotated[
        int | None,
        option(
            "N", "Samples of the training set, for epochs in --k.", "those of the problem", min=1
        ),
    ] = None,
    seed: Annotated[int, option(None, "Seed for everything that is drawn at random.", min=0)] = 0,
    as_json: Json = False,
) -> int:
    """Compare rules of exchange between groups of replicas in virtual time."""
    from gadei_ps.commands import quantities
    from gadei_ps.groups.compress import Wire
    from gadei_ps.simulate import compare, groups_report, groups_setting, run_times
    from gadei_ps.simulate.groups_setting import GroupSetting, Links

    if wire not in list(Wire):
        raise UsageError(f"--wire {wire!r}: write one of {', '.join(Wire)}")
    if broadcast not in ("whole", "parts"):
        raise UsageError(f"--broadcast {broadcast!r}: write whole or parts")
    if lr is not None and (train is None or not 0 < lr < math.inf):
        raise UsageError("--lr needs --train" if train is None else f"--lr must be above 0: {lr:g}")
    learning = None
    if train is not None:
        if samples is not None:
            raise UsageError("--samples: with --train, the samples are those of the problem")
        problem = compare.problem(train.value, seed)
        learning = groups_report.Learning(problem, problem.lr if lr is None else lr)
        samples = problem.samples
    sizes = groups_setting.sizes(groups, machines)
    setting = GroupSetting(
        sizes=sizes,
        neighbours=groups_setting.neighbours(neighbours, len(sizes)),
        times=run_times.parse(times, seed),
        values=max(1, quantities.size(model_size) // 4),
        k=groups_setting.batches(k, samples, sum(sizes), batch),
        batch=batch,
        rounds=rounds,
        seed=seed,
        wire=Wire(wire),
        whole=broadcast == "whole",
        links=Links(_speeds(bandwidth), 0.0 if latency is None else _seconds("--latency", latency)),
    )
    results = groups_report.compare(rules, setting, learning, lambda line: print_text(line))
    asked = {"machines": setting.machines, "groups": len(sizes), "sizes": list(sizes)}
    asked |= {"neighbours": neighbours, "k": setting.k, "batch": batch, "times": times}
    asked |= {"values": setting.values, "wire": wire, "broadcast": broadcast, "seed": seed}
    asked |= {"bandwidths": list(setting.links.bandwidths), "latency_s": setting.links.latency_s}
    asked |= {"train": train.value if train else None}
    result = asked | results
    print_result(as_json, result, lambda: groups_report.shown(result))
    return 0


def _seconds(option: str, text: str) -> float:
    """Parse the seconds of an option that may be 0."""
    from gadei_ps.commands import quantities

    try:
        return quantities.duration(text, zero=True)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _speeds(text: str) -> tuple[float, ...]:
    """Parse --bandwidth (bytes a second)."""
    from gadei_ps.commands import quantities

    try:
        return tuple(float(quantities.size(one)) for one in text.split(","))
    except UsageError:
        raise UsageError(
            f"--bandwidth {text!r}: write bytes a second like 125MB, which are 1 Gbit/s, with "
            "commas between several"
        ) from None
