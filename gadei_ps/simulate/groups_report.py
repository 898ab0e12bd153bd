"""Runs several rules on the same replicas, and the tables of `gadei-ps group simulate`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gadei_ps.errors import UsageError
from gadei_ps.groups import reading
from gadei_ps.groups.rules import Rule
from gadei_ps.show import tables
from gadei_ps.simulate.groups import GroupSimulator, first_members
from gadei_ps.simulate.groups_outcome import GroupOutcome
from gadei_ps.simulate.groups_setting import GroupSetting
from gadei_ps.simulate.groups_training import GroupTraining
from gadei_ps.simulate.problems import Problem
from gadei_ps.sync.parameters import SpecError

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Learning:
    """Problem that the replicas train, and the learning rate."""

    problem: Problem
    lr: float


def rule(text: str) -> Rule:
    """A new rule. Raises UsageError."""
    try:
        return reading.parse(text)
    except SpecError as error:
        raise UsageError(str(error)) from None


def run(text: str, setting: GroupSetting, learning: Learning | None = None) -> GroupOutcome:
    """Simulate one rule. Raises UsageError."""
    training = None
    if learning is not None:
        samples = learning.problem.samples
        if samples < setting.machines:
            raise UsageError(
                f"{samples:,} samples cannot be divided among {setting.machines:,} replicas; give "
                "fewer --machines"
            )
        training = GroupTraining(
            learning.problem,
            text,
            first_members(setting),
            batch=setting.batch,
            lr=learning.lr,
            wire=setting.wire,
            seed=setting.seed,
        )
    return GroupSimulator(text, setting, training).run()


def compare(
    rules: Sequence[str],
    setting: GroupSetting,
    learning: Learning | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The results that `gadei-ps group simulate --json` prints, without the setting.

    say: called with a line after each rule. Raises UsageError before it simulates any.
    """
    began = time.perf_counter()
    for text in rules:
        rule(text)
    found = []
    for text in rules:
        outcome = run(text, setting, learning)
        found.append(outcome.as_dict())
        say(f"{outcome.rule}: {outcome.rounds:,} rounds in {outcome.wall_s:.1f} s")
    return {"rules": found, "wall_s": time.perf_counter() - began}


def shown(result: Result) -> RenderableType:
    """The result of compare(), with its setting, for people."""
    rows = {
        "replicas": f"{result['machines']:,} in {result['groups']:,} groups, "
        f"neighbours: {result['neighbours']}",
        "a round": f"{result['k']:,} mini-batches of {result['batch']:,} samples on each replica",
        "run times": f"{result['times']}, seed {result['seed']}",
        "model": f"{result['values']:,} values of 4 bytes, sent in {result['wire']}, broadcast in "
        f"{result['broadcast']}",
    }
    parts: list[RenderableType] = [tables.facts(rows), "", _speeds(result), "", _traffic(result)]
    if any(one["training"] for one in result["rules"]):
        parts += ["", _training(result)]
    if any(one["deaths"] for one in result["rules"]):
        parts += ["", _deaths(result)]
    early = [one for one in result["rules"] if one["ended"] != "done"]
    parts += [Text(f"{one['rule']} ended early: {one['ended']}") for one in early]
    parts += ["", Text(f"virtual time; it took {result['wall_s']:.1f} s", style="dim")]
    return Group(*parts)


def _speeds(result: Result) -> RenderableType:
    numbers = ("seconds", "rounds", "samples/s", "speed-up", "of ideal", "waiting", "aggregating")
    made = tables.FittedTable(("rule", *numbers), right=numbers, dispensable=("rounds",))
    for one in result["rules"]:
        made.add_row(
            one["rule"],
            f"{one['seconds']:,.1f}",
            f"{one['rounds']:,}",
            f"{one['samples_per_s']:,.4g}",
            f"{one['speed_up']:,.2f}",
            f"{one['speed_up_share']:.1%}",
            f"{one['waiting_share']:.1%}",
            f"{one['exchange_share']:.1%}",
        )
    return made


def _traffic(result: Result) -> RenderableType:
    numbers = (
        "aggregation", "2(m-1)/m", "broadcast", "taken", "lost in buffers", "abandoned",
        "rounds old", "at most", "s old",
    )  # fmt: skip
    name = "models sent, each replica and round"
    made = tables.FittedTable(
        (name, *numbers), right=numbers, dispensable=("2(m-1)/m", "abandoned", "at most")
    )
    for one in result["rules"]:
        stale, told = one["staleness"], one["broadcast"]
        made.add_row(
            one["rule"],
            f"{one['aggregation_models']:.3f}",
            f"{one['aggregation_models_paper']:.3f}",
            f"{one['broadcast_models']:.3f}",
            f"{told['taken']:,}",
            f"{told['lost_in_buffers']:,}",
            f"{told['given_up']:,}",
            f"{stale['mean']:.2f}",
            f"{stale['max']:,}",
            f"{stale['mean_s']:,.1f}",
        )
    return made


def _training(result: Result) -> RenderableType:
    numbers = ("passes", "loss", "accuracy", "worst group", "best group", "of the groups' mean")
    made = tables.table("learning", *numbers, right=numbers)
    for one in result["rules"]:
        told = one["training"]
        made.add_row(
            one["rule"],
            f"{told['passes']:.1f}",
            f"{told['loss']:.4f}",
            f"{told['accuracy']:.1%}",
            f"{told['accuracy_least']:.1%}",
            f"{told['accuracy_most']:.1%}",
            f"{told['accuracy_of_mean']:.1%}",
        )
    return made


def _deaths(result: Result) -> RenderableType:
    numbers = ("deaths", "joins", "views", "aggregations made again", "training lost, s")
    made = tables.table("members", *numbers, right=numbers)
    for one in result["rules"]:
        made.add_row(
            one["rule"],
            f"{one['deaths']:,}",
            f"{one['joins']:,}",
            f"{one['views']:,}",
            f"{one['aggregations_made_again']:,}",
            f"{one['lost_s']:,.1f}",
        )
    return made
