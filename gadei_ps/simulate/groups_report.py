"""Runs several rules on the same replicas, and the tables of `gadei-ps group simulate`."""

from __future__ import annotations

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
from gadei_ps.simulate.groups import GroupSimulator
from gadei_ps.simulate.groups_outcome import GroupOutcome
from gadei_ps.simulate.groups_setting import GroupSetting
from gadei_ps.simulate.groups_training import GroupTraining
from gadei_ps.simulate.problems import Problem
from gadei_ps.sync.parameters import SpecError

# The tables: by header, how str.format writes the cells.
SPEEDS = {
    "rule": "{rule}",
    "seconds": "{seconds:,.1f}",
    "rounds": "{rounds:,}",
    "samples/s": "{samples_per_s:,.4g}",
    "speed-up": "{speed_up:,.2f}",
    "of ideal": "{speed_up_share:.1%}",
    "waiting": "{waiting_share:.1%}",
    "aggregating": "{exchange_share:.1%}",
}
TRAFFIC = {
    "models sent, each replica and round": "{rule}",
    "aggregation": "{aggregation_models:.3f}",
    "2(m-1)/m": "{aggregation_models_paper:.3f}",
    "broadcast": "{broadcast_models:.3f}",
    "taken": "{broadcast[taken]:,}",
    "lost in buffers": "{broadcast[lost_in_buffers]:,}",
    "abandoned": "{broadcast[given_up]:,}",
    "rounds old": "{staleness[mean]:.2f}",
    "at most": "{staleness[max]:,}",
    "s old": "{staleness[mean_s]:,.1f}",
}
TRAINING = {
    "learning": "{rule}",
    "passes": "{training[passes]:.1f}",
    "loss": "{training[loss]:.4f}",
    "accuracy": "{training[accuracy]:.1%}",
    "worst group": "{training[accuracy_least]:.1%}",
    "best group": "{training[accuracy_most]:.1%}",
    "of the groups' mean": "{training[accuracy_of_mean]:.1%}",
}


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
            setting.sizes,
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


def shown(result: Mapping[str, Any]) -> RenderableType:
    """The result of compare(), with its setting, for people."""
    rows = {
        "replicas": f"{result['machines']:,} in {result['groups']:,} groups, "
        f"neighbours: {result['neighbours']}",
        "a round": f"{result['k']:,} mini-batches of {result['batch']:,} samples on each replica",
        "run times": f"{result['times']}, seed {result['seed']}",
        "model": f"{result['values']:,} values of 4 bytes, sent in {result['wire']}, broadcast in "
        f"{result['broadcast']}",
    }
    rules = result["rules"]
    parts: list[RenderableType] = [tables.facts(rows)]
    parts += ["", tables.formatted(SPEEDS, rules, ("rounds",))]
    parts += ["", tables.formatted(TRAFFIC, rules, ("2(m-1)/m", "abandoned", "at most"))]
    if any(one["training"] for one in rules):
        parts += ["", tables.formatted(TRAINING, rules)]
    early = [one for one in rules if one["ended"] != "done"]
    parts += [Text(f"{one['rule']} ended early: {one['ended']}") for one in early]
    parts += ["", Text(f"virtual time; it took {result['wall_s']:.1f} s", style="dim")]
    return Group(*parts)
