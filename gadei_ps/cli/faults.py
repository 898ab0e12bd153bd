"""Commands that kill processes of a job on purpose."""

from __future__ import annotations

from typing import Annotated, Any

from gadei_ps.cli.options import (
    JobArgument,
    Json,
    OptimizerName,
    Verbose,
    argument,
    option,
    print_result,
    running_jobs,
    shards_option,
    switch,
)
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import print_text


def kill(
    job: JobArgument,
    learner: Annotated[
        int | None, option("K", "The learner that gadei-ps status shows as K.", min=0)
    ] = None,
    server: Annotated[bool, switch("--server", "The active server.")] = False,
    standby: Annotated[bool, switch("--standby", "The standby server.")] = False,
    watchdog: Annotated[bool, switch("--watchdog", "The watchdog.")] = False,
    fork_server: Annotated[
        bool, switch("--fork-server", "The process that forks the servers.")
    ] = False,
    name: Annotated[
        str, option("NAME", "Signal to send: KILL, STOP, CONT, TERM, SEGV, ...", name="--signal")
    ] = "KILL",
    as_json: Json = False,
) -> int:
    """Send a signal to one process of a job; training continues and nothing is lost."""
    from gadei_ps.job import faults
    from gadei_ps.job.faults import Role
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
    sent = faults.kill(job, roles[0], learner, faults.signal_number(name))
    print_result(as_json, sent, lambda: view.killed(sent))
    return 0


def chaos(
    job: Annotated[
        str | None,
        argument(
            "JOB",
            "The running job's name, or the path of its socket.",
            "a job of its own",
            autocompletion=running_jobs,
        ),
    ] = None,
    time_: Annotated[
        str, option("TIME", "How long it lasts, such as 500ms, 60s or 2m.", name="--for")
    ] = "60s",
    targets: Annotated[
        str | None,
        option(
            "ROLE,...",
            "Processes to hit: server, learner, standby, watchdog, fork-server.",
            "all; in a running JOB server,learner",
        ),
    ] = None,
    every: Annotated[str, option("TIME", "Mean time between two faults.")] = "0.5s",
    signals: Annotated[str, option("NAME,...", "Signals to send: KILL or KILL,STOP.")] = "KILL",
    seed: Annotated[int | None, option(None, "Seed for the choice of victims.", "random")] = None,
    learners: Annotated[
        int | None, option("N", "Learners. Only without JOB.", "2", min=1, max=64)
    ] = None,
    optimizer: Annotated[
        OptimizerName | None, option(None, "Optimizer. Only without JOB.", "sgd")
    ] = None,
    size: Annotated[
        str | None,
        option("BYTES", "Size of the weights, such as 64K, 2M or 100M. Only without JOB.", "2M"),
    ] = None,
    shards: Annotated[
        int | None, shards_option("Only without JOB.", "a quarter of the cores, from 1 to 8")
    ] = None,
    impatient: Annotated[
        bool, switch("--impatient", "Kill the server even while there is no standby.")
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Kill and stop processes at random; exit code 1 if a gradient is lost or applied twice.

    Without JOB, a job of its own counts every gradient in its weights; if there was none, the exit
    code is 1 as well. With a running JOB, the report has only times and the job's counters.
    """
    from gadei_ps.chaos import campaign
    from gadei_ps.chaos.targets import OwnJob
    from gadei_ps.commands import quantities
    from gadei_ps.job import faults
    from gadei_ps.job.faults import Role
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
            signals=[faults.signal_number(one.strip()) for one in signals.split(",")],
            seed=seed,
            own=OwnJob(**own, verbose=verbose),
            impatient=impatient,
            say=lambda line: None if as_json else print_text(line),
        ),
    )
    print_result(as_json, report, lambda: view.chaos_summary(report))
    return 1 if report["clean"] is False else 0
