"""Cost of a replica's exchange beside a job while there is nothing to exchange.

Learners take batches that the server hands out, and push a prepared gradient for each as fast as
they can (learners_team.py). Two jobs take turns: one alone, one with a replica's rounds
(idle_agent_replica.py), which have begun their group and wait for the gradients of a round, of
which there are too many to come. While the other job is measured, they are stopped (SIGSTOP).

ratio: gradients a second beside a replica over those alone; its spread is half the distance between
the quartiles of the rounds.
"""

from __future__ import annotations

import select
import signal
import subprocess
from contextlib import ExitStack
from functools import partial
from typing import Any

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.gang import Failed
from gadei_ps.benchmarks.learners import OURS, Team
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.machine import process

ALONE, BESIDE = "alone", "beside a replica"
START_S = 60.0
REACH = 0.98


class Replica:
    """A replica that is alone in its group. Stopped, unless it is let run."""

    def __init__(self, stack: ExitStack, run: str) -> None:
        """Return once it has begun its group. Raises Failed."""
        self._child = process.spawn(
            process.module_command("gadei_ps.benchmarks.idle_agent_replica", run),
            stdout=subprocess.PIPE,
            how=signal.SIGKILL,
        )
        stack.callback(self._end)
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], START_S)
        line = self._child.stdout.readline() if ready else b""
        if line != b"member\n":
            raise Failed(f"the replica does not start: {line.decode()!r}")
        self._child.send_signal(signal.SIGSTOP)

    def rate(self, team: Team, seconds: float) -> float:
        """Return a team's rate while the replica runs (gradients/s)."""
        self._child.send_signal(signal.SIGCONT)
        try:
            return team.rate(seconds)
        finally:
            self._child.send_signal(signal.SIGSTOP)

    def _end(self) -> None:
        self._child.kill()
        self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


def compare(report: Report, values: int, size: dict[str, Any]) -> None:
    """Both jobs in turn, with gradients of so many values."""
    learners = size["learners"]
    with ExitStack() as stack:
        teams = [Team(stack, OURS, learners, 0, number, values) for number in range(2)]
        replica = Replica(stack, teams[1].job)
        rates = alternate(
            {
                ALONE: partial(teams[0].rate, size["call_s"]),
                BESIDE: partial(replica.rate, teams[1], size["call_s"]),
            },
            size["rounds"],
        )
    told: dict[str, Any] = {"bytes": 4 * values, "learners": learners}
    line = [f"{4 * values / 1000:g} KB"]
    for what in (ALONE, BESIDE):
        row = {"contender": OURS, "what": what, **told}
        report.rows.append(row | summary(rates[what], "1/s", larger=True))
        line.append(f"{report.rows[-1]['median']:.0f} ±{report.rows[-1]['spread']:.0%}")
    ratio = ratios_of(rates[BESIDE], rates[ALONE], larger=True)
    of_rounds = [b / a for a, b in zip(rates[ALONE], rates[BESIDE], strict=True)]
    ratio["spread"] = summary(of_rounds)["spread"]
    reached = {"reach": REACH, "reached": ratio["ratio"] >= REACH}
    report.ratios.append({"contender": ALONE, **told, **ratio, **reached})
    report.lines.append([*line, f"{ratio['ratio']:.3f} ±{ratio['spread']:.1%}"])


def measure(quick: bool) -> Report:
    """Measure each size of gradient."""
    size = sizes("idle_agent", quick)
    report = Report(["gradient", f"{ALONE}, gradients/s", BESIDE, "ratio"])
    for values in size["values"]:
        compare(report, values, size)
    report.notes.append(f"{size['learners']} learners")
    return report
