"""Histories as columns of numbers for charts, as CSV, and as they grow."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gadei_ps import metrics
from gadei_ps.errors import UsageError
from gadei_ps.machine import user_files
from gadei_ps.monitoring import following
from gadei_ps.show.history_view import event_text, with_speed
from gadei_ps.storage import history_file

PLACE = ("time", "version")
# They only grow: their rates are drawn.
COUNTERS = tuple(one.name for one in metrics.JOB if one.in_history)
KINDS = ("event", *(name for name in history_file.EVENTS if name != "event"))
Line = Mapping[str, Any]


def read(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a history. Raises UsageError."""
    try:
        with user_files.open_file(path) as file:
            return history_file.parsed(file.read(history_file.MOST_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def numbers(line: Line) -> dict[str, float]:
    """Return what a chart shows of a line: by name, what was reported and measured included."""
    if any(name in line for name in history_file.EVENTS if name != "measured"):
        return {}
    found = {name: value for name, value in line.items() if name not in {*PLACE, *COUNTERS}}
    return {n: float(value) for n, value in found.items() if _is_finite(value)} | scalars(line)


def scalars(line: Line) -> dict[str, float]:
    """Return what learners have reported and users have measured, by name."""
    found = following.scalars(line)
    found.pop("epoch", None)  # it counts, as the axes do
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _is_finite(value: object) -> bool:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return good and math.isfinite(value)  # type: ignore[arg-type]


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
        "version": [one.get("version") for one, _ in rows],
        "series": {name: [_short(found.get(name)) for _, found in rows] for name in names},
        "events": [made for one in lines if (made := event(one)) is not None],
    }


def _short(value: float | None) -> float | None:
    """Round to six digits, which a chart cannot show either."""
    return None if value is None else float(f"{value:.6g}")


def as_csv(lines: Iterable[Line]) -> str:
    """Return a row for each line, with a column for each number, and the text of events."""
    rows = [
        {name: value for name, value in one.items() if _is_finite(value)}
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
