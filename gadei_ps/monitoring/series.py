"""Histories as columns of numbers for charts, as CSV, and as a picture."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gadei_ps import metrics
from gadei_ps.errors import UsageError
from gadei_ps.monitoring import following
from gadei_ps.show import plot_style
from gadei_ps.show.history_view import event_text, speed_of, with_speed
from gadei_ps.show.progress import NO_LOSS
from gadei_ps.show.strict_json import is_number
from gadei_ps.storage import history_file

PLACE = ("time", "version")
# They only grow: their rates are drawn.
COUNTERS = tuple(one.name for one in metrics.JOB if one.in_history)
SPEEDS = ("samples_per_s", "gradients_per_s")  # of which a chart shows one
OWN = {*PLACE, *COUNTERS, *SPEEDS, "loss", "staleness", "queue", "learners", "event"}
"""Names of the job's own curves and columns."""
KINDS = ("event", *(name for name in history_file.EVENTS if name != "event"))
GAP_SHARE, GAP_STEPS = 0.01, 5
"""A curve over time is interrupted where no line was written for more than this share of the whole
time, and for more than so many usual distances between two lines."""
MOST_DRAWN = 1e300  # matplotlib adds margins, which must not overflow
MOST_MARKED = 100  # points with a mark of their own, which would hide a longer curve
UNITS = (("s", 1, 300), ("min", 60, 4 * 3600), ("h", 3600, math.inf))
"""Units of time, their lengths (s), and from which duration on they are not readable any more."""
COLOURS = {"loss": "tab:blue", "queue": "tab:purple", **dict.fromkeys(SPEEDS, "tab:orange")}
Line = Mapping[str, Any]


def numbers(line: Line) -> dict[str, float]:
    """Return what a chart shows of a line: by name, what was reported and measured included."""
    if any(name in line for name in history_file.EVENTS if name != "measured"):
        return {}
    found = {name: value for name, value in line.items() if name not in {*PLACE, *COUNTERS}}
    return {n: float(value) for n, value in found.items() if is_number(value)} | scalars(line)


def scalars(line: Line) -> dict[str, float]:
    """Return what learners have reported and users have measured, by name.

    One with a name of OWN gets another name: its values must not mix with the job's.
    """
    found = following.scalars(line)
    if "measured" in line:
        found.pop("epoch", None)  # it counts, as the axes do
    return {f"reported/{name}" if name in OWN else name: one for name, one in found.items()}


def event(line: Line) -> dict[str, Any] | None:
    """Return time, version, kind and text of an event; None for a point.

    is_exact: whether the version is that of the event. Others have the version at which the
    watchdog noticed them, up to a second later.
    """
    text = event_text(line)
    kind = next((name for name in KINDS if name in line), None)
    if not text or kind is None or kind == "measured":
        return None
    named = str(line["event"]) if kind == "event" else kind
    changed = line.get("set")
    is_exact = kind == "ended" or (isinstance(changed, dict) and "sync" not in changed)
    place = {name: line.get(name) for name in PLACE}
    return place | {"kind": named, "text": text, "is_exact": is_exact}


def columns(lines: Sequence[Line]) -> dict[str, Any]:
    """Return `time`, `version`, `series` by name, each as long as `time`, and `events`."""
    rows = [(one, numbers(one)) for one in with_speed(lines)]
    rows = [(one, found) for one, found in rows if found]
    names = sorted({name for _, found in rows for name in found})
    if "samples_per_s" in names and not any(one.get("samples") for one, _ in rows):
        names.remove("samples_per_s")
    elif "gradients_per_s" in names and "samples_per_s" in names:
        names.remove("gradients_per_s")
    return {
        "time": [round(one["time"], 2) for one, _ in rows],
        "version": [at if is_number(at := one.get("version")) else None for one, _ in rows],
        "series": {name: [_short(found.get(name)) for _, found in rows] for name in names},
        "events": [made for one in lines if (made := event(one)) is not None],
    }


