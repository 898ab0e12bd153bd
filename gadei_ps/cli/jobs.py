"""Commands that start learners, and that watch, stop and tidy up jobs."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gadei_ps.cli.exits import print_json
from gadei_ps.cli.options import (
    MODELS,
    SERVED,
    Command,
    Device,
    DeviceName,
    DevicesPerLearner,
    DryRun,
    Gpus,
    JobArgument,
    Json,
    MLflow,
    OptimizerName,
    Quiet,
    TensorBoard,
    Verbose,
    WandB,
    argument,
    check_file,
    limits,
    option,
    path_option,
    print_result,
    running_jobs,
    shards_option,
    switch,
    write_file,
)
from gadei_ps.errors import ControlError, JobNotFound, UsageError
from gadei_ps.show.plain import plain, print_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gadei_ps.show.status import Rates

WATCH_INTERVAL_S = 1.0
MOST_SILENT = 3  # --watch fails after more unanswered requests in a row


def run(
    job: Annotated[
        str,
        argument(
            "JOB",
            "A running job; a job file (.toml) or a new name is served while learners run.",
            autocompletion=running_jobs,
        ),
    ],
    command: Command,
    learners: Annotated[int, option("N", "Number of learners to start.", min=1, max=256)] = 1,
    restart: Annotated[
        int | None,
        option(
            "K",
            "Restart learners that are killed by a signal, at most K times in all.",
            "until one dies early 10 times, or by a fault",
            min=0,
        ),
    ] = None,
    optimizer: Annotated[
        OptimizerName | None,
        option(
            None,
            f"Rule by which gradients change the weights. {SERVED}",
            "the job file's, the script's, or sgd",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        option(
            "RATE", f"Learning rate. {SERVED}", "the job file's, the script's, or 0.01; 1 for add"
        ),
    ] = None,
    sync: Annotated[
        str | None,
        option("MODEL", f"{SERVED} Synchronization model: {MODELS}", "the job file's, or asp"),
    ] = None,
    shards: Annotated[
        int | None,
        shards_option(SERVED, "the job file's, or a quarter of the cores, from 1 to 8"),
    ] = None,
    stop_after: Annotated[
        list[str] | None,
        option(
            "WHAT=N", f"End the job after N gradients, samples or epochs of batches(). {SERVED}"
        ),
    ] = None,
    join: Annotated[
        bool, switch("--join", "Join a running job whose learners run another program.")
    ] = False,
    fresh: Annotated[
        bool,
        switch(
            "--fresh", f"Start from zero: ignore memory of a dead job and checkpoints. {SERVED}"
        ),
    ] = False,
    out: Annotated[
        Path | None,
        path_option(
            "FILE", "File for the weights at the end: .safetensors, .npz or .pt (needs PyTorch)."
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        path_option("DIR", "Directory for the learners' output: a file learner-N.log of each."),
    ] = None,
    device: Device = DeviceName.AUTO,
    gpus: Gpus = None,
    devices_per_learner: DevicesPerLearner = None,
    tensorboard: TensorBoard = None,
    mlflow: MLflow = None,
    wandb: WandB = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Start learners and wait until they end: gadei-ps run demo -- python my_train.py

    If no job of this name is running, it is served until the learners end. If they fail, the job
    stays in memory, and the same command continues it. Ctrl-C is passed on to the learners, which
    have 30 s to save what they want to; pressed again, it ends them at once.
    """
    from gadei_ps.commands import early

    given = {
        "optimizer": optimizer and optimizer.value,
        "lr": lr,
        "sync": sync,
        "shards": shards,
        "stop_after": stop_after and limits(stop_after),
        "tensorboard": tensorboard,
        "mlflow": mlflow,
        "wandb": wandb,
    }
    with early.for_job(job) as child:
        from gadei_ps.commands.run import RunOptions, run_learners
        from gadei_ps.show import view

        options = RunOptions(
            learners=learners,
            restart=restart,
            overrides={name: value for name, value in given.items() if value is not None},
            device=device.value,
            gpus=gpus,
            devices_per_learner=devices_per_learner,
            join=join,
            fresh=fresh,
            reads=True,
            out=out,
            log_dir=log_dir,
            stdout=2 if as_json else None,
            quiet=quiet,
            verbose=verbose,
        )
        summary = run_learners(job, command, options, child)
    if as_json:
        print_json(summary)
    else:
        print_text(f"gadei-ps: {view.ran(summary)}")
    if kept := view.kept(summary):
        print_text(f"gadei-ps: {kept}")
    return int(summary["exit_code"])


def attach(
    job: JobArgument,
    command: Command,
    device: Device = DeviceName.AUTO,
    gpus: Gpus = None,
    devices_per_learner: DevicesPerLearner = None,
    as_json: Json = False,
) -> int:
    """Add one learner to a running job: gadei-ps attach demo -- python my_train.py

    If there are several GPUs, the learner gets one that the fewest learners of the job use.
    """
    from gadei_ps.commands.run import RunOptions, attach_and_wait, become_learner

    options = RunOptions(
        restart=0, device=device.value, gpus=gpus, devices_per_learner=devices_per_learner, stdout=2
    )
    if not as_json:
        become_learner(job, command, options)
    summary = attach_and_wait(job, command, options)
    print_json(summary)
    return int(summary["exit_code"])


