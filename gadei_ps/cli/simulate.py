"""The command `gadei-ps simulate`."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gadei_ps.cli.outcome import print_json
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import say

if TYPE_CHECKING:
    from gadei_ps.simulate.setting import GiveUp

ITERATIONS = 100
LEARNERS = 8


class ProblemName(StrEnum):
    """Names in gadei_ps.simulate.problems.PROBLEMS."""

    CONVEX = "convex"
    NETWORK = "network"


def simulate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Models to compare, such as bsp, asp, ssp:3, elastic-bsp, cutoff:6.",
        ),
    ],
    learners: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of learners, 2 to 100000.",
            show_default="8, or those of the trace",
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="I",
            help="End when the learners have done I times N iterations in all.",
            show_default="100, unless --gradients or --time is given",
        ),
    ] = None,
    gradients: Annotated[
        int | None, typer.Option(metavar="G", help="End when G gradients are applied.")
    ] = None,
    time_: Annotated[
        str | None,
        typer.Option(
            "--time", metavar="TIME", help="End at this virtual time, such as 60s, 2m or 1h."
        ),
    ] = None,
    times: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="Run times of iterations: normal:mean=1,std=0.2, lognormal:..., heavy:..., "
            "groups:... (slow together), switch:slow=40,..., speeds:1,1.5,2,4, or a trace, "
            "FILE.csv.",
        ),
    ] = "normal:mean=1,std=0.2",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed for everything that is drawn at random.")
    ] = 0,
    server_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time that the server needs for a gradient.",
            show_default="none",
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(metavar="S", help="Gradients that the ring of a learner holds.")
    ] = 2,
    give_up_after: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="When a straggler abandons its iteration: this long after the cutoff, after a "
            "share of its run time (such as 10%), or never.",
        ),
    ] = "0",
    deaths: Annotated[
        float, typer.Option(metavar="P", help="Probability that a learner dies in an iteration.")
    ] = 0.0,
    die: Annotated[
        list[str] | None,
        typer.Option(metavar="K@TIME", help="Learner K dies at this time; may be repeated."),
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(metavar="K@TIME", help="Learner K joins at this time; may be repeated."),
    ] = None,
    return_after: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time after which a dead learner is replaced.",
            show_default="never",
        ),
    ] = None,
    loss: Annotated[
        ProblemName | None,
        typer.Option(help="Also train this problem, and show its loss against time."),
    ] = None,
    batch: Annotated[
        int, typer.Option(metavar="B", min=1, help="With --loss: samples in a mini-batch.")
    ] = 32,
    lr: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="With --loss: learning rate for models that apply means of gradients.",
            show_default="by problem",
        ),
    ] = None,
    lr_on_arrival: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="With --loss: learning rate for models that apply single gradients.",
            show_default="--lr divided by N",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Write a plot to this file; needs matplotlib."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> int:
    """Compare synchronization models in virtual time, all with the same run times."""
    from gadei_ps.commands import quantities
    from gadei_ps.show import tables
    from gadei_ps.simulate import compare, report, run_times
    from gadei_ps.simulate.setting import MOST_LEARNERS, Faults, Setting

    if plot is not None:
        report.check_plot(plot)
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
            die=tuple(moment("--die", one) for one in die or ()),
            join=tuple(moment("--join", one) for one in join or ()),
            return_s=None if return_after is None else quantities.duration(return_after),
        ),
    )
    learning = None
    if loss is not None:
        problem = compare.problem(loss.value, seed)
        learning = compare.Learning(problem, batch, lr, lr_on_arrival)
    told = compare.compare(models, setting, learning, lambda line: say(line))
    asked = {"learners": learners, "times": times, "seed": seed, "iterations": iterations}
    asked |= {"gradients": gradients, "time_s": setting.seconds, "server_s": setting.server_s}
    asked |= {"slots": slots, "give_up_after": give_up_after, "deaths": deaths}
    asked |= {"return_s": setting.faults.return_s, "die": die or [], "join": join or []}
    asked |= {"loss": None if loss is None else loss.value}
    result = asked | told
    if plot is not None:
        report.plot(result, plot)
    if as_json:
        print_json(result)
    else:
        tables.show(report.shown(result))
    return 0


def _give_up(text: str) -> GiveUp:
    """Parse `never`, `0`, `50ms` or `10%`. Raises UsageError."""
    from gadei_ps.commands import quantities
    from gadei_ps.simulate.setting import GiveUp

    word = text.strip()
    if word == "never":
        return GiveUp(None)
    if word in ("0", "0s"):
        return GiveUp()
    if word.endswith("%"):
        try:
            share = float(word[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise UsageError(f"--give-up-after {text!r}: a share must be from 0% to 100%")
        return GiveUp(0.0, share)
    return GiveUp(quantities.duration(word))


def moment(option: str, text: str, who: str = "learner") -> tuple[int, float]:
    """Parse `3@12.5`: a learner, or another `who`, and seconds. Raises UsageError."""
    from gadei_ps.commands import quantities

    learner, at, moment = text.partition("@")
    if not at or not (learner.isascii() and learner.isdigit() and len(learner) < 10):
        raise UsageError(f"{option} {text!r}: write {who} and time like 3@12.5")
    try:
        return int(learner), quantities.duration(moment)
    except UsageError as error:
        raise UsageError(f"{option} {text!r}: {error}") from None
