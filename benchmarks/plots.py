"""Draws the plots of docs/ from the result files.

python -m gadei_ps.benchmarks.plots
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from gadei_ps.benchmarks import suite
from gadei_ps.benchmarks.failover import BOTH, CONTROL_ROW, NEXT
from gadei_ps.benchmarks.kills import KILLS, UNDISTURBED
from gadei_ps.job.faults import Role
from gadei_ps.show import plot_style
from gadei_ps.show.counts import counted

ON_THE_FRONT = ("kills",)  # of README, which names the variant of each theme
Row = dict[str, Any]
Result = dict[str, Any]
Drawing = Callable[[Result, Any], None]
DRAWN: dict[str, Drawing] = {}


OURS = "gadei-ps"
COLOURS = {
    OURS: "tab:red",
    "gadei-ps, weights in place": "darkred",
    KILLS: "tab:red",
    UNDISTURBED: "silver",
    CONTROL_ROW: "silver",
    BOTH: "darkred",
    "DDP under torchrun": "tab:green",
    "torchft": "tab:purple",
    "limit": "tab:gray",
    "Hogwild": "tab:blue",
    "Hogwild sparse": "tab:cyan",
    "DDP gloo": "tab:green",
    "gloo": "tab:green",
    "torch single": "tab:orange",
    "torch single sparse": "tab:brown",
    "MPI": "tab:purple",
    "MPI one-sided": "tab:purple",
    "MPI two-sided": "tab:pink",
    "Ray actor": "tab:olive",
    "iceoryx2": "navy",
    "Pipe": "tab:blue",
    "ZeroMQ": "teal",
    "Queue": "goldenrod",
}
"""Colours of all plots: red is gadei-ps, and no two contenders of a plot share a colour."""
NAMES = {
    OURS: "gadei-ps (its own linear kernel)",
    "DDP gloo": "DDP (gloo, dense embedding)",
    "limit": "limit (forward and backward, torch's kernel)",
    BOTH: "gadei-ps: both servers",
    CONTROL_ROW: "gadei-ps: no death",
    "DDP under torchrun": "DDP under torchrun: a worker",
    "torchft": "torchft, time-out 5 s: a worker",
}
"""Labels of contenders whose name alone would mislead."""


def _drawn(name: str) -> Callable[[Drawing], Drawing]:
    """Register the function that draws the plot of this result file."""

    def keep(function: Drawing) -> Drawing:
        DRAWN[name] = function
        return function

    return keep


def _lines(
    axes: Any, rows: Iterable[Row], by: str, where: Mapping[str, Any], *, scale: float = 1.0
) -> None:
    """Draw a line for each contender: its median over `by`, with other parameters fixed."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        if by in row and all(row.get(key) == value for key, value in where.items()):
            point = (row[by], row["median"] * scale, row["spread"])
            found.setdefault(row["contender"], []).append(point)
    for name, points in found.items():
        points.sort()
        style = {"linestyle": "--"} if name == "limit" else {"marker": "o", "markersize": 3}
        places, medians, spreads = zip(*points, strict=True)
        axes.plot(places, medians, label=name, color=COLOURS[name], **style)
        _spread(axes.vlines, places, medians, spreads, color=COLOURS[name])
    axes.set_xscale("log")


def _spread(
    draw: Any,
    places: Iterable[Any],
    medians: Iterable[float],
    spreads: Iterable[float],
    **style: Any,
) -> None:
    """Draw how far the rounds lie apart, by `vlines` or `hlines` of the axis."""
    ends = [(m * (1 - s), m * (1 + s)) for m, s in zip(medians, spreads, strict=True)]
    draw(places, *zip(*ends, strict=True), **{"linewidth": 0.6, **style})