def _short(value: float | None) -> float | None:
    """Round to the nine digits of a float32."""
    return None if value is None else float(f"{value:.9g}")


def as_csv(lines: Iterable[Line]) -> str:
    """Return a row for each line, with a column for each number, and the text of events."""
    rows = [
        {name: value for name, value in one.items() if is_number(value)}
        | numbers(one)
        | ({"event": text} if (text := event_text(one)) else {})
        for one in lines
    ]
    first = [*PLACE, *COUNTERS]
    others = {name for one in rows for name in one} - {*first, "event"}
    names = [*first, *sorted(others), "event"]
    made = io.StringIO()
    writer = csv.DictWriter(made, names, restval="", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in one.items()} for one in rows)
    return made.getvalue()


def _cell(value: object) -> object:
    """Keep a spreadsheet from taking text for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" else value


def compact(value: object) -> bytes:
    """Strict JSON without spaces, in one line."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def curve(data: Mapping[str, Any], name: str, by: str) -> tuple[list[float], list[float]]:
    """Return the points of a series over `time` or `version`, with NaN where it is interrupted.

    data: of columns().
    """
    times = data["time"]
    steps = [after - before for before, after in itertools.pairwise(times)]
    longest = max(GAP_SHARE * sum(steps), GAP_STEPS * statistics.median(steps or [0.0]))
    values = data["series"].get(name, [None] * len(times))
    xs, ys = [], []
    for step, x, value in zip([0.0, *steps], data[by], values, strict=False):
        if by == "time" and step > longest:
            xs.append(x)
            ys.append(math.nan)
        if x is not None and value is not None and abs(value) < MOST_DRAWN:
            xs.append(x)
            ys.append(value)
    return xs, ys


def plot(lines: Sequence[Line], title: str) -> str:
    """Draw loss, speed and named values over time and versions, as SVG. Raises UsageError."""
    points = [one for one in lines if "samples" in one]
    if not points:
        raise UsageError("there is nothing to draw yet: the history has no point")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError("plot needs matplotlib: pip install 'gadei-ps[plot]'") from None
    data, (speed, speed_name) = columns(lines), speed_of(points)
    panels = {"loss of the learners": "loss", speed: speed_name}
    # Histories of earlier releases have no queue.
    panels |= {"queue": "queue"} if "queue" in data["series"] else {}
    panels |= {name: name for one in lines for name in scalars(one)}
    times = [one["time"] for one in lines]
    unit, length, _ = next(one for one in UNITS if max(times) - min(times) < one[2])
    with matplotlib.rc_context(plot_style.STYLE):
        figure = Figure(figsize=(10, 3 * len(panels)), layout="constrained")
        figure.suptitle(title)
        axes = figure.subplots(len(panels), 2, sharex="col", sharey="row")
    scales = (("time", unit, min(times), length), ("version", "version", 0, 1))
    for column, (by, label, begin, scale) in enumerate(scales):
        changes = [one[by] for one in data["events"] if one["kind"] == "set" and is_number(one[by])]
        for axis, name in zip(axes[:, column], panels.values(), strict=True):
            xs, ys = curve(data, name, by)
            colour = COLOURS.get(name, "tab:green")
            marker = "o" if name not in COLOURS and len(xs) <= MOST_MARKED else ""
            scaled = [(x - begin) / scale for x in xs]
            axis.plot(scaled, ys, color=colour, marker=marker, linewidth=1)
            for at in changes:
                axis.axvline((at - begin) / scale, color="grey", linestyle=":")
        axes[-1][column].set_xlabel(label)
    for axis, name in zip(axes[:, 0], panels, strict=True):
        axis.set_ylabel(name, parse_math=False)  # a reported name may have a dollar sign
    if "loss" not in data["series"]:
        for axis in axes[0]:
            axis.text(0.5, 0.5, NO_LOSS, ha="center", va="center", transform=axis.transAxes)
    return plot_style.svg(figure, "gadei-ps")
