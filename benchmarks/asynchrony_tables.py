"""Writes the table of docs/momentum-and-staleness.md from results/asynchrony.json.

    python -m gadei_ps.benchmarks.asynchrony_tables

It stands below the comment `<!-- asynchrony.json: table -->`.
"""

from __future__ import annotations

from typing import Any

from gadei_ps.benchmarks.asynchrony import ALONE, ASP, BSP, HOGWILD, PLAIN
from gadei_ps.benchmarks.asynchrony_tasks import TASKS
from gadei_ps.benchmarks.tables import Table

COLUMNS = (ALONE, ASP, PLAIN, BSP, HOGWILD)


def _lines(result: dict[str, Any]) -> list[str]:
    """A line for each task and number of learners; figures with half of their spread."""
    lines = [
        f"| task | learners | {' | '.join(COLUMNS)} |",
        f"| --- | --- |{' --- |' * len(COLUMNS)}",
    ]
    rows = {(one["task"], one["learners"], one["contender"]): one for one in result["rows"]}
    for task, learners in dict.fromkeys((task, learners) for task, learners, _ in rows):
        cells = [f"{task}, {TASKS[task].figure}", str(learners)]
        for contender in COLUMNS:
            row = rows.get((task, learners, contender))
            cells.append(_figure(row) if row else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figure(row: dict[str, Any]) -> str:
    """Three digits that count: a loss of 1.925, an error of 8.42 %."""
    places = 3 if row["figure"] < 4 else 2
    half = (max(row["figures"]) - min(row["figures"])) / 2
    return f"{row['figure']:.{places}f} ± {half:.{places}f}"


TABLE = Table("asynchrony", "momentum-and-staleness.md", _lines)


if __name__ == "__main__":
    TABLE.write()
