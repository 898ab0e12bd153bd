"""The command line: what may be asked for.

A command returns its exit code, prints its result on stdout and all else on stderr; with --json the
result is one JSON object. What goes wrong is raised; outcome.py tells it. Modules that take long to
import are imported by the commands that need them, so that --help and completion are quick.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import gadei_ps
from gadei_ps.cli import outcome
from gadei_ps.cli import runtime_model as cli_runtime_model
from gadei_ps.cli import simulate as cli_simulate
from gadei_ps.cli import sync as cli_sync
from gadei_ps.cli.outcome import print_json
from gadei_ps.errors import ControlError, JobFailed, JobNotFound, UsageError
from gadei_ps.machine.launch import DEVICE_VARIABLE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gadei_ps.classifier.predict import Prediction
    from gadei_ps.job.config import JobConfig
    from gadei_ps.watchdog.supervisor import Options

WATCH_S = 1.0
MOST_SILENT = 3  # questions without an answer before --watch gives up

app = typer.Typer(
    name="gadei-ps",
    help="A parameter server for one machine.",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class OptimizerName(StrEnum):
    """As in a job file's [optimizer] kind."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    NESTEROV = "nesterov"
    ADAGRAD = "adagrad"
    ADAM = "adam"
    ADAMW = "adamw"


class Wire(StrEnum):
    """How gradients travel."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceName(StrEnum):
    """What learners compute on."""

    AUTO = "auto"
    CUDA = "cuda"
    HOST = "host"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name or socket of a job.")]
Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND", help="After --: program and arguments.")
]
Sync = Annotated[
    str | None,
    typer.Option("--sync", metavar="MODEL", help=cli_sync.MODELS),
]
Device = Annotated[
    DeviceName,
    typer.Option(
        "--device",
        envvar=DEVICE_VARIABLE,
        help="What learners compute on; auto: CUDA where it can be used, else the host.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="K,...",
        help="GPUs that learners get in turn, one each; without it all. Numbers of nvidia-smi, "
        "UUIDs of parts (MIG), or places in CUDA_VISIBLE_DEVICES where that is set.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the log of the job's daemon.")]


def _tell(as_json: bool, result: Mapping[str, Any], shown: Callable[[], RenderableType]) -> None:
    """Prints the result of a command, for programs or for people."""
    if as_json:
        print_json(result)
        return
    from gadei_ps.show import view

    view.show(shown())


# -- training as a service ------------------------------------------------------------------------


@app.command()
def train(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.csv", help="Labelled sentences, UTF-8, with a header.")
    ],
    test: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Measure the model on these at the end.")
    ] = None,
    learners: Annotated[int, typer.Option(metavar="N", help="Learner processes.")] = 2,
    epochs: Annotated[
        int | None, typer.Option(metavar="E", help="At most so many passes. [default: 200]")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="B", help="Mini-batch. [default: 2, 4 or 32 by rows]")
    ] = None,
    optimizer: Annotated[
        OptimizerName, typer.Option(help="What moves the weights.")
    ] = OptimizerName.ADAGRAD,
    lr: Annotated[
        float | None, typer.Option(metavar="RATE", help="Learning rate. [default: 0.01]")
    ] = None,
    sync: Sync = "asp",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the model goes.")] = Path("model"),
    patience: Annotated[
        int, typer.Option(metavar="E", help="Stop after so many epochs without improvement.")
    ] = 5,
    dropout: Annotated[float, typer.Option(metavar="P", help="Share of units dropped.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the hold-out, the weights and the order.")] = 0,
    wire: Annotated[Wire, typer.Option(help="Number format of gradients.")] = Wire.FLOAT32,
    error_feedback: Annotated[
        bool, typer.Option("--error-feedback", help="Add what 16 bits lose to the next gradient.")
    ] = False,
    device: Device = DeviceName.AUTO,
    gpus: Gpus = None,
    text_column: Annotated[str, typer.Option(metavar="NAME", help="Column of the texts.")] = "text",
    label_column: Annotated[
        str, typer.Option(metavar="NAME", help="Column of the labels.")
    ] = "label",
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the job. [default: train-PID]")
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Train a sentence classifier from a CSV file; the model directory is for predict."""
    _need_torch("train")
    from gadei_ps.classifier.train import Settings
    from gadei_ps.classifier.train import train as run_training
    from gadei_ps.show import view

    settings = Settings(
        train_file=file,
        test_file=test,
        learners=learners,
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer.value,
        lr=lr,
        sync=sync or "asp",
        patience=patience,
        dropout=dropout,
        seed=seed,
        wire=wire.value,
        error_feedback=error_feedback,
        device=device.value,
        gpus=gpus,
        out=out,
        text_column=text_column,
        label_column=label_column,
        job=job,
        verbose=verbose,
    )
    summary = run_training(settings, display_silent=as_json)
    _tell(as_json, summary, lambda: view.trained(summary, str(test)))
    return 0


