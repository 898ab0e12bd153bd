"""Commands for research: simulations, run times of learners, and a model of them."""

from __future__ import annotations

import importlib.util
import math
import shlex
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gadei_ps.cli.options import (
    Json,
    argument,
    option,
    path_argument,
    path_option,
    print_result,
    running_jobs,
)
from gadei_ps.cli.switches import App
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import print_text

if TYPE_CHECKING:
    from rich.table import Table

    from gadei_ps.run_times.fitting import Progress, TrainingResult
    from gadei_ps.simulate.setting import Abandonment


ITERATIONS = 100
LEARNERS = 8
EPOCH_LINE_S = 5.0  # at most one line of progress in this time
DEFAULT_OUT = Path("runtime-model.safetensors")
DEFAULT_EPOCHS = 30  # run_times.training.EPOCHS, whose module imports PyTorch


class ProblemName(StrEnum):
    """Names in gadei_ps.simulate.problems.PROBLEMS."""

    CONVEX = "convex"
    NETWORK = "network"


def simulate(
    models: Annotated[
        list[str],
        argument("MODEL", "Models to compare, such as bsp, asp, ssp:3, elastic-bsp, cutoff:6."),
    ],
    learners: Annotated[
        int | None, option("N", "Number of learners, 2 to 100000.", "8, or those of the trace")
    ] = None,
    iterations: Annotated[
        int | None,
        option(
            "I",
            "End when the learners have done I times N iterations in all.",
            "100, unless --gradients or --time is given",
        ),
    ] = None,
    gradients: Annotated[int | None, option("G", "End when G gradients are applied.")] = None,
    time_: Annotated[
        str | None,
        option("TIME", "End at this virtual time, such as 60s, 2m or 1h.", name="--time"),
    ] = None,
    times: Annotated[
        str,
        option(
            "SPEC",
            "Run times of iterations: normal:mean=1,std=0.2, lognormal:..., heavy:..., "
            "groups:... (slow together), switch:slow=40,..., speeds:1,1.5,2,4, or a trace, "
            "FILE.csv.",
        ),
    ] = "normal:mean=1,std=0.2",
    seed: Annotated[int, option(None, "Seed for everything that is drawn at random.", min=0)] = 0,
    server_time: Annotated[
        str | None, option("TIME", "Time that the server needs for a gradient.", "none")
    ] = None,
    slots: Annotated[int, option("S", "Gradients that the ring of a learner holds.")] = 2,
    give_up_after: Annotated[
        str,
        option(
            "TIME",
            "When a straggler abandons its iteration: this long after the cutoff, after a "
            "share of its run time (such as 10%), or never.",
        ),
    ] = "0",
    deaths: Annotated[float, option("P", "Probability that a learner dies in an iteration.")] = 0.0,
    die: Annotated[
        list[str] | None, option("K@TIME", "Learner K dies at this time; may be repeated.")
    ] = None,
    join: Annotated[
        list[str] | None, option("K@TIME", "Learner K joins at this time; may be repeated.")
    ] = None,
    return_after: Annotated[
        str | None, option("TIME", "Time after which a dead learner is replaced.", "never")
    ] = None,
    loss: Annotated[
        ProblemName | None, option(None, "Also train this problem, and show its loss against time.")
    ] = None,
    batch: Annotated[int, option("B", "With --loss: samples in a mini-batch.", min=1)] = 32,
    lr: Annotated[
        float | None,
        option(
            "RATE",
            "With --loss: learning rate for models that apply means of gradients.",
            "by problem",
        ),
    ] = None,
    lr_on_arrival: Annotated[
        float | None,
        option(
            "RATE",
            "With --loss: learning rate for models that apply single gradients.",
            "--lr divided by N",
        ),
    ] = None,
    plot: Annotated[
        Path | None, path_option("FILE.svg", "Write a plot to this file; needs matplotlib.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare synchronization models in virtual time, all with the same run times."""
    from gadei_ps.commands import quantities
    from gadei_ps.simulate import compare, report, run_times
    from gadei_ps.simulate.descent import Learning
    from gadei_ps.simulate.setting import MOST_LEARNERS, Faults, Setting

    drawn = run_times.parse(times, seed)
    if learners is None:
        learners = drawn.learners or LEARNERS
    if learners < 2:
        raise UsageError(f"--learners must be from 2 to {MOST_LEARNERS:,}, not {learners}")
    for name, rate in (("--lr", lr), ("--lr-on-arrival", lr_on_arrival)):
        if rate is not None and not 0 < rate < math.inf:
            raise UsageError(f"{name} must be above 0, not {rate:g}")
    if loss is None and (lr is not None or lr_on_arrival is not None):
        raise UsageError("--lr and --lr-on-arrival need --loss")
    if iterations is None and gradients is None and time_ is None:
        iterations = ITERATIONS
    setting = Setting(
        learners=learners,
        times=drawn,
        seed=seed,
        iterations=iterations,
        gradients=gradients,
        seconds=None if time_ is None else quantities.duration(time_),
        server_s=0.0 if server_time is None else quantities.duration(server_time),
        slots=slots,
        give_up=_give_up(give_up_after),
        faults=Faults(
            deaths=deaths,
            die=tuple(_moment("--die", one) for one in die or ()),
            join=tuple(_moment("--join", one) for one in join or ()),
            return_s=None if return_after is None else quantities.duration(return_after),
        ),
    )
    if plot is not None:
        report.check_plot(plot)
    learning = None
    if loss is not None:
        problem = compare.problem(loss.value, seed)
        learning = Learning(problem, batch, lr, lr_on_arrival)
    results = compare.compare(models, setting, learning, lambda line: print_text(line))
    asked = {"learners": learners, "times": times, "seed": seed, "iterations": iterations}
    asked |= {"gradients": gradients, "time_s": setting.seconds, "server_s": setting.server_s}
    asked |= {"slots": slots, "give_up_after": give_up_after, "deaths": deaths}
    asked |= {"return_s": setting.faults.return_s, "die": die or [], "join": join or []}
    asked |= {"loss": None if loss is None else loss.value}
    result = asked | results
    if plot is not None:
        report.plot(result, plot)
    print_result(as_json, result, lambda: report.render(result))
    return 0


def _give_up(text: str) -> Abandonment:
    """Parse `never`, `0`, `50ms` or `10%`. Raises UsageError."""
    from gadei_ps.commands import quantities
    from gadei_ps.simulate.setting import Abandonment

    word = text.strip()
    if word == "never":
        return Abandonment(None)
    if word in ("0", "0s"):
        return Abandonment()
    if word.endswith("%"):
        try:
            share = float(word[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise UsageError(f"--give-up-after {text!r}: a share must be from 0% to 100%")
        return Abandonment(0.0, share)
    return Abandonment(quantities.duration(word))


def _moment(option: str, text: str) -> tuple[int, float]:
    """Parse `3@12.5`: a learner and seconds. Raises UsageError."""
    from gadei_ps.commands import quantities

    learner, at, moment = text.partition("@")
    if not at or not (learner.isascii() and learner.isdigit() and len(learner) < 10):
        raise UsageError(f"{option} {text!r}: write learner and time like 3@12.5")
    try:
        return int(learner), quantities.duration(moment)
    except UsageError as error:
        raise UsageError(f"{option} {text!r}: {error}") from None


def trace(
    job: Annotated[str, argument("JOB", "The job's name.", autocompletion=running_jobs)],
    out: Annotated[
        Path | None, path_option("FILE.csv", "File for the run times.", "JOB-trace.csv")
    ] = None,
    time_: Annotated[
        str | None,
        option(
            "TIME",
            "How long to record, such as 500ms, 60s or 2m.",
            "until the job ends",
            name="--for",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Record the run times of a job's learners, for simulate and runtime-model train.

    The recording ends with the job, after --for, or at Ctrl-C.
    """
    from gadei_ps.commands import quantities
    from gadei_ps.job import paths
    from gadei_ps.run_times import run_time_recorder
    from gadei_ps.show.counts import counted

    seconds = None if time_ is None else quantities.duration(time_)
    result = run_time_recorder.record(job, out or Path(f"{job}-trace.csv"), seconds, paths.owner())
    missed = f", {result['missed']:,} missed" if result["missed"] else ""
    shown = (
        f"{result['file']}: {counted(result['run_times'], 'run time')} of "
        f"{counted(result['learners'], 'learner')} in {result['seconds']:.1f} s{missed}"
    )
    print_result(as_json, result, lambda: shown)
    return 0


# -- runtime-model --------------------------------------------------------------------------------

HELP = "Train the model of learners' run times that --sync cutoff:file=FILE uses."
runtime_model = App(help=HELP)


@runtime_model.callback(help=HELP)
def _group() -> None:
    """Keep `train` a word of the command line: typer leaves out the name of a single command."""


@runtime_model.command("train")
def train_runtime_model(
    trace: Annotated[
        Path, path_argument("TRACE", "Run times that gadei-ps trace has recorded (CSV).")
    ],
    out: Annotated[Path, path_option("FILE", "File that the model is written to.")] = DEFAULT_OUT,
    epochs: Annotated[
        int, option("N", "Number of epochs, each of 40 mini-batches.", min=1)
    ] = DEFAULT_EPOCHS,
    seed: Annotated[
        int, option("N", "Seed for the first weights and the mini-batches.", min=0)
    ] = 0,
    as_json: Json = False,
) -> int:
    """Train a model of run times from a trace.

    A few hundred iterations are enough. A trace in which no gradient was dropped gives the best
    model.
    """
    from gadei_ps.run_times import traces

    # The file is read first, so that a mistake in it is reported before PyTorch is needed.
    read = traces.read(trace)
    if importlib.util.find_spec("torch") is None:
        raise UsageError("runtime-model train needs PyTorch: pip install 'gadei-ps[torch]'")
    from gadei_ps.run_times import fitting

    result = fitting.train(
        read, out=out, epochs=epochs, seed=seed, progress=None if as_json else _progress()
    )
    print_result(as_json, asdict(result), lambda: _shown(result))
    return 0


def _progress() -> Progress:
    """Print the progress of training on standard error, every few seconds."""
    last = time.monotonic()

    def show(epoch: int, epochs: int, held_out: float) -> None:
        nonlocal last
        if time.monotonic() - last >= EPOCH_LINE_S:
            last = time.monotonic()
            text = f"epoch {epoch} of {epochs}, held-out ELBO {held_out:.3f} nats a run time"
            print_text(text)

    return show


def _shown(result: TrainingResult) -> Table:
    from gadei_ps.show.counts import counted
    from gadei_ps.show.tables import duration, facts

    trace = f"{counted(result.iterations, 'iteration')} of {counted(result.learners, 'learner')}"
    if result.missing:
        trace += f", {counted(result.missing, 'run time')} missing"
    if result.censored:
        trace += f", {result.censored:,} known as lower bounds"
    return facts(
        {
            "trace": trace,
            "held-out ELBO": (
                f"{result.held_out_elbo:.3f} nats a run time "
                f"(epoch {result.best_epoch} of {result.epochs})"
            ),
            "time": duration(result.seconds),
            "model": result.out,
            "use": f"gadei-ps run ... --sync {shlex.quote(f'cutoff:file={result.out}')}",
        }
    )
