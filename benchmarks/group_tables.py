"""Writes the tables of worker groups in docs/performance.md from the results of four benchmarks.

    python -m gadei_ps.benchmarks.group_tables

They stand below comments such as `<!-- group_deaths.json: table -->`.
"""

from __future__ import annotations

from typing import Any

from gadei_ps.benchmarks.aggregate import OURS, REACH
from gadei_ps.benchmarks.group_deaths import (
    AGENT,
    BACK,
    COORDINATOR,
    HEAD,
    LEARNER,
    MACHINE,
    NONE,
    PAUSE,
)
from gadei_ps.benchmarks.group_deaths_counts import COMPARED, FAULTS, FINISHED
from gadei_ps.benchmarks.idle_agent import ALONE, BESIDE
from gadei_ps.benchmarks.tables import Table

WAITS = {
    NONE: "a round without a death",
    MACHINE: "a replica is killed",
    AGENT: "the actor of a replica is killed",
    LEARNER: "a learner is killed",
    COORDINATOR: "the coordinator is killed",
    HEAD: "the head of Ray is killed",
    BACK: "until all replicas have made two rounds again",
    PAUSE: "the longest pause of rounds until then",
}
COUNTS = (COMPARED, FINISHED, *FAULTS)


def _worker_groups(result: dict[str, Any]) -> list[str]:
    lines = [
        "| task | replicas | samples/s | ratio | test rows, % | difference, percentage points |",
        "| --- " * 6 + "|",
    ]
    ratios = {one["task"]: one for one in result["ratios"]}
    for row in result["rows"]:
        ratio = ratios[row["task"]]
        last = ["", ""]
        if row["machines"] > 1:
            last = [f"{ratio['ratio']:.2f}", f"{-ratio['points_lost']:+.2f}"]
        cells = [row["task"], str(row["machines"]), f"{row['median']:,.0f}"]
        cells += [last[0], f"{row['accuracy']:.2f}", last[1]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _deaths(result: dict[str, Any]) -> list[str]:
    lines = [
        "| run | what | number | p50, s | p99, s | most, s |",
        "| --- " * 6 + "|",
    ]
    waits = [row for row in result["rows"] if row["what"] in WAITS]
    for row in sorted(waits, key=lambda row: list(WAITS).index(row["what"])):
        seconds = [f"{row[name]:.2f}" for name in ("p50", "p99", "most")]
        cells = [row["batches"], WAITS[row["what"]], str(row["rounds"]), *seconds]
        lines.append(f"| {' | '.join(cells)} |")
    counts = [row for row in result["rows"] if row["what"] in COUNTS]
    counts.sort(key=lambda row: COUNTS.index(row["what"]))
    told = [f"| {row['batches']} | {row['what']} | {row['count']:,} | | | |" for row in counts]
    return lines + told


def _idle_agent(result: dict[str, Any]) -> list[str]:
    lines = ["| gradient | alone, 1/s | beside a replica, 1/s | ratio |", "| --- " * 4 + "|"]
    rows = {(row["bytes"], row["what"]): row["median"] for row in result["rows"]}
    for one in result["ratios"]:
        rates = [f"{rows[one['bytes'], what]:,.0f}" for what in (ALONE, BESIDE)]
        ratio = f"{one['ratio']:.3f} ± {one['spread']:.3f}"
        lines.append(f"| {one['bytes'] / 1000:g} KB | {' | '.join(rates)} | {ratio} |")
    return lines


def _aggregate(result: dict[str, Any]) -> list[str]:
    lines = [
        f"| model | replicas | {OURS}, ms | models sent | {' | '.join(REACH)} |",
        "| --- " * (4 + len(REACH)) + "|",
    ]
    ratios = {(one["contender"], one["bytes"], one["members"]): one for one in result["ratios"]}
    seen = set()
    for row in result["rows"]:
        what = row["bytes"], row["members"]
        if row["contender"] != OURS or what in seen:
            continue
        seen.add(what)
        cells = [f"{row['bytes'] / 1e6:g} MB", str(row["members"]), f"{1e3 * row['median']:.1f}"]
        cells.append(f"{row['models_sent']:.3f}")
        for name in REACH:
            one = ratios.get((name, *what))
            cells.append(f"{one['ratio']:.2f} times" if one else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


TABLES = tuple(
    Table(name, "performance.md", lines)
    for name, lines in (
        ("worker_groups", _worker_groups),
        ("group_deaths", _deaths),
        ("idle_agent", _idle_agent),
        ("aggregate", _aggregate),
    )
)


if __name__ == "__main__":
    for table in TABLES:
        table.write()
