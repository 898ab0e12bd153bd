"""Commands that kill processes of a job on purpose."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gadei_ps.cli.options import JobArgument, Json, OptimizerName, Verbose, running_jobs, tell
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import say


def kill(
    job: JobArgument,
    learner: Annotated[
        int | None,
        typer.Option(metavar="K", min=0, help="The learner that gadei-ps status shows as K."),
    ] = None,
    server: Annotated[bool, typer.Option("--server", help="The active server.")] = False,
    standby: Annotated[bool, typer.Option("--standby", help="The standby server.")] = False,
    watchdog: Annotated[bool, typer.Option("--watchdog", help="The watchdog.")] = False,
    fork_server: Annotated[
        bool, typer.Option("--fork-server", help="The process that forks the servers.")
    ] = False,
    name: Annotated[
        str,
        typer.Option(
            "--signal", metavar="NAME", help="Signal to send: KILL, STOP, CONT, TERM, SEGV, ..."
        ),
    ] = "KILL",
    as_json: Json = False,
) -> int:
    """Send a signal to one process of a job; training continues and nothing is lost."""
    from gadei_ps.job import processes
    from gadei_ps.job.processes import Role
    from gadei_ps.show import view

    asked = {
        Role.LEARNER: learner is not None,
        Role.SERVER: server,
        Role.STANDBY: standby,
        Role.WATCHDOG: watchdog,
        Role.FORK_SERVER: fork_server,
    }
    roles = [role for role, wanted in asked.items() if wanted]
    if len(roles) != 1:
        raise UsageError(
            "give exactly one of --learner K, --server, --standby, --watchdog and --fork-server"
        )
    sent = processes.kill(job, roles[0], learner, processes.signal_number(name))
    tell(as_json, sent, lambda: view.killed(sent))
    return 0


def chaos(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="The running job's name, or the path of its socket.",
            show_default="a job of its own",
            autocompletion=running_jobs,
        ),
    ] = None,
    time_: Annotated[
        str,
        typer.Option("--for", metavar="TIME", help="How long it lasts, such as 500ms, 60s or 2m."),
    ] = "60s",
    targets: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE,...",
            help="Processes to hit: server, learner, standby, watchdog, fork-server.",
            show_default="all; in a running JOB server,learner",
        ),
    ] = None,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="Mean time between two faults.")
    ] = "0.5s",
    signals: Annotated[
        str, typer.Option(metavar="NAME,...", help="Signals to send: KILL or KILL,STOP.")
    ] = "KILL",
    seed: Annotated[
        int | None, typer.Option(help="Seed for the choice of victims.", show_default="random")
    ] = None,
    learners: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=64, help="Learners. Only without JOB.", show_default="2"
        ),
    ] = None,
    optimizer: Annotated[
        OptimizerName | None, typer.Option(help="Optimizer. Only without JOB.", show_default="sgd")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Size of the weights, such as 64K, 2M or 100M. Only without JOB.",
            show_default="2M",
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=64,
            help="Shards of the server, each with a thread. Only without JOB.",
            show_default="by cores",
        ),
    ] = None,
    impatient: Annotated[
        bool, typer.Option("--impatient", help="Kill the server even while there is no standby.")
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Kill and stop processes at random; exit code 1 if a gradient is lost or applied twice.

    Without JOB, a job of its own counts every gradient in its weights. With a running JOB, the
    report has only times and the job's counters.
    """
    from gadei_ps.chaos import campaign
    from gadei_ps.chaos.victims import OwnJob
    from gadei_ps.commands import quantities
    from gadei_ps.job import processes
    from gadei_ps.job.processes import Role
    from gadei_ps.show import view

    asked = {
        "learners": learners,
        "optimizer": optimizer and optimizer.value,
        "size": None if size is None else quantities.size(size),
        "shards": shards,
    }
    own: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if job is not None and own:
        given = ", ".join(f"--{name}" for name in own)
        raise UsageError(f"{given}: only without JOB; job {job!r} has its configuration")
    wanted = targets or ",".join(Role if job is None else (Role.SERVER, Role.LEARNER))
    names = list(dict.fromkeys(one.strip() for one in wanted.split(",")))
    for name in names:
        if name not in list(Role):
            raise UsageError(f"--targets: {name!r} is not a role; give some of {', '.join(Role)}")
    report = campaign.run(
        job,
        campaign.Options(
            seconds=quantities.duration(time_),
            targets=[Role(name) for name in names],
            every_s=quantities.duration(every),
            signals=[processes.signal_number(one.strip()) for one in signals.split(",")],
            seed=seed,
            own=OwnJob(**own, verbose=verbose),
            impatient=impatient,
            say=lambda line: None if as_json else say(line),
        ),
    )
    tell(as_json, report, lambda: view.raged(report))
    return 1 if report["clean"] is False else 0
