"""A job's history as a table, and as a picture."""

from __future__ import annotations

import datetime
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gadei_ps.errors import UsageError
from gadei_ps.show.optimizer import text
from gadei_ps.show.tables import table

Line = Mapping[str, Any]
NEEDED = "plot needs matplotlib: pip install 'gadei-ps[plot]'"
COLOURS = {"loss": "tab:blue", "samples_per_s": "tab:orange", "accuracy": "tab:green"}


def shown(lines: Sequence[Line]) -> RenderableType:
    """`history`: a row for each line; of an event, what it tells."""
    if not lines:
        return Text("no history yet", style="dim")
    numbers = ("version", "loss", "samples/s", "staleness", "learners")
    made = table("time", *numbers, "", right=numbers)
    for one in lines:
        made.add_row(
            _time(one["time"]),
            _number(one.get("version"), ",.0f"),
            _number(one.get("loss"), ".5g"),
            _number(one.get("samples_per_s"), ",.0f"),
            _number(one.get("staleness"), ".2f"),
            _number(one.get("learners"), ".0f"),
            _event(one),
        )
    return made


def _time(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "?"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any, form: str) -> str:
    return format(value, form) if _is_number(value) else ""


def _event(line: Line) -> str:
    parts = []
    if isinstance(changed := line.get("set"), dict):
        parts += [
            f"set {name} {text(pair[0])} -> {text(pair[1])}"
            for name, pair in changed.items()
            if isinstance(pair, list) and len(pair) == 2
        ]
    if isinstance(measured := line.get("measured"), dict):
        parts += [f"{name} {text(value)}" for name, value in measured.items()]
    return ", ".join(parts)


def check_plot() -> None:
    """Raises UsageError if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError(NEEDED) from None


def plot(lines: Sequence[Line], title: str) -> str:
    """Loss and samples a second over time and versions, as SVG. Raises UsageError."""
    check_plot()
    import matplotlib
    from matplotlib.figure import Figure

    points = [one for one in lines if "samples" in one]
    if not points:
        raise UsageError("there is nothing to draw yet: the history has no point")
    begin = min(one["time"] for one in lines)
    figure = Figure(figsize=(10, 6), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    measured = [
        {**one, "accuracy": one["measured"]["accuracy"]}
        for one in lines
        if isinstance(one.get("measured"), dict) and "accuracy" in one["measured"]
    ]
    for column, (by, label) in enumerate((("time", _unit(lines)), ("version", "version"))):
        offset, scale = (begin, _scale(lines)) if by == "time" else (0, 1.0)
        upper, lower = axes[0][column], axes[1][column]
        _draw(upper, points, "loss", by, offset, scale)
        _draw(lower, points, "samples_per_s", by, offset, scale)
        if measured:
            right = upper.twinx()
            _draw(right, measured, "accuracy", by, offset, scale, marker="o")
            right.set_ylabel("accuracy" if column else "")
        for one in lines:
            if "set" in one and _is_number(one.get(by)):
                for part in (upper, lower):
                    part.axvline((one[by] - offset) / scale, color="grey", linestyle=":")
        lower.set_xlabel(label)
    axes[0][0].set_ylabel("loss of the learners")
    axes[1][0].set_ylabel("samples/s")
    made = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "gadei-ps"}):  # the same lines give the same file
        figure.savefig(made, format="svg", metadata={"Date": None})
    return made.getvalue()


def _draw(
    axes: Any,
    lines: Iterable[Line],
    name: str,
    by: str,
    offset: float,
    scale: float,
    marker: str = "",
) -> None:
    there = [one for one in lines if _is_number(one.get(name)) and _is_number(one.get(by))]
    across = [(one[by] - offset) / scale for one in there]
    axes.plot(across, [one[name] for one in there], color=COLOURS[name], marker=marker, linewidth=1)


def _scale(lines: Sequence[Line]) -> float:
    """Seconds of the unit in which the whole of it is a number to be read."""
    times = [one["time"] for one in lines]
    took = max(times) - min(times)
    return 1.0 if took < 300 else 60.0 if took < 4 * 3600 else 3600.0


def _unit(lines: Sequence[Line]) -> str:
    return {1.0: "s", 60.0: "min", 3600.0: "h"}[_scale(lines)]
