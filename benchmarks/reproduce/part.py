"""A part of the reproduction: a module with `run(quick) -> Part`, a result file, and plots."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gadei_ps.show import plot_style

ROOT = Path(__file__).resolve().parents[2]
PLOTS = ROOT / "docs" / "plots"
RESULTS = ROOT / "benchmarks" / "results"


def save(figure: Any, name: str) -> None:
    """Save a plot into the plots' directory. The same figures give the same file."""
    from matplotlib import pyplot

    (PLOTS / name).write_text(plot_style.svg(figure, name))
    pyplot.close(figure)


def scratch() -> Path:
    """A directory for the plots of a quick run, which must not replace the others."""
    return Path(tempfile.mkdtemp(prefix="gadei-ps-plots-"))


@dataclass
class Row:
    """One figure. paper, ours: text with the unit. why: the reason of a difference, or a limit."""

    what: str
    paper: str
    ours: str
    why: str = ""


@dataclass
class Part:
    """A section of docs/reproduction.md or of the pages beside it.

    text: Markdown before the table; says what was done. plots: names of SVG files in docs/plots.
    data: all figures behind the rows.
    """

    title: str
    text: str
    rows: list[Row] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def write(self, name: str, facts: dict[str, Any]) -> Path:
        """Write benchmarks/results/reproduce_NAME.json. facts: machine, commit, command."""
        path = RESULTS / f"reproduce_{name}.json"
        path.write_text(json.dumps({**facts, **asdict(self)}, indent=1) + "\n")
        return path


def read(name: str) -> tuple[Part, dict[str, Any]]:
    """Read what write() wrote: the part and the facts."""
    told = json.loads((RESULTS / f"reproduce_{name}.json").read_text())
    rows = [Row(**row) for row in told.pop("rows")]
    parts = {key: told.pop(key) for key in ("title", "text", "plots", "data")}
    return Part(rows=rows, **parts), told