def status(
    job: Annotated[
        str | None,
        argument(
            "JOB",
            "The job's name, or the path of its socket.",
            "all jobs",
            autocompletion=running_jobs,
        ),
    ] = None,
    watch: Annotated[bool, switch("--watch", "Refresh every second until Ctrl-C.")] = False,
    svg: Annotated[
        Path | None, path_option("FILE.svg", "Write a picture of the status to this file.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what a job is doing, or all jobs."""
    from gadei_ps.commands import jobs
    from gadei_ps.show.status import job_status, statuses

    given = {"--watch": watch, "--svg": svg is not None, "--json": as_json}
    if sum(given.values()) > 1:
        names = ", ".join(name for name, there in given.items() if there)
        raise UsageError(f"give only one of {names}")
    if watch:
        _watch(job)
    elif svg is not None:
        _draw(job, svg)
    elif job is None:
        found = jobs.statuses()
        print_result(as_json, {"jobs": found}, lambda: statuses(found))
        _tell_where(not found, as_json)
    else:
        report = jobs.status(job)
        print_result(as_json, report, lambda: job_status(report))
    return 0


def _draw(job: str | None, file: Path) -> None:
    """Write the picture of a job, or of all jobs; the file appears only when it is complete."""
    from gadei_ps.show import picture
    from gadei_ps.show.status import RATE_S, Rates

    check_file("--svg", file, ".svg")
    rates = Rates()
    shown = _look(job, rates)
    if job is not None:
        time.sleep(RATE_S)
        shown = _look(job, rates)
    write_file("--svg", file, picture.svg(shown, f"gadei-ps status {job or ''}".rstrip()))
    print_text(f"wrote {file}", sys.stdout)


def _look(job: str | None, rates: Rates) -> RenderableType:
    """Return the display of a job, or of all jobs, as it is now."""
    from gadei_ps.commands import jobs
    from gadei_ps.show.status import job_status, statuses

    if job is None:
        return statuses(jobs.statuses())
    report = jobs.status(job)
    return job_status(report, rates.update(report["learners"]))


def _watch(job: str | None) -> None:
    """Show the status every second until Ctrl-C, or until the given job has ended."""
    from rich.live import Live

    from gadei_ps.show import tables
    from gadei_ps.show.status import Rates

    console = tables.console()
    rates = Rates()
    seen, silent = False, 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                shown = tables.Escaped(_look(job, rates))
            except JobNotFound:
                if not seen:
                    raise
                break
            except ControlError:  # it may be ending
                silent += 1
                if not seen or silent > MOST_SILENT:
                    raise
                continue
            seen, silent = True, 0
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
                sys.stdout.flush()
            time.sleep(WATCH_INTERVAL_S)
    print_text(f"job {job} has ended", sys.stdout)


def stop(
    job: JobArgument,
    drain: Annotated[
        bool, switch("--drain", "Let learners finish the batches they have begun.")
    ] = False,
    timeout: Annotated[
        float, option("S", "With --drain: seconds that learners have.", min=0.1, max=3600)
    ] = 30.0,
    discard: Annotated[
        bool,
        switch(
            "--discard",
            "If the job has lost its watchdog, or a checkpoint is newer than its memory: stop "
            "it although gradients since the last checkpoint are lost.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Stop a job and wait until it is gone."""
    from gadei_ps.commands import jobs
    from gadei_ps.show import view

    report = jobs.stop(job, drain=drain, timeout_s=timeout, discard=discard)
    print_result(as_json, report, lambda: view.stopped(report))
    return 0


def list_jobs(as_json: Json = False) -> int:
    """List running jobs and the remains of dead ones."""
    from gadei_ps.commands import jobs
    from gadei_ps.show import view

    found = [asdict(one) for one in jobs.jobs()]
    print_result(as_json, {"jobs": found}, lambda: view.jobs(found))
    _tell_where(not found, as_json)
    return 0


def _tell_where(nothing: bool, as_json: bool) -> None:
    """Print where jobs were looked for if none was found, and how to list those elsewhere."""
    if not nothing:
        return
    from gadei_ps.job import paths
    from gadei_ps.job.diagnosis import jobs_elsewhere

    if not as_json:
        name = paths.user(paths.owner())
        print_text(f"gadei-ps: looked in {paths.directory()}, for user {name}")
    for line in jobs_elsewhere():
        print_text(f"gadei-ps: {plain(line)}")


def gc(
    names: Annotated[list[str] | None, argument("JOB", "Names of jobs.", "all dead jobs")] = None,
    dry_run: DryRun = False,
    history_days: Annotated[
        float, option("D", "Also remove histories of ended jobs that are older than D days.", min=0)
    ] = 30,
    as_json: Json = False,
) -> int:
    """Remove segments, sockets and locks of dead jobs, and old histories.

    Memory from which gadei-ps serve could continue is removed only if its job is named. Histories
    beside checkpoints stay.
    """
    from gadei_ps.commands import jobs
    from gadei_ps.show import view

    left = jobs.collect(names, dry_run=dry_run)
    left += jobs.old_histories(names, history_days, dry_run=dry_run)
    result = {
        "dry_run": dry_run,
        "removed": [asdict(one) for one in left],
        "bytes": sum(one.bytes for one in left),
    }
    print_result(as_json, result, lambda: view.removed(result))
    for why in jobs.foreign(names):
        print_text(f"gadei-ps: left alone: {plain(why)}")
    for why in jobs.left_alone(jobs.kept() if names is None else names, left):
        print_text(f"gadei-ps: {plain(why)}")
    _tell_where(not left and not names, as_json)
    return 0
