"""The smallest mini-batch at which two learners train faster than one (paper, Table 8).

Each contender runs with two processes and with one, for mini-batches from 1 upwards, until two are
faster in the median round. One learner has all cores, two learners have half of them each. The
ratio is that of gadei-ps at mini-batch 1: two learners over one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gadei_ps.benchmarks import nlc_texts
from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.nlc import window
from gadei_ps.benchmarks.nlc_member import DDP, HOGWILD, HOGWILD_SPARSE, OURS
from gadei_ps.benchmarks.nlc_team import Team, started
from gadei_ps.benchmarks.sizes import sizes

CONTENDERS = [OURS, HOGWILD, HOGWILD_SPARSE, DDP]
LEARNERS = (1, 2)
Gains = dict[int, dict[str, float]]
"""Speed of two learners over one, by mini-batch."""


def measure(quick: bool) -> Report:
    """Measure contenders at each mini-batch until their two processes are faster than one."""
    size = sizes("table8", quick)
    found, notes = nlc_texts.read(size["sets"])
    report = Report(["set", "contender", "smallest", "two over one, from 1 on"], notes=notes)
    for name, data in found.items():
        texts = nlc_texts.whole(name, data)
        teams = {(who, n): Team(who, n, texts) for who in CONTENDERS for n in LEARNERS}
        gains: dict[str, Gains] = {who: {} for who in CONTENDERS}
        with started(teams.values()):
            left = CONTENDERS
            for batch in size["batches"]:
                rates = _rates(teams, left, batch, size)
                report.rows += _rows(name, batch, rates)
                for who in left:
                    gains[who][batch] = ratios_of(rates[who, 2], rates[who, 1], larger=True)
                left = [who for who in left if gains[who][batch]["ratio"] <= 1]
        for who in CONTENDERS:
            _tell(report, name, who, gains[who])
    return report


def _rates(
    teams: Mapping[tuple[str, int], Team], left: Sequence[str], batch: int, size: Mapping[str, Any]
) -> dict[tuple[str, int], list[float]]:
    """Return the samples/s of the remaining contenders, with one learner and with two."""
    keys = [(who, n) for who in left for n in LEARNERS]
    if not keys:
        return {}
    contenders = {f"{who}, {n}": window(teams[who, n], batch, size["window_s"]) for who, n in keys}
    figures = alternate(contenders, size["rounds"])
    return {(who, n): figures[f"{who}, {n}"] for who, n in keys}


def _rows(
    name: str, batch: int, rates: Mapping[tuple[str, int], Sequence[float]]
) -> list[dict[str, Any]]:
    return [
        {"contender": who, "set": name, "learners": learners, "mini_batch": batch}
        | summary(values, "samples/s", larger=True)
        for (who, learners), values in rates.items()
    ]


def _tell(report: Report, name: str, who: str, gains: Gains) -> None:
    """Add the smallest mini-batch at which two were faster; None if there was none."""
    smallest = next((batch for batch, gain in gains.items() if gain["ratio"] > 1), None)
    report.rows.append(
        {
            "contender": who,
            "set": name,
            "smallest_mini_batch": smallest,
            "median": smallest,
            "spread": None,
            "unit": "samples",
        }
    )
    shown = f"none up to {max(gains)}" if smallest is None else str(smallest)
    report.lines.append(
        [name, who, shown, " ".join(f"{gain['ratio']:.2f}" for gain in gains.values())]
    )
    if who == OURS:
        told = {"contender": f"{who}, one learner", "set": name, "mini_batch": 1}
        reached = {"reach": 1.0, "reached": smallest == 1}
        report.ratios.append(told | gains[1] | {"smallest_mini_batch": smallest} | reached)