@app.command()
def predict(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A model directory that train has made.")
    ],
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Sentences; without any, lines of stdin."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Add label and probability to its rows.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Where --csv writes. [default: stdout]")
    ] = None,
    text_column: Annotated[
        str, typer.Option(metavar="NAME", help="Column of --csv with the texts.")
    ] = "text",
    as_json: Json = False,
) -> int:
    """Label sentences: from the arguments, from standard input, or from a CSV file."""
    if csv is not None and texts:
        raise UsageError("give sentences or --csv, not both")
    if out is not None and csv is None:
        raise UsageError("--out goes with --csv")
    _need_torch("predict")
    from gadei_ps.classifier import dataset

    # Read first: a mistake in the file is told before the model is loaded.
    table = None if csv is None else dataset.read_table(csv, text_column)
    from gadei_ps.classifier.predict import Predictor, sentences, write_csv

    predictor = Predictor(directory)
    if table is not None:
        found = predictor.predict(table.texts)
        if out is not None or not as_json:
            write_csv(table, found, out)
        if out is not None and not as_json:
            print(f"{len(found):,} sentences labelled: {out}")
    elif texts:
        found = predictor.predict(texts)
    else:
        typed = sys.stdin.isatty()
        if typed:
            print("one sentence a line; end with Ctrl-D", file=sys.stderr)
        stream = predictor.stream(sentences(sys.stdin.buffer), *([1] if typed else []))
        found = []
        for one in stream:
            found.append(one)
            if not as_json:
                _print_prediction(one)
    if as_json:
        print_json(
            {
                "model_dir": str(directory),
                "csv": None if out is None else str(out),
                "predictions": [one._asdict() for one in found],
            }
        )
    elif texts:
        for one in found:
            _print_prediction(one)
    return 0


def _print_prediction(one: Prediction) -> None:
    """Label, probability and sentence, by tabs: for eyes and for cut."""
    print(one.label, f"{one.probability:.4f}", one.text, sep="\t", flush=sys.stdout.isatty())


def _need_torch(command: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"{command} needs PyTorch: pip install 'gadei-ps[torch]'")


# -- jobs with learners of one's own --------------------------------------------------------------


