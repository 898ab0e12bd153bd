"""Writes the tables of docs/virtual-workers-measured.md from results/virtual.json.

    python -m gadei_ps.benchmarks.virtual_tables

A table stands below a comment `<!-- virtual.json: NAME -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gadei_ps.benchmarks import suite

PAGE = suite.RESULTS.parents[1] / "docs" / "virtual-workers-measured.md"
RESULT = suite.RESULTS / "virtual.json"
MARK = re.compile(r"(<!-- virtual\.json: (\w+) -->\n).*?(?=\n\n|\Z)", re.S)
MISSING = "Not measured yet."
Row = dict[str, Any]


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _milliseconds(seconds: Sequence[float], digits: str = "g") -> str:
    each = [f"{1e3 * one:{digits}}" for one in seconds]
    return each[0] if len(set(each)) == 1 else ", ".join(each)


def _stretched(rows: list[Row]) -> str:
    """A line for each pipeline; a column for each contender, by stages: 2 k in flight, say."""
    header: dict[str, None] = {}
    lines: dict[tuple[float, ...], dict[str, str]] = {}
    for row in rows:
        stages = len(row["stages_s"])
        many, what = next(
            (row[key], name)
            for key, name in (("in_flight", "in flight"), ("micro_batches", "micro-batches"))
            if key in row
        )
        times = many // stages
        column = f"{row['contender']}, {times if times > 1 else ''}k {what}"
        header.setdefault(column)
        cell = f"{row['median'] / row['limit']:.2f}"
        if "bubble_in_theory" in row:
            cell += f" ({1 - row['bubble_in_theory']:.2f})"
        lines.setdefault(tuple(row["stages_s"]), {})[column] = cell
    return _table(
        ["k stages", *header],
        (
            [
                f"{len(key)} of {_milliseconds(key)} ms",
                *(line.get(column, "-") for column in header),
            ]
            for key, line in lines.items()
        ),
    )


def _stages(rows: list[Row]) -> str:
    lines: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in rows:
        shape = row["width"], row["layers"], row["samples"]
        lines.setdefault(shape, {})[row["contender"]] = row
    one, threads, processes, *others = next(iter(lines.values()))
    return _table(
        ["width, layers, mini-batch", "stage, ms", threads, processes, *others],
        (
            [
                ", ".join(map(str, shape)),
                f"{1e3 * line[one]['stage_s']:.2f}",
                *(
                    f"{line[name]['median'] / line[one]['median']:.2f}"
                    for name in (threads, processes)
                ),
                *(f"{line[name]['median']:,.0f}/s" for name in others),
            ]
            for shape, line in lines.items()
        ),
    )


def _bytes(rows: list[Row]) -> str:
    return _table(
        ["learner", "bytes a mini-batch", "of the plain learner's"],
        (
            [
                row["contender"]
                + ("" if row["s_local"] is None else f", s_local={row['s_local']}"),
                f"{row['median']:,.0f}",
                f"{row['of_the_plain_learner']:g}",
            ]
            for row in rows
        ),
    )


def _planned(rows: list[Row]) -> str:
    return _table(
        ["layers that", "planned, ms", "took, ms", "off by at most", "planned", "trained"],
        (
            [
                row["layers"],
                _milliseconds(row["predicted_s"], ".1f"),
                _milliseconds(row["stages_s"], ".1f"),
                f"{row['median']:.0%}",
                f"{row['predicted_rate']:.1f}/s",
                f"{row['rate']:.1f}/s",
            ]
            for row in rows
        ),
    )


def _memory(rows: list[Row]) -> str:
    return _table(
        ["stage", "planned, MiB", "held at most, MiB", "limit, MiB"],
        (
            [
                str(row["stage"]),
                *(f"{row[key] / 2**20:.1f}" for key in ("predicted", "median", "limit")),
            ]
            for row in rows
        ),
    )


TABLES = {
    "stretched": _stretched,
    "stages": _stages,
    "bytes": _bytes,
    "planned": _planned,
    "memory": _memory,
}


def filled(page: str, result: Path = RESULT) -> str:
    """The text of the page with the tables of the result."""
    rows = json.loads(result.read_text())["rows"] if result.exists() else []

    def table(found: re.Match[str]) -> str:
        some = [row for row in rows if row["series"] == found[2]]
        return found[1] + (TABLES[found[2]](some) if some else MISSING)

    return MARK.sub(table, page)


def write() -> None:
    """Write the tables into the page."""
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    write()
