"""Draws the plots of docs/ from the result files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from gadei_ps.show.counts import counted

Row = dict[str, Any]
Result = dict[str, Any]
Drawing = Callable[[Result, Any], None]
DRAWN: dict[str, Drawing] = {}


OURS = "gadei-ps"
COLOURS = {OURS: "tab:red", "limit": "black"}


def _drawn(name: str) -> Callable[[Drawing], Drawing]:
    """Marks the function that draws the plot of this result file."""

    def keep(function: Drawing) -> Drawing:
        DRAWN[name] = function
        return function

    return keep


def _lines(
    axes: Any, rows: Iterable[Row], by: str, where: Mapping[str, Any], *, scale: float = 1.0
) -> None:
    """Draws a line for each contender: its median over `by`, with other parameters fixed."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if by in row and all(row.get(key) == value for key, value in where.items()):
            found.setdefault(row["contender"], []).append((row[by], row["median"] * scale))
    for name, points in found.items():
        points.sort()
        style = {"linestyle": "--"} if name == "limit" else {"marker": "o", "markersize": 3}
        axes.plot(*zip(*points, strict=True), label=name, color=COLOURS.get(name), **style)
    axes.set_xscale("log")


@_drawn("nlc")
def _nlc(result: Result, figure: Any) -> None:
    sets = list(dict.fromkeys(row["set"] for row in result["rows"]))
    learners = sorted({row["learners"] for row in result["rows"]})
    axes = figure.subplots(len(learners), len(sets), sharex=True, squeeze=False)
    for i, count in enumerate(learners):
        for k, name in enumerate(sets):
            where = {"set": name, "learners": count}
            _lines(axes[i][k], result["rows"], "mini_batch", where)
            axes[i][k].set_title(f"{name}, {counted(count, 'learner')}", fontsize=9)
            axes[i][k].set_yscale("log")
            axes[i][k].set_ylabel("samples/s")
    for axis in axes[-1]:
        axis.set_xlabel("mini-batch")
    axes[-1][0].legend(fontsize=6)


@_drawn("apply")
def _apply(result: Result, figure: Any) -> None:
    kinds = list(dict.fromkeys(row["optimizer"] for row in result["rows"]))
    axes = figure.subplots(2, -(-len(kinds) // 2), sharex=True)
    for axis, kind in zip(axes.flat, kinds, strict=False):
        _lines(axis, _per_byte(result["rows"]), "bytes", {"optimizer": kind, "wire": "float32"})
        halves = [
            {**row, "contender": "gadei-ps, bfloat16"}
            for row in _per_byte(result["rows"])
            if row["contender"] == OURS and row["wire"] == "bfloat16"
        ]
        _lines(axis, halves, "bytes", {"optimizer": kind})
        axis.set_title(kind, fontsize=9)
        axis.set_ylabel("ns per value", fontsize=8)
    axes.flat[0].legend(fontsize=6)


def _per_byte(rows: Iterable[Row]) -> list[Row]:
    """Nanoseconds for each float32 of the weights."""
    return [{**row, "median": row["median"] / row["bytes"] * 4e9} for row in rows]


@_drawn("ingest")
def _ingest(result: Result, figure: Any) -> None:
    learners = sorted({row["learners"] for row in result["rows"]})
    axes = figure.subplots(1, len(learners), sharey=True, squeeze=False)[0]
    for axis, count in zip(axes, learners, strict=True):
        _lines(axis, result["rows"], "bytes", {"learners": count}, scale=1e-9)
        axis.set_title(counted(count, "learner"), fontsize=9)
        axis.set_xlabel("bytes of the model")
    axes[0].set_ylabel("GB/s of gradients applied")
    axes[0].legend(fontsize=6)


@_drawn("latency")
def _latency(result: Result, figure: Any) -> None:
    axes = figure.subplots(1, 2)
    for axis, mode in zip(axes, ("spinning", "asleep"), strict=True):
        rows = [row for row in result["rows"] if row["mode"] == mode]
        names = list(dict.fromkeys(row["contender"] for row in rows))
        for quantile, shade in (("p99", 0.35), ("p50", 1.0)):
            values = [
                next(
                    row["median"] * 1e6
                    for row in rows
                    if row["contender"] == name and row["quantile"] == quantile
                )
                for name in names
            ]
            axis.barh(names, values, alpha=shade, color="tab:red", label=quantile)
        axis.set_xscale("log")
        axis.set_xlabel("us, a 4 KB push until it is applied")
        axis.set_title(mode, fontsize=9)
        axis.legend(fontsize=6)


@_drawn("time_to_accuracy")
def _time_to_accuracy(result: Result, figure: Any) -> None:
    sets = list(dict.fromkeys(row["set"] for row in result["rows"]))
    axes = figure.subplots(1, len(sets), squeeze=False)[0]
    for axis, name in zip(axes, sets, strict=True):
        for row in result["rows"]:
            if row["set"] == name:
                points = [(one["seconds"], one["validation_accuracy"]) for one in row["curve"]]
                who = row["contender"]
                axis.plot(*zip(*points, strict=True), label=who, color=COLOURS.get(who))
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("s of training")
    axes[0].set_ylabel("accuracy on the held-out tenth")
    axes[0].legend(fontsize=6)


@_drawn("scale")
def _scale(result: Result, figure: Any) -> None:
    axes = figure.subplots(1, 3)
    for axis, by in zip(axes, ("bytes", "learners", "shards"), strict=True):
        points = sorted(
            (row[by], row["median"] * 1e6)
            for row in result["rows"]
            if row.get("series") == by and row["unit"] == "s"
        )
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color="tab:red")
        axis.set_xscale("log")
        axis.set_xlabel(by)
        if by == "bytes":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    axes[0].set_ylabel("us per gradient applied")


@_drawn("gpu-timeline")
def _gpu_timeline(result: Result, figure: Any) -> None:
    rows = [row for row in result["rows"] if "lanes_us" in row]
    axes = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    colours = {"compute": "tab:blue", "push": "tab:red", "pull": "tab:green"}
    for axis, row in zip(axes, rows, strict=True):
        lanes = row["lanes_us"]
        for place, (name, spans) in enumerate(reversed(lanes.items())):
            widths = [(begin / 1e3, (end - begin) / 1e3) for begin, end in spans]
            axis.broken_barh(widths, (place - 0.4, 0.8), color=colours[name])
        axis.set_yticks(range(len(lanes)), list(reversed(lanes)))
        axis.set_title(f"{row['network']}, mini-batch {row['mini_batch']}", fontsize=9)
    axes[-1].set_xlabel("ms")


def draw(results: Path, directory: Path, names: Iterable[str] | None = None) -> Iterator[Path]:
    """Draws the plots of all result files that exist, or of `names`. Yields the files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, function in DRAWN.items():
        source = results / f"{name}.json"
        if source.exists() and (names is None or name in names):
            figure = pyplot.figure(figsize=(8, 4.5), layout="constrained")
            function(json.loads(source.read_text()), figure)
            path = directory / f"{name}.svg"
            # With this salt, the same figures give the same file.
            with matplotlib.rc_context({"svg.hashsalt": name}):
                figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
            yield path