@app.command()
def serve(
    file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job's configuration.")],
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Begin anew: use neither memory left behind nor checkpoints."),
    ] = False,
    json_log: Annotated[bool, typer.Option("--json-log", help="Log in JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
    as_json: Json = False,
) -> int:
    """Serve a job in the foreground until SIGTERM, Ctrl-C or gadei-ps stop.

    A job whose watchdog was killed is adopted, with its learners; one that has died altogether goes
    on from what is left in memory, else from its newest checkpoint.
    """
    from gadei_ps.job import config
    from gadei_ps.watchdog.supervisor import Options

    options = Options(fresh=fresh, verbose=verbose, as_json=json_log)
    return _serve(config.load(file), options, as_json)


def _serve(job: JobConfig, options: Options, as_json: bool) -> int:
    from gadei_ps.machine import log
    from gadei_ps.watchdog import supervisor
    from gadei_ps.watchdog.notify import Notify

    begin = time.monotonic()
    log.set_up(as_json=options.as_json, verbose=options.verbose)
    if supervisor.serve(job, options, Notify.from_environment()):
        raise JobFailed(f"job {job.name!r} has failed; its last messages say why")
    if as_json:
        print_json({"job": job.name, "seconds": time.monotonic() - begin})
    return 0


@app.command()
def run(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="A running job, a job file (.toml), or the name of a job to serve meanwhile.",
        ),
    ],
    command: Command,
    learners: Annotated[
        int, typer.Option(metavar="N", min=1, max=256, help="Processes to start.")
    ] = 1,
    restart: Annotated[
        int,
        typer.Option(metavar="K", min=0, help="Start killed learners again, at most K times."),
    ] = 0,
    optimizer: Annotated[
        OptimizerName | None, typer.Option(help="For a job that is not running yet.")
    ] = None,
    lr: Annotated[float | None, typer.Option(metavar="RATE", help="Likewise.")] = None,
    sync: Sync = None,
    device: Device = DeviceName.AUTO,
    gpus: Gpus = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Start learners and look after them until they end: gadei-ps run demo -- python my_train.py"""
    from gadei_ps.commands import run as running
    from gadei_ps.show import view

    given = {"optimizer": optimizer and optimizer.value, "lr": lr, "sync": sync}
    summary = running.run(
        job,
        command,
        running.Options(
            learners=learners,
            restart=restart,
            overrides={name: value for name, value in given.items() if value is not None},
            device=device.value,
            gpus=gpus,
            stdout=2 if as_json else None,
            verbose=verbose,
        ),
    )
    if as_json:
        print_json(summary)
    else:
        print(f"gadei-ps: {view.ran(summary)}", file=sys.stderr)
    return int(summary["exit_code"])


@app.command()
def attach(
    job: JobArgument,
    command: Command,
    device: Device = DeviceName.AUTO,
    gpus: Gpus = None,
    as_json: Json = False,
) -> int:
    """Become one more learner of a running job: gadei-ps attach demo -- python my_train.py

    Of several GPUs it gets one that fewest of the job's learners have.
    """
    from gadei_ps.commands import run as running

    options = running.Options(device=device.value, gpus=gpus, stdout=2)
    if not as_json:
        running.attach(job, command, options)
    summary = running.attach_and_wait(job, command, options)
    print_json(summary)
    return int(summary["exit_code"])


@app.command()
def status(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Name or socket. [default: all jobs]")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    as_json: Json = False,
) -> int:
    """Show what a job is doing, or all jobs."""
    from gadei_ps.commands import jobs
    from gadei_ps.show import view

    if watch and as_json:
        raise UsageError("give --watch or --json, not both")
    if watch:
        _watch(job)
    elif job is None:
        found = jobs.statuses()
        _tell(as_json, {"jobs": found}, lambda: view.statuses(found))
    else:
        report = jobs.status(job)
        _tell(as_json, report, lambda: view.job_status(report))
    return 0


def _watch(job: str | None) -> None:
    """Until Ctrl-C, or until the one job has ended."""
    from rich.live import Live

    from gadei_ps.commands import jobs
    from gadei_ps.show import view
    from gadei_ps.show.display import Rates

    console = view.console()
    rates = Rates()
    seen, silent = False, 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            if job is None:
                shown = view.statuses(jobs.statuses())
            else:
                try:
                    report = jobs.status(job)
                except JobNotFound:
                    if not seen:
                        raise
                    break
                except ControlError:  # it may be ending
                    silent += 1
                    if not seen or silent > MOST_SILENT:
                        raise
                    continue
                shown = view.job_status(report, rates.update(report["learners"]))
            seen, silent = True, 0
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
                sys.stdout.flush()
            time.sleep(WATCH_S)
    print(f"job {job} has ended")


@app.command()
def stop(
    job: JobArgument,
    drain: Annotated[
        bool, typer.Option("--drain", help="Let learners finish what they have in hand.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(metavar="S", min=0.1, max=3600, help="Seconds that --drain gives them."),
    ] = 30.0,
    discard: Annotated[
        bool,
        typer.Option("--discard", help="A job without a watchdog: lose what no checkpoint has."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Stop a job and wait until it is gone."""
    from gadei_ps.commands import jobs
    from gadei_ps.show import view

    report = jobs.stop(job, drain=drain, timeout_s=timeout, discard=discard)
    _tell(as_json, report, lambda: view.stopped(report))
    return 0


app.command("set")(cli_sync.set_job)
app.command("trace")(cli_sync.trace)
app.command("simulate")(cli_simulate.simulate)
app.add_typer(cli_runtime_model.app, name="runtime-model")


# -- checkpoints ----------------------------------------------------------------------------------


@app.command()
def checkpoint(job: JobArgument, as_json: Json = False) -> int:
    """Write a checkpoint of a running job now; training pauses for milliseconds."""
    from gadei_ps.commands import jobs
    from gadei_ps.show import view

    made = jobs.checkpoint(job)
    _tell(as_json, made, lambda: view.checkpointed(made))
    return 0


