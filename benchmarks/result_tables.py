"""Writes the tables of docs/performance.md that are about all results.

    python -m gadei_ps.benchmarks.result_tables

The one below `<!-- sources: table -->` has the processor, commit and load of each result file, the
one below `<!-- targets: table -->` the targets that were missed.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gadei_ps.benchmarks import suite
from gadei_ps.benchmarks.tables import Table

Row = dict[str, Any]
MACHINE = re.compile(r"(EPYC|Xeon).*family (\d+), model (\d+)", re.I)
UNPUBLISHED = {"table7", "table8"}
SIZES = {"bytes": 1e6}  # shown in MB
WHERE = ("set", "optimizer", "wire", "members", "learners", "mini_batch", "bytes")
"""The parameters of a row that identify its case."""
WHY = {
    ("apply", "float32"): "26 bytes instead of 28 are 1.08 times fewer",
    ("apply", "C"): "memory; rounds spread by 3 to 12%",
    ("apply", "torch"): "memory; rounds spread by 3 to 12%",
    ("nlc", "torch single"): "torch computes with both cores, and so does the server",
    ("nlc", "torch single sparse"): "torch computes with both cores, and so does the server",
    ("ingest", "limit"): "in the caches, lines that another core has written",
    ("ingest", "MPI one-sided"): "both move seven times the gradient's bytes; memory is the limit",
    ("ingest", "MPI two-sided"): "memory is the limit",
    ("ingest", "Ray actor"): "memory is the limit",
    ("ingest", "gloo"): "memory is the limit",
    ("aggregate", "gloo all-reduce"): "gloo adds in place, without weights",
    (
        "failover",
        "next gradient",
    ): "the gradient in flight; learners and the dead server take cores",
    ("failover", "standby"): "the dead server's memory is unmapped first",
    ("learners", "200"): "learners and server share two cores",
    ("memory", "dense pushes"): "1.5 MB of the server's first second; then 1%",
    ("start", "gadei-ps run, empty cache"): "compiling the kernels",
    ("virtual", "the planner's prediction"): "optimizer and server share the stages' two cores",
    (
        "gpu-bandwidth",
        "cudaMemcpyAsync",
    ): "pull of 25 MB: 58 µs more; 1 MB: 12 µs; cause not known",
    ("gpu-learners", "torch single"): "step() took the host 0.2 ms more then",
    ("gpu-learners", "torch single sparse"): "step() took the host 0.2 ms more then",
    ("gpu-learners", "Hogwild"): "step() took the host 0.2 ms more then; no transfers there",
    ("gpu-learners", "Hogwild sparse"): "as Hogwild, with MPS",
    ("gpu-vision", "torch SGD"): "the server's update of 244 MB by 8 shards",
    ("worker_groups", "one machine"): "eight learners, four servers and Ray share two cores",
    ("idle_agent", "alone"): "the rounds spread by more than the loss",
}
"""Limiting factor of a figure, by the result file and the contender or quantity."""


@dataclass(frozen=True)
class Missed:
    """A group of figures of one file with the same target, of which some missed it."""

    file: str
    what: str
    target: str
    measured: str
    cases: str
    why: str


def processor(result: Row) -> str:
    """Return the short name of the processor of a result, such as `Xeon 6/167`."""
    found = MACHINE.search(result["machine"]["cpu"])
    assert found, result["machine"]["cpu"]
    name = {"epyc": "EPYC", "xeon": "Xeon"}[found[1].lower()]
    return f"{name} {found[2]}/{found[3]}"


def results() -> dict[str, Row]:
    """Return all results of benchmarks by name. The reproduction has a page of its own."""
    files = sorted(suite.RESULTS.glob("*.json"))
    read = {path.stem: json.loads(path.read_text()) for path in files}
    return {name: one for name, one in read.items() if not name.startswith("reproduce_")}


def _sources() -> list[str]:
    lines = ["| result | processor | commit | load at start |", "| --- " * 4 + "|"]
    found = [
        (processor(one), name, one) for name, one in results().items() if name not in UNPUBLISHED
    ]
    for cpu, name, one in sorted(found, key=lambda each: each[:2]):
        load = f"{one['machine']['load_at_start']:.1f}"
        cells = [f"`{name}.json`", cpu, one.get("commit") or "not recorded", load]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _judged(name: str, result: Row) -> Iterator[tuple[str, str, float, float, bool, Row]]:
    """Yield quantity, unit, target, figure, whether the target was missed, and the row."""
    for row in [*result["rows"], *result["ratios"]]:
        if row.get("reach_s"):
            what = str(row.get("what") or row.get("mode") or row["contender"])
            shown = f"{row['contender']}: {what}" if row["contender"] != what else what
            yield shown, "s", row["reach_s"], row["median"], row["median"] > row["reach_s"], row
        elif row.get("reach_share"):
            what = "gradients/s as a share of those of two learners"
            yield what, "", row["reach_share"], row["share_of_two"], not row["reached"], row
        elif "ratio" in row and row.get("reach") and "reached" in row:
            what = f"against {row['contender']}"
            yield what, "times", row["reach"], row["ratio"], not row["reached"], row


def _figure(value: float, unit: str) -> str:
    if unit != "s":
        return f"{value:.2f}"
    for scale, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * scale >= 1 or name == "µs":
            return f"{value * scale:.3g} {name}"
    raise AssertionError


def _range(values: list[float], unit: str) -> str:
    least, most = _figure(min(values), unit), _figure(max(values), unit)
    return least if least == most else f"{least} to {most}"


def _cases(rows: list[Row], total: int) -> str:
    """The parameters of the rows, and how many of how many they are."""
    told = []
    for key in WHERE:
        values = sorted({one[key] for one in rows if key in one})
        if values:
            scaled = [f"{one / SIZES[key]:g}" if key in SIZES else str(one) for one in values]
            unit = " MB" if key in SIZES else ""
            told.append(f"{key.replace('_', '-')} {', '.join(scaled)}{unit}")
    return f"{len(rows)} of {total}" + (f": {'; '.join(told)}" if told else "")


def missed() -> list[Missed]:
    """Return the targets that were missed, in all results that are published."""
    found = []
    for name, result in results().items():
        groups = defaultdict(list)
        for what, unit, target, figure, is_missed, row in _judged(name, result):
            groups[what, unit, target].append((figure, is_missed, row))
        for (what, unit, target), each in groups.items():
            figures = [figure for figure, is_missed, _ in each if is_missed]
            rows = [row for _, is_missed, row in each if is_missed]
            if not rows or name in UNPUBLISHED:
                continue
            names = (str(rows[0].get(key)) for key in ("what", "mode", "learners", "contender"))
            why = next((WHY[name, one] for one in names if (name, one) in WHY), "")
            shown = _figure(target, unit), _range(figures, unit)
            found.append(Missed(name, what, *shown, _cases(rows, len(each)), why))
    return found


def _targets() -> list[str]:
    lines = ["| result | what | target | measured | cases | limited by |", "| --- " * 6 + "|"]
    for one in missed():
        cells = [f"`{one.file}.json`", one.what, one.target, one.measured, one.cases, one.why]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _watching(result: Row) -> list[str]:
    ratio = result["ratios"][0]
    lines = ["| one learner, mini-batch 1 | gradients/s | ratio |", "| --- | --- | --- |"]
    for row in result["rows"]:
        is_alone = row["what"] == ratio["contender"]
        shown = "" if is_alone else f"{ratio['ratio']:.3f} ± {ratio['spread']:.3f}"
        lines.append(f"| {row['what']} | {row['median']:,.0f} | {shown} |")
    return lines


TABLES = (
    Table("watching", "performance.md", _watching),
    Table("sources", "performance.md", lambda _: _sources(), all_results=True),
    Table("targets", "performance.md", lambda _: _targets(), all_results=True),
)


if __name__ == "__main__":
    for table in TABLES:
        table.write()
