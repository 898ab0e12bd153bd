"""The time of training until the accuracy on a held-out tenth of the sentences reaches a target.

All contenders train the same network from the same weights with Adagrad on the same nine tenths.
Their processes pause at fixed intervals for the measurement, whose time does not count. Each
contender runs once: if a curve is flat, the time at which it first reaches the target depends on
chance. `ratio`: their time over that of gadei-ps. A contender that does not reach the target within
the time limit counts with the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gadei_ps.benchmarks import nlc_texts
from gadei_ps.benchmarks.common import Report
from gadei_ps.benchmarks.nlc_member import DDP, HOGWILD, HOGWILD_SPARSE, OURS, SINGLE_SPARSE
from gadei_ps.benchmarks.nlc_team import Team, started
from gadei_ps.benchmarks.nlc_texts import Texts
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.classifier.dataset import defaults

CONTENDERS = [(OURS, 2), (HOGWILD_SPARSE, 2), (HOGWILD, 2), (DDP, 2), (SINGLE_SPARSE, 1)]
LR = 0.01
FALLBACK_ACCURACY = 0.8
REACH = 1.0
"""The ratio that the design asks for: no peer is faster."""


def measure(quick: bool) -> Report:
    """Measure each contender once on each data set."""
    size = sizes("time_to_accuracy", quick)
    found, notes = nlc_texts.read(list(size["accuracy"]))
    header = ["set", "accuracy", "contender", "learners", "seconds", "epochs", "best accuracy"]
    report = Report(header, notes=notes)
    for name, data in found.items():
        training, held_out = nlc_texts.parts(name, data)
        wanted = size["accuracy"].get(name, FALLBACK_ACCURACY)
        batch = defaults(len(training)).batch_size
        teams = [Team(who, n, training, update="adagrad", lr=LR) for who, n in CONTENDERS]
        with started(teams):
            runs = {team.kind: _curve(team, held_out, batch, wanted, size) for team in teams}
        for team in teams:
            told = {"contender": team.kind, "set": name, "learners": team.count}
            told |= {"mini_batch": batch, "accuracy": wanted}
            _tell(report, told, runs)
    return report


def _curve(
    team: Team, held_out: Texts, batch: int, wanted: float, size: Mapping[str, Any]
) -> list[dict[str, float]]:
    """Train until the target or the time limit is reached. Return the points of the curve."""
    curve: list[dict[str, float]] = []
    samples = seconds = best = 0.0
    while best < wanted and seconds < size["cap_s"]:
        done = team.go_on(batch, size["interval_s"])
        seconds += max(one.seconds for one in done)
        samples += sum(one.samples for one in done)
        best = max(best, accuracy := team.accuracy(held_out))
        epochs = samples / len(team.texts)
        curve.append({"seconds": seconds, "epochs": epochs, "validation_accuracy": accuracy})
    return curve


def _tell(report: Report, told: dict[str, Any], runs: Mapping[str, list[dict[str, float]]]) -> None:
    """Add the curve of one contender, its time, and the ratio to ours."""
    curve = runs[told["contender"]]
    best = max(point["validation_accuracy"] for point in curve)
    there = best >= told["accuracy"]
    seconds = curve[-1]["seconds"]
    # One run has no spread. It has no time if it does not reach the target.
    figures = {"median": seconds if there else None, "spread": None, "unit": "s", "rounds": 1}
    report.rows.append(told | figures | {"curve": curve})
    report.lines.append(
        [
            told["set"],
            f"{told['accuracy']:.2f}",
            told["contender"],
            str(told["learners"]),
            f"{'' if there else 'not in '}{seconds:.1f}",
            f"{curve[-1]['epochs']:.1f}",
            f"{best:.3f}",
        ]
    )
    ours = runs[OURS]
    if told["contender"] != OURS:
        ratio = seconds / ours[-1]["seconds"]
        reached = ratio >= REACH and ours[-1]["validation_accuracy"] >= told["accuracy"]
        found = {"ratio": ratio, "best_ratio": ratio, "reach": REACH, "reached": reached}
        report.ratios.append(told | found | {"at_least": not there})