@app.command()
def restore(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|JOB.toml",
            help="A checkpoint, a directory of them, a job file, or the name of a job.",
        ),
    ],
    version: Annotated[
        int | None, typer.Option(metavar="N", help="Of several, that version. [default: newest]")
    ] = None,
    json_log: Annotated[bool, typer.Option("--json-log", help="Log in JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
    as_json: Json = False,
) -> int:
    """Serve a job from a checkpoint, with the configuration that it holds or the job file's.

    What a dead watchdog of the job has left in memory is dropped; a running job is stopped first by
    gadei-ps stop.
    """
    from gadei_ps.commands import saved
    from gadei_ps.watchdog.supervisor import Options

    found = saved.find(source, version)
    _warn(found.problems)
    options = Options(checkpoint=found.path, verbose=verbose, as_json=json_log)
    return _serve(found.job_config(), options, as_json)


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="JOB|CHECKPOINT",
            help="A running job, a checkpoint, a directory of them, or a job file.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Ends in .safetensors, .npz or .pt (torch).")
    ],
    version: Annotated[
        int | None, typer.Option(metavar="N", help="Of several checkpoints, that version.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Write plain weights for PyTorch or NumPy, from a running job or from a checkpoint."""
    from gadei_ps.commands import saved
    from gadei_ps.show import view

    result = saved.export(source, out, version)
    if not as_json:
        _warn(result["problems"])
    _tell(as_json, result, lambda: view.exported(result))
    return 0


def _warn(problems: Iterable[str]) -> None:
    """Checkpoints that cannot be used are named; the one before them is taken."""
    for problem in problems:
        print(f"gadei-ps: warning: {problem}", file=sys.stderr)


@app.command()
def kill(
    job: JobArgument,
    learner: Annotated[
        int | None, typer.Option(metavar="K", min=0, help="The learner that status shows as K.")
    ] = None,
    server: Annotated[bool, typer.Option("--server", help="The active server.")] = False,
    standby: Annotated[bool, typer.Option("--standby", help="The server that stands by.")] = False,
    watchdog: Annotated[bool, typer.Option("--watchdog", help="The watchdog.")] = False,
    name: Annotated[
        str, typer.Option("--signal", metavar="NAME", help="KILL, STOP, CONT, TERM, SEGV, ...")
    ] = "KILL",
    as_json: Json = False,
) -> int:
    """Send a signal to one process of a job, to see that nothing is lost."""
    from gadei_ps.job import processes as faults
    from gadei_ps.job.processes import Role
    from gadei_ps.show import view

    asked = {
        Role.LEARNER: learner is not None,
        Role.SERVER: server,
        Role.STANDBY: standby,
        Role.WATCHDOG: watchdog,
    }
    roles = [role for role, wanted in asked.items() if wanted]
    if len(roles) != 1:
        raise UsageError("whom? give one of --learner K, --server, --standby and --watchdog")
    sent = faults.kill(job, roles[0], learner, faults.signal_number(name))
    _tell(as_json, sent, lambda: view.killed(sent))
    return 0


@app.command()
def chaos(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Name or socket. [default: a job of its own]"),
    ] = None,
    time_: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long: 500ms, 60s, 2m.")
    ] = "60s",
    targets: Annotated[
        str | None,
        typer.Option(
            metavar="WHO,...",
            help="Of server, learner, standby, watchdog. "
            "[default: all; of a running JOB server,learner]",
        ),
    ] = None,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="Mean time from one fault to the next.")
    ] = "0.5s",
    signals: Annotated[str, typer.Option(metavar="NAME,...", help="KILL, or KILL,STOP.")] = "KILL",
    seed: Annotated[int | None, typer.Option(help="Of the choice of victims.")] = None,
    learners: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=64, help="Of a job of its own. [default: 2]"),
    ] = None,
    optimizer: Annotated[
        OptimizerName | None, typer.Option(help="Likewise. [default: sgd]")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="Likewise, of the weights: 64K, 2M, 100M. [default: 2M]"
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=64, help="Likewise, threads. [default: by cores]"),
    ] = None,
    impatient: Annotated[
        bool, typer.Option("--impatient", help="Kill the server also while none stands by.")
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Kill and stop processes at random; exit code 1 if a gradient is lost or applied twice.

    In a job of its own every gradient is counted in the weights. In a running JOB, whose weights
    are its own business, only times and counters are told.
    """
    from gadei_ps.chaos import campaign as raging
    from gadei_ps.chaos.victims import OwnJob
    from gadei_ps.commands import quantities
    from gadei_ps.job import processes as faults
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
            raise UsageError(f"--targets: there is no {name!r}; name some of {', '.join(Role)}")
    report = raging.run(
        job,
        raging.Options(
            seconds=quantities.duration(time_),
            targets=[Role(name) for name in names],
            every_s=quantities.duration(every),
            signals=[faults.signal_number(one.strip()) for one in signals.split(",")],
            seed=seed,
            own=OwnJob(**own, verbose=verbose),
            impatient=impatient,
            say=lambda line: None if as_json else print(line, file=sys.stderr, flush=True),
        ),
    )
    _tell(as_json, report, lambda: view.raged(report))
    return 1 if report["clean"] is False else 0


@app.command(name="ls")
def list_jobs(as_json: Json = False) -> int:
    """List jobs, and what dead ones have left."""
    from dataclasses import asdict

    from gadei_ps.commands import jobs
    from gadei_ps.show import view

    found = [asdict(one) for one in jobs.jobs()]
    _tell(as_json, {"jobs": found}, lambda: view.jobs(found))
    return 0


@app.command()
def gc(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB]...", help="[default: all jobs]")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would do.")] = False,
    as_json: Json = False,
) -> int:
    """Remove segments, sockets and locks that dead jobs have left.

    What serve would go on with from memory is removed only if its job is named.
    """
    from gadei_ps.commands import jobs
    from gadei_ps.show import view

    left = jobs.collect(names or (), dry_run=dry_run)
    result = {
        "dry_run": dry_run,
        "removed": [one.as_dict() for one in left],
        "bytes": sum(one.bytes for one in left),
    }
    _tell(as_json, result, lambda: view.removed(result))
    return 0


@app.command()
def doctor(as_json: Json = False) -> int:
    """Check this machine; exit code 1 if jobs cannot run here."""
    from gadei_ps.commands.doctor import Level, examine
    from gadei_ps.show import view

    checks = examine()
    healthy = all(check.level != Level.ERROR for check in checks)
    rows = [check.as_dict() for check in checks]
    _tell(as_json, {"ok": healthy, "checks": rows}, lambda: view.checks(rows))
    return 0 if healthy else 1


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="[default: list them]")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small and short: whether it runs, not how fast.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write DIR/NAME.json for each.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Measure this project beside its peers on this machine."""
    from gadei_ps.benchmarks import suite

    if not names:
        if as_json:
            print_json({"benchmarks": suite.BENCHMARKS})
        else:
            print(suite.listed())
        return 0
    suite.check(names)
    if out is not None:
        suite.prepare(out)
    results = []
    for name in names:
        result, shown = suite.run(name, quick=quick)
        results.append(result)
        if out is not None:
            suite.write(result, out)
        if not as_json:
            print(f"== {name}\n{shown}", flush=True)
    if as_json:
        print_json(results[0] if len(results) == 1 else {"results": results})
    return 0


@app.command()
def install_unit(
    user: Annotated[
        bool, typer.Option("--user", help="For your own jobs: the default, but for root.")
    ] = False,
    system: Annotated[
        bool, typer.Option("--system", help="For jobs of the machine: the default for root.")
    ] = False,
    run_as: Annotated[
        str | None,
        typer.Option(metavar="USER", help="User of --system's jobs, instead of gadei-ps."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a unit that is there and differs.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--print", help="Print the unit and write nothing.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Write the systemd unit gadei-ps@.service, and say how to start jobs with it."""
    from gadei_ps.commands import systemd as unit

    if user and system:
        raise UsageError("give --user or --system, not both")
    scope = unit.Scope.USER if user or (os.geteuid() and not system) else unit.Scope.SYSTEM
    done = unit.install(scope, user=run_as, force=force, dry_run=dry_run)
    if as_json:
        print_json(done.as_dict())
    elif dry_run:
        print(done.text, end="")
    else:
        print(f"{'wrote' if done.written else 'is up to date:'} {done.path}")
        print("\nnext, for a job named demo:\n")
        for line in done.next:
            print(f"  {line}")
    return 0


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
