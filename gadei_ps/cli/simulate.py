"""The command `gadei-ps simulate`."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gadei_ps.cli.exits import print_json
from gadei_ps.cli.options import Json, argument, option
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import print_text

if TYPE_CHECKING:
    from gadei_ps.simulate.setting import Abandonment

ITERATIONS = 100
LEARNERS = 8


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
        Path | None, option("FILE.svg", "Write a plot to this file; needs matplotlib.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare synchronization models in virtual time, all with the same run times."""
    from gadei_ps.commands import quantities
    from gadei_ps.show import tables
    from gadei_ps.simulate import compare, report, run_times
    from gadei_ps.simulate.descent import Learning
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
        learning = Learning(problem, batch, lr, lr_on_arrival)
    told = compare.compare(models, setting, learning, lambda line: print_text(line))
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
        tables.show(report.render(result))
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
