"""`make reproduce`: repeats what the papers report, and writes docs/reproduction*.md.

    python -m gadei_ps.benchmarks.reproduce [--quick] [--write] [--redraw] [PART]...

Each part runs in its own process and writes a result file. The pages are made of all
result files. `--write`: only writes the pages. `--redraw`: only draws the plots again whose figures
are in the result files. `--quick`: small sizes for a trial; writes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

import matplotlib

from gadei_ps.benchmarks import suite
from gadei_ps.benchmarks.common import machine
from gadei_ps.benchmarks.reproduce import part
from gadei_ps.benchmarks.reproduce.conclusions import CONCLUSIONS
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.machine import process
from gadei_ps.show import plot_style

PAGES = {
    "reproduction": ("staleness", "sync_accuracy", "groups", "validation"),
    "reproduction-elastic": ("zipline_table", "elastic_accuracy", "elastic_loss"),
    "reproduction-cutoff": (
        "cutoff_cluster",
        "order_statistics",
        "real_traces",
        "prediction_cost",
        "cutoff_loss",
    ),
    "reproduction-hetpipe": ("wsp_staleness", "virtual_accuracy"),
}
PARTS = tuple(name for names in PAGES.values() for name in names)
DOCS = part.ROOT / "docs"
HEADS = {
    "reproduction": """# Reproduction of the papers

Measurements of what the papers on synchronization models and worker groups report:
[ElasticBSP](reproduction-elastic.md), [Cutoff SGD](reproduction-cutoff.md),
[HetPipe](reproduction-hetpipe.md); GaDei's staleness, all models beside each other, worker groups
and the simulator are on this page. GaDei's accuracies, speed-ups and bandwidths (Tables 1 to 8,
Figures 3 to 9) have not been repeated.

`make reproduce` measures all parts and writes these pages; `python -m gadei_ps.benchmarks.reproduce
PART` measures one part. All figures behind a table are in `benchmarks/results/reproduce_PART.json`.
Machine and commit stand below each part. The history has no commit cb91166. In the column
"paper, or target", a target is this project's, where the paper has no figure.

The papers: Zhao et al. 2019, *Elastic Bulk Synchronous Parallel Model for Distributed Deep
Learning*; Teng and Wood 2018, *High Throughput Synchronous Distributed Stochastic Gradient
Descent*; Park et al. 2020, *HetPipe*, after the thesis *Efficient Distributed DNN Training*; Zhang
et al. 2016, *GaDei*; Yan and Shao, *Asynchronous Distributed Data Parallelism for Machine
Learning*.
""",
    "reproduction-elastic": """# Reproduction: ElasticBSP

What Zhao et al. 2019 report, measured here. [Reproduction](reproduction.md) explains the tables.
""",
    "reproduction-cutoff": """# Reproduction: Cutoff SGD

What Teng and Wood 2018 report, measured here. [Reproduction](reproduction.md) explains the tables.
""",
    "reproduction-hetpipe": """# Reproduction: HetPipe

What Park et al. 2020 report, measured here. [Reproduction](reproduction.md) explains the tables.
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Repeats what the papers report.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="the pages only")
    parser.add_argument("--redraw", action="store_true", help="plots from stored results only")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; give some of {', '.join(PARTS)}")
    if options.redraw:
        redraw(options.parts or PARTS)
        return
    if options.here:
        _run(options.parts[0], options.quick)
        return
    if not options.write:
        for name in options.parts or PARTS:
            print(f"{name} ...", flush=True)
            command = process.module_command("gadei_ps.benchmarks.reproduce", "--here", name)
            subprocess.run(command + ["--quick"] * options.quick, check=True)
    if not options.quick:
        for path, text in documents().items():
            path.write_text(text)
            print(path)


def _run(name: str, quick: bool) -> None:
    """Run one part in this process."""
    matplotlib.use("Agg")
    matplotlib.rcParams.update(plot_style.STYLE)
    if quick:
        part.PLOTS = part.scratch()
    facts = {  # before plots are drawn, which are files of the commit
        "machine": machine(),
        "commit": suite.commit(),
        "command": f"python -m gadei_ps.benchmarks.reproduce {name}",
    }
    begin = time.monotonic()
    found: Part = importlib.import_module(f"gadei_ps.benchmarks.reproduce.{name}").run(quick)
    for row in found.rows:
        print(f"  {row.what}: {row.ours}  [{row.paper}]  {row.why}")
    print(f"  {time.monotonic() - begin:.0f} s", flush=True)
    if not quick:
        found.write(name, facts)


def redraw(names: Iterable[str]) -> None:
    """Draw the plots of these parts from their result files, where the files have the figures."""
    for name in names:
        module = importlib.import_module(f"gadei_ps.benchmarks.reproduce.{name}")
        if hasattr(module, "draw"):
            with matplotlib.rc_context(plot_style.STYLE):
                module.draw(part.read(name)[0].data)


def documents() -> dict[Path, str]:
    """Return the text of each page, from the result files."""
    return {
        DOCS / f"{page}.md": "\n".join([HEADS[page], *map(_measured, names)])
        for page, names in PAGES.items()
    }


def _measured(name: str) -> str:
    if not (part.RESULTS / f"reproduce_{name}.json").exists():
        return f"## {name}\n\nNot measured yet.\n"
    return _section(name, *part.read(name))


def _section(name: str, found: Part, facts: dict[str, object]) -> str:
    paragraphs = [textwrap.fill(one, 100, break_on_hyphens=False) for one in _paragraphs(found)]
    lines = [f"## {found.title}", "", "\n\n".join(paragraphs), ""]
    if any(row.paper for row in found.rows):
        lines += ["| | paper, or target | ours | difference |", "| --- | --- | --- | --- |"]
        lines += [f"| {_cell(row, 'paper')} |" for row in found.rows]
    else:
        lines += ["| | ours | |", "| --- | --- | --- |"]
        lines += [f"| {_cell(row)} |" for row in found.rows]
    lines.append("")
    if name in CONCLUSIONS:
        lines += [textwrap.fill(CONCLUSIONS[name](found.data), 100, break_on_hyphens=False), ""]
    for plot in found.plots:
        lines += [f"![{found.title}](plots/{plot})", ""]
    machine_ = facts["machine"]
    assert isinstance(machine_, dict)
    lines += [
        f"`{facts['command']}`, commit {facts['commit']}, {machine_['cores']} cores of "
        f"{machine_['cpu']}.",
        "",
    ]
    return "\n".join(lines)


def _paragraphs(found: Part) -> list[str]:
    return [" ".join(one.split()) for one in found.text.split("\n\n")]


def _cell(row: Row, *more: str) -> str:
    cells = [row.what, *(getattr(row, name) for name in more), row.ours, row.why]
    return " | ".join(cell.replace("|", "\\|") for cell in cells)


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
