"""Gradients a second by the number of learners, and beside learners that are silent.

Each learner takes batches that the server hands out, and pushes a prepared gradient of 40 KB for
each as fast as it can. The silent ones are attached and wait. The peer is Hogwild: as many
processes add their gradients to weights in shared memory, in place and without locks; nobody hands
out work to them. A share compares the gradients a second of a number of learners with those of two.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from gadei_ps.benchmarks.common import Report, alternate, cores, ratios_of, summary
from gadei_ps.benchmarks.gang import Gang
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping

OURS, PEER = "gadei-ps", "Hogwild"
VALUES = 10_000
START_S = 120.0  # of a whole team
REACH = {(64, 0): 0.7, (200, 0): 0.5}  # shares of two learners' gradients a second


class Team:
    """Learners of one contender, which sleep between rounds (learners_team.py)."""

    def __init__(
        self,
        stack: ExitStack,
        who: str,
        learners: int,
        silent: int,
        number: int,
        values: int = VALUES,
    ) -> None:
        """number: index of this team among those that exist at once. values: of the model."""
        self.who, self.learners, self.silent = who, learners, silent
        self.job = name = f"learners-{os.getpid()}-{number}"
        config = from_mapping(
            {
                "name": name,
                "history": False,
                "optimizer": {"kind": "sgd", "lr": 1e-6},
                "tensors": [{"name": "w", "shape": [values]}],
            },
            "learners",
        )
        count = learners + silent
        if who == OURS:
            stack.enter_context(Daemon(config, silent=True, learners=count))
        command = "-m", "gadei_ps.benchmarks.learners_team", who
        self._gang = stack.enter_context(Gang([command]))
        order = {"learners": count, "bytes": 4 * values, "job": name}
        self._gang.ask(order, timeout_s=START_S)

    def rate(self, seconds: float) -> float:
        """Return the gradients/s of a round."""
        order = {"active": self.learners, "seconds": seconds}
        return float(self._gang.ask(order, timeout_s=START_S)[0]["rate"])


def compare(report: Report, team: Team, rates: Sequence[float], two: Sequence[float]) -> None:
    """Add one row, and its share of what two learners of the same contender reach."""
    told: dict[str, Any] = {
        "contender": team.who,
        "learners": team.learners,
        "silent": team.silent,
    }
    row = {**told, **summary(rates, "1/s", larger=True)}
    share = ratios_of(rates, two, larger=True)
    row |= {"share_of_two": share["ratio"], "best_share_of_two": share["best_ratio"]}
    reach = REACH.get((team.learners, team.silent))
    if team.who == OURS and reach is not None:
        row |= {"reach_share": reach, "reached": share["ratio"] >= reach}
    report.rows.append(row)
    report.lines.append(
        [
            f"{team.who}: {team.learners}",
            str(team.silent),
            f"{row['median']:.0f} ±{row['spread']:.0%}",
            f"{share['ratio']:.2f}",
        ]
    )


def measure(quick: bool) -> Report:
    """Measure all teams in turn. The peer has no silent ones."""
    size = sizes("learners", quick)
    report = Report(["learners", "silent", "gradients/s", "/two"])
    wanted = [(OURS, learners, 0) for learners in size["learners"]]
    wanted += [(OURS, 2, silent) for silent in size["silent"]]
    wanted += [(PEER, learners, 0) for learners in size["learners"]]
    with ExitStack() as stack:
        teams = [Team(stack, *one, number) for number, one in enumerate(wanted)]
        rounds = {str(i): partial(team.rate, size["call_s"]) for i, team in enumerate(teams)}
        taken = alternate(rounds, size["rounds"])
    rates = list(taken.values())
    first = {team.who: rate for team, rate in reversed(list(zip(teams, rates, strict=True)))}
    for team, found in zip(teams, rates, strict=True):
        compare(report, team, found, first[team.who])
    ours = {
        (team.learners, team.silent): found
        for team, found in zip(teams, rates, strict=True)
        if team.who == OURS
    }
    for team, found in zip(teams, rates, strict=True):
        if team.who == PEER:
            ratios = ratios_of(ours[team.learners, 0], found, larger=True)
            told = {"contender": PEER, "learners": team.learners}
            report.ratios.append({**told, **ratios})
    if max(size["learners"]) + 1 > cores():
        report.notes.append(f"learners and shards share {cores()} cores if they are more")
    report.notes.append(f"{PEER}: no server, no batches handed out, no exactly-once")
    return report
