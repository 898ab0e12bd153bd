"""Writes the table of training scripts in docs/performance.md from results/scripts.json.

    python -m gadei_ps.benchmarks.script_tables

It stands below the comment `<!-- scripts.json: table -->`.
"""

from __future__ import annotations

from typing import Any

from gadei_ps.benchmarks.scripts import ONE_THREAD, OURS, PLAIN
from gadei_ps.benchmarks.tables import Table

ASP, BSP = f"{OURS} asp", f"{OURS} bsp"


def _lines(result: dict[str, Any]) -> list[str]:
    """A line for each script: samples per second, the ratio, and what the script ended with."""
    lines = [
        "| script | step, ms | plain, samples/s | one thread, times | asp, times | bsp, times | "
        "ends with | plain | asp | bsp |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = {(row["script"], row["contender"]): row for row in result["rows"]}
    ratios = {(row["script"], row["ours"]): row["ratio"] for row in result["ratios"]}
    for name in dict.fromkeys(script for script, _ in rows):
        plain = rows[name, PLAIN]
        step = f"{plain['step_s'] * 1e3:.2f}" if plain["step_s"] else "-"
        reached = [f"{rows[name, one]['reached']:.4g}" for one in (PLAIN, ASP, BSP)]
        times = [f"{ratios[name, one]:.2f}" for one in (ASP, BSP)]
        times = [f"{rows[name, ONE_THREAD]['median'] / plain['median']:.2f}", *times]
        cells = [f"`{name}.py`", step, f"{plain['median']:,.0f}", *times, plain["figure"], *reached]
        lines.append(f"| {' | '.join(cells)} |")
    idle = sum(
        rows[name, ONE_THREAD]["median"] >= rows[name, PLAIN]["median"]
        for name, one in rows
        if one == PLAIN
    )
    return [
        *lines,
        "",
        f"In {idle} of {len(rows) // 4} scripts one thread is as fast as all cores, or faster: "
        "`plain` leaves a core idle there, and any second process would be a gain.",
    ]


TABLE = Table("scripts", "performance.md", _lines)


if __name__ == "__main__":
    TABLE.write()
