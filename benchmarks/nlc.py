"""Samples per second of the sentence classifier, compared with torch's own ways to train it.

Every contender trains the same network (vocabulary x 300 embeddings, 3 x 100 filters) with plain
SGD on the same mini-batches, in its own processes with the same share of the cores. One learner is
compared with one process of torch, two learners with Hogwild and DistributedDataParallel. The limit
is forward and backward alone, in the same number of processes, without update and sharing.

All processes of a data set exist at once. Contenders sleep except in their turn. A figure is that
of one window after a warm-up. ratio: gadei-ps over the contender. Above 1, gadei-ps is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gadei_ps.benchmarks import nlc_texts
from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.nlc_member import (
    DDP,
    HOGWILD,
    HOGWILD_SPARSE,
    LIMIT,
    OURS,
    SINGLE,
    SINGLE_SPARSE,
)
from gadei_ps.benchmarks.nlc_team import Team, rate, started
from gadei_ps.benchmarks.sizes import sizes

PEERS = {1: [SINGLE, SINGLE_SPARSE], 2: [HOGWILD, HOGWILD_SPARSE, DDP]}
ORDER = [OURS, LIMIT, *PEERS[1], *PEERS[2]]
REACH = {DDP: 15.0, HOGWILD: 5.0, HOGWILD_SPARSE: 1.1, LIMIT: 0.9}
"""Targets on mr with two learners at mini-batch 1. For other cases: no peer is faster."""
WARM_UP = 0.15
"""Seconds of the warm-up before a window."""


def measure(quick: bool) -> Report:
    """Measure each data set with processes of its own."""
    size = sizes("nlc", quick)
    found, notes = nlc_texts.read(size["sets"])
    report = Report(["set", "learners", "mini-batch", *ORDER], notes=notes)
    for name, data in found.items():
        texts = nlc_texts.whole(name, data)
        teams = {
            (kind, learners): Team(kind, learners, texts)
            for learners in size["learners"]
            for kind in [OURS, LIMIT, *PEERS[learners]]
        }
        with started(teams.values()):
            for batch in size["batches"]:
                _measure_batch(report, teams, batch, size)
    return report


def _measure_batch(
    report: Report, teams: Mapping[tuple[str, int], Team], batch: int, size: Mapping[str, Any]
) -> None:
    contenders = {
        f"{kind}, {learners}": window(team, batch, size["window_s"])
        for (kind, learners), team in teams.items()
    }
    figures = alternate(contenders, size["rounds"])
    for learners in size["learners"]:
        mine = {kind: figures[f"{kind}, {learners}"] for kind, count in teams if count == learners}
        name = next(iter(teams.values())).texts.name
        told = {"set": name, "learners": learners, "mini_batch": batch}
        for kind, values in mine.items():
            row = summary(values, "samples/s", larger=True)
            report.rows.append({"contender": kind, **told, **row})
            if kind != OURS:
                report.ratios.append(_ratio(kind, told, mine[OURS], values))
        report.lines.append([name, str(learners), str(batch), *_cells(mine)])


def window(team: Team, batch: int, seconds: float) -> Callable[[], float]:
    """Return a function that measures samples per second in one window."""
    return lambda: rate(team.train(batch, seconds, max(0.1, WARM_UP * seconds)))


def _ratio(
    kind: str, told: dict[str, Any], ours: Sequence[float], theirs: Sequence[float]
) -> dict[str, Any]:
    found = ratios_of(ours, theirs, larger=True)
    reach = None if kind == LIMIT else 1.0
    if told["set"] == "mr" and told["learners"] == 2 and told["mini_batch"] == 1:
        reach = REACH[kind]
    reached = None if reach is None else found["ratio"] >= reach
    return {"contender": kind, **told, **found, "reach": reach, "reached": reached}


def _cells(mine: Mapping[str, Sequence[float]]) -> list[str]:
    """Return samples per second as text, for others with the ratio of gadei-ps to them."""
    cells = []
    for kind in ORDER:
        if kind not in mine:
            cells.append("")
            continue
        cell = f"{summary(mine[kind], larger=True)['median']:.0f}"
        if kind != OURS:
            cell += f" ({ratios_of(mine[OURS], mine[kind], larger=True)['ratio']:.2f})"
        cells.append(cell)
    return cells