def _legend(figure: Any, axes: Iterable[Any], columns: int = 4) -> None:
    """Draw one legend below all axes, with the contenders of each."""
    shown: dict[str, Any] = {}
    for axis in axes:
        handles, names = axis.get_legend_handles_labels()
        shown |= dict(zip(names, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns)


@_drawn("kills")
def _kills(result: Result, figure: Any) -> None:
    """Draw the loss of both runs, and below it an instant for each kill."""
    figure.set_size_inches(8, 3.8)
    axes, marks = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    calm, killed = result["rows"]
    for row, style in ((calm, {"linewidth": 5}), (killed, {"linewidth": 1.5})):
        points = zip(*row["curve"], strict=True)
        axes.plot(*points, label=row["contender"], color=COLOURS[row["contender"]], **style)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("loss on rows held out")
    axes.legend(loc="upper right")
    roles = (Role.LEARNER, Role.SERVER, Role.WATCHDOG)
    instants = [[second for second, who in killed["kills"] if who == role] for role in roles]
    marks.eventplot(instants, linelengths=0.7, linewidths=1.2, colors=COLOURS[KILLS])
    names = [f"{counted(len(some), role)}" for role, some in zip(roles, instants, strict=True)]
    marks.set_yticks(range(len(roles)), names)
    marks.set_ylim(-0.6, len(roles) - 0.4)
    marks.set_xlabel("time, s")
    marks.set_ylabel("killed")
    marks.grid(visible=False)
    wrong = killed["lost"] + killed["applied_twice"]
    axes.set_title(
        f"{len(killed['kills'])} processes killed; {killed['gradients']:,} gradients, "
        f"{'each applied exactly once' if not wrong else f'{wrong} of them lost or repeated'}"
    )


@_drawn("failover")
def _failover(result: Result, figure: Any) -> None:
    """Draw the time to the next gradient, for each size of the weights."""
    figure.set_size_inches(8, 3)
    sizes = sorted({row["bytes"] for row in result["rows"]})
    panels = figure.subplots(1, len(sizes), sharey=True, sharex=True, squeeze=False)[0]
    for axis, size in zip(panels, sizes, strict=True):
        rows = [row for row in result["rows"] if row["bytes"] == size and row["what"] == NEXT]
        rows.sort(key=lambda row: -row["p50"])
        for place, row in enumerate(rows):
            name = row["contender"]
            axis.plot((row["p50"], row["p99"]), (place, place), color=COLOURS[name], linewidth=1)
            axis.plot(row["p50"], place, marker="o", color=COLOURS[name])
        axis.set_yticks(range(len(rows)), [_of_death(row["contender"]) for row in rows])
        axis.set_xscale("log")
        axis.set_xlabel("time to the next gradient, s\n(dot: median; line: to the 99th percentile)")
        axis.set_title(f"weights of {size / 1e6:.0f} MB")


def _of_death(contender: str) -> str:
    """Return the contender and the process that is killed."""
    return "gadei-ps: the server" if contender == OURS else NAMES[contender]


@_drawn("nlc")
def _nlc(result: Result, figure: Any) -> None:
    """Draw bars by mini-batch; the thin lines are the spread of the rounds."""
    figure.set_size_inches(8, 4)
    axes = figure.subplots()
    rows = [one for one in result["rows"] if (one["set"], one["learners"]) == ("mr", 2)]
    sizes = sorted({row["mini_batch"] for row in rows} & {1, 8, 32})
    _bars(axes, rows, sizes)
    axes.set_title("sentence classifier on MR, 2 learners on 2 cores")
    axes.set_ylabel("samples/s")
    axes.set_xlabel("mini-batch")
    axes.grid(visible=False, axis="x")
    _legend(figure, [axes], 3)


def _bars(axes: Any, rows: list[Row], sizes: list[int]) -> None:
    """A group of bars for each mini-batch, a bar for each contender."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        found = {row["mini_batch"]: row for row in rows if row["contender"] == name}
        taken = [size for size in sizes if size in found]
        bars = axes.bar(
            [sizes.index(size) + (place - (len(names) - 1) / 2) * width for size in taken],
            [found[size]["median"] for size in taken],
            width,
            yerr=[found[size]["median"] * found[size]["spread"] for size in taken],
            error_kw={"elinewidth": 0.6},
            color=COLOURS[name],
            label=NAMES.get(name, name),
        )
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=7, padding=2)
    axes.set_xticks(range(len(sizes)), map(str, sizes))
    axes.set_ylim(bottom=0)


@_drawn("ingest")
def _ingest(result: Result, figure: Any) -> None:
    learners = sorted({row["learners"] for row in result["rows"]})
    axes = figure.subplots(1, len(learners), sharey=True, squeeze=False)[0]
    for axis, count in zip(axes, learners, strict=True):
        _lines(axis, result["rows"], "bytes", {"learners": count}, scale=1e-9)
        axis.set_title(counted(count, "learner"))
        axis.set_xlabel("model, bytes")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("gradients applied, GB/s\n(thin lines: spread of the rounds)")
    _legend(figure, axes)


@_drawn("latency")
def _latency(result: Result, figure: Any) -> None:
    """Draw points, since lengths of bars mean nothing on a logarithmic axis."""
    axes = figure.subplots(1, 2)
    for axis, mode in zip(axes, ("spinning", "asleep"), strict=True):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        found = {(row["contender"], row["quantile"]): row["median"] * 1e6 for row in rows}
        spread = {row["contender"]: row["spread"] for row in rows if row["quantile"] == "p50"}
        names = sorted({name for name, _ in found}, key=lambda name: -found[name, "p50"])
        for place, name in enumerate(names):
            ends = found[name, "p50"], found[name, "p99"]
            axis.plot(ends, (place, place), color=COLOURS[name], linewidth=1)
            axis.plot(*ends[:1], place, marker="o", color=COLOURS[name])
            band = {"color": COLOURS[name], "linewidth": 10, "alpha": 0.3}
            _spread(axis.hlines, [place], ends[:1], [spread[name]], **band)
            axis.plot(*ends[1:], place, marker="|", color=COLOURS[name], markersize=9)
        axis.set_yticks(range(len(names)), names)
        axis.set_xscale("log")
        axis.set_xlabel("time, µs\n(dot: median; band: its spread; end: p99)")
        axis.set_title(f"gadei-ps {mode}")


DISTURBED = "torch single sparse"  # in time_to_accuracy.json: see docs/performance.md


@_drawn("time_to_accuracy")
def _time_to_accuracy(result: Result, figure: Any) -> None:
    sets = list(dict.fromkeys(row["set"] for row in result["rows"]))
    axes = figure.subplots(1, len(sets), squeeze=False)[0]
    for axis, name in zip(axes, sets, strict=True):
        for row in result["rows"]:
            if row["set"] == name and row["contender"] != DISTURBED:
                points = [(one["seconds"], one["validation_accuracy"]) for one in row["curve"]]
                who = row["contender"]
                axis.plot(*zip(*points, strict=True), label=NAMES.get(who, who), color=COLOURS[who])
        axis.set_title(name)
        axis.set_xlabel("training time, s (one run)")
    axes[0].set_ylabel("accuracy on the held-out tenth")
    _legend(figure, axes)


@_drawn("scale")
def _scale(result: Result, figure: Any) -> None:
    axes = figure.subplots(1, 3)
    for axis, by in zip(axes, ("bytes", "learners", "shards"), strict=True):
        points = sorted(
            (row[by], row["median"] * 1e6, row["spread"])
            for row in result["rows"]
            if row.get("series") == by and row["unit"] == "s"
        )
        counts, values, spreads = zip(*points, strict=True)
        style = {"marker": "o", "markersize": 3, "color": COLOURS[OURS]}
        if by == "bytes":
            axis.loglog(counts, values, **style)
        else:
            counts = tuple(map(str, counts))
            axis.plot(counts, values, **style)
            axis.set_ylim(0, 1.2 * max(values))
        _spread(axis.vlines, counts, values, spreads, color=COLOURS[OURS])
        axis.set_xlabel("weights, bytes" if by == "bytes" else by)
    axes[0].set_ylabel("time per gradient, µs\n(thin lines: spread of the rounds)")


@_drawn("gpu-timeline")
def _gpu_timeline(result: Result, figure: Any) -> None:
    """Draw the lanes of the middle steps of each network: the first and the last ones differ."""
    rows = [row for row in result["rows"] if "lanes_us" in row]
    axes = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    figure.set_size_inches(8, 1 + 1.7 * len(rows))
    colours = {"compute": "tab:blue", "push": "tab:orange", "pull": "tab:green"}
    for axis, row in zip(axes, rows, strict=True):
        lanes = row["lanes_us"]
        whole = max((end for spans in lanes.values() for _, end in spans), default=0.0)
        first, last = 0.3 * whole, 0.7 * whole
        for place, (name, spans) in enumerate(reversed(lanes.items())):
            cut = [(max(begin, first), min(end, last)) for begin, end in spans]
            widths = [((a - first) / 1e3, (b - a) / 1e3) for a, b in cut if a < b]
            axis.broken_barh(widths, (place - 0.4, 0.8), color=colours[name], linewidth=0)
        axis.set_xlim(0, (last - first) / 1e3 or 1)
        axis.set_yticks(range(len(lanes)), list(reversed(lanes)))
        axis.set_title(f"{row['network']}, mini-batch {row['mini_batch']}")
    axes[-1].set_xlabel("time, ms")


def draw(results: Path, directory: Path, names: Iterable[str] | None = None) -> Iterator[Path]:
    """Draw the plots of all result files that exist, or of `names`. Yields the files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, function in DRAWN.items():
        source = results / f"{name}.json"
        if source.exists() and (names is None or name in names):
            with matplotlib.rc_context(plot_style.STYLE):
                figure = pyplot.figure(figsize=(8, 4.5), layout="constrained")
                function(json.loads(source.read_text()), figure)
            text = plot_style.svg(figure, name)
            pyplot.close(figure)
            path = directory / f"{name}.svg"
            path.write_text(text)
            yield path
            if name in ON_THE_FRONT:
                (directory / f"{name}-dark.svg").write_text(plot_style.dark(text))


if __name__ == "__main__":
    for drawn in draw(suite.RESULTS, suite.RESULTS.parents[1] / "docs" / "plots"):
        print(drawn)
