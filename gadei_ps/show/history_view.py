"""A job's history as a table, and as a picture."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gadei_ps.errors import UsageError
from gadei_ps.show.counts import rate
from gadei_ps.show.optimizer_line import text
from gadei_ps.show.progress import NO_LOSS
from gadei_ps.show.tables import FittedTable, alike, when

Line = Mapping[str, Any]
NEEDED = "plot needs matplotlib: pip install 'gadei-ps[plot]'"
MOST_DRAWN = 1e300  # matplotlib adds margins, which must not overflow
LEARNER_EVENTS = {
    "attach": "attached",
    "detach": "detached",
    "death": "died",
    "eviction": "was evicted",
}


def render(lines: Sequence[Line]) -> RenderableType:
    """Lay out `history`: a row for each line; of an event, its text."""
    if not lines:
        return Text("no history yet", style="dim")
    points = with_speed(lines)
    speed, name = speed_of(points)
    losses = alike([one["loss"] if _is_number(one.get("loss")) else None for one in points])
    numbers = ("gradients", "loss", speed, "staleness", "learners")
    dispensable = ("learners", "staleness")
    made = FittedTable(
        ("time", *numbers, ""), right=numbers, whole=("time",), dispensable=dispensable
    )
    counts = any("gradients_applied" in one for one in points)
    for one, loss in zip(points, losses, strict=True):
        is_counted = not counts or "gradients_applied" in one
        made.add_row(
            when(one["time"]),
            _number(gradients(one) if is_counted else None, ",.0f"),
            loss,
            rate(one[name]) if _is_number(one.get(name)) else "",
            _number(one.get("staleness"), ".2f"),
            _number(one.get("learners"), ".0f"),
            event_text(one),
        )
    silent = any("samples" in one for one in points) and not any(losses)
    return Group(made, Text(NO_LOSS, style="dim")) if silent else made


def gradients(line: Line) -> int | None:
    """Return how many gradients had been applied at a point, or None.

    Files of earlier releases have the version alone, which counts assignments, too.
    """
    found = line.get("gradients_applied", line.get("version"))
    return found if isinstance(found, int) else None


def with_speed(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines; a point after another one also has `gradients_per_s` since then."""
    made: list[dict[str, Any]] = []
    before: tuple[float, int] | None = None
    for one in lines:
        more: dict[str, Any] = {}
        if "samples" in one and (applied := gradients(one)) is not None:
            if before is not None and one["time"] > before[0]:
                speed = max(0, applied - before[1]) / (one["time"] - before[0])
                more = {"gradients_per_s": speed}
            before = one["time"], applied
        made.append({**one, **more})
    return made


def speed_of(points: Sequence[Line]) -> tuple[str, str]:
    """Return samples/s, or gradients/s if no samples are reported; and the field that has it."""
    if any(one.get("samples") for one in points):
        return "samples/s", "samples_per_s"
    return "gradients/s", "gradients_per_s"


def runs(found: Sequence[Line], directory: str, last: int) -> RenderableType:
    """`history` without a job: the newest runs, with what `history` takes for each."""
    if not found:
        return Text(f"no run has left a history in {directory}", style="dim")
    made = FittedTable(
        ("started", "run", "state", "gradients", "result", "command"),
        right=("gradients",),
        whole=("started", "state", "result"),
        dispensable=("state",),
        cut="command",
    )
    for one in found[:last]:
        made.add_row(
            when(one["started"]),
            _name(one, directory),
            one["state"],
            f"{one['gradients']:,}",
            _result(one),
            one["command"],
        )
    told = f"gadei-ps history RUN shows one; the files are in {directory}"
    if len(found) > last:
        told = f"{len(found) - last:,} older ones: --last {len(found)}; {told}"
    return Group(made, Text(told, style="dim"))


def _name(run: Line, directory: str) -> str:
    """Return the argument of `history` for this run: the job's name, or an older file of it."""
    file = str(run["file"])
    return file.removeprefix(f"{directory}/") if file.endswith(".old.jsonl") else str(run["job"])


def _result(run: Line) -> str:
    if _is_number(run["accuracy"]):
        return f"accuracy {run['accuracy']:.4f}"
    return f"loss {run['loss']:.4g}" if _is_number(run["loss"]) else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_drawn(value: object) -> bool:
    return _is_number(value) and abs(value) < MOST_DRAWN  # type: ignore[arg-type]


def _number(value: Any, form: str) -> str:
    return format(value, form) if _is_number(value) else ""


def event_text(line: Line) -> str:
    """Describe what a line of a history says beside numbers; empty for a point."""
    parts = []
    if isinstance(changed := line.get("set"), dict):
        parts += [
            f"set {name} {text(pair[0])} -> {text(pair[1])}"
            for name, pair in changed.items()
            if isinstance(pair, list) and len(pair) == 2
        ]
    for kind in ("measured", "reported"):
        if isinstance(values := line.get(kind), dict):
            parts += [f"{name} {text(value)}" for name, value in values.items()]
    parts += [str(line[name]) for name in ("command", "ended") if isinstance(line.get(name), str)]
    if isinstance(line.get("event"), str):
        parts.append(_occurrence(line))
    return ", ".join(parts)


def _occurrence(line: Line) -> str:
    """Describe an event of a process or a checkpoint: `learner 3 died (pid 4711)`."""
    kind = line["event"]
    if kind == "failover":
        return f"failover in {_number(line.get('ms'), '.1f') or '?'} ms"
    if kind == "adoption":
        return "a new watchdog has adopted the job"
    if kind == "restored":
        return f"continues from the checkpoint of version {_number(line.get('version'), ',.0f')}"
    if kind == "checkpoint":
        return f"checkpoint of version {_number(line.get('checkpoint_version'), ',.0f')}"
    if kind in LEARNER_EVENTS:
        learner, pid = (_number(line.get(name), ".0f") for name in ("learner", "pid"))
        return f"learner {learner} {LEARNER_EVENTS[kind]} (pid {pid})"
    return str(kind)


def check_plot() -> None:
    """Raise UsageError if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError(NEEDED) from None


def plot(lines: Sequence[Line], title: str) -> str:
    """Loss, samples a second and named values over time and versions, as SVG. Raises UsageError."""
    check_plot()
    import matplotlib
    from matplotlib.figure import Figure

    points = [one for one in with_speed(lines) if "samples" in one]
    if not points:
        raise UsageError("there is nothing to draw yet: the history has no point")
    speed, speed_name = speed_of(points)
    panels: list[tuple[str, Sequence[Line], str, dict[str, Any]]] = [
        ("loss of the learners", points, "loss", {"color": "tab:blue"}),
        (speed, points, speed_name, {"color": "tab:orange"}),
        *(
            (name, found, "value", {"color": "tab:green", "marker": "o"})
            for name, found in _named(lines).items()
        ),
    ]
    begin = min(one["time"] for one in lines)
    figure = Figure(figsize=(10, 3 * len(panels)), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(len(panels), 2, sharex="col", sharey="row")
    for column, (by, label) in enumerate((("time", _unit(lines)), ("version", "version"))):
        offset, scale = (begin, _scale(lines)) if by == "time" else (0, 1.0)
        for row, (_, found, name, how) in enumerate(panels):
            there = [one for one in found if _is_drawn(one.get(name)) and _is_drawn(one.get(by))]
            across = [(one[by] - offset) / scale for one in there]
            axes[row][column].plot(across, [one[name] for one in there], linewidth=1, **how)
            for one in lines:
                if "set" in one and _is_drawn(one.get(by)):
                    at = (one[by] - offset) / scale
                    axes[row][column].axvline(at, color="grey", linestyle=":")
        axes[-1][column].set_xlabel(label)
    for row, (name, *_) in enumerate(panels):
        axes[row][0].set_ylabel(name, parse_math=False)  # a reported name may have a dollar sign
    if not any(_is_number(one.get("loss")) for one in points):
        for axis in axes[0]:
            axis.text(0.5, 0.5, NO_LOSS, ha="center", va="center", transform=axis.transAxes)
    made = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "gadei-ps"}):  # the same lines give the same file
        figure.savefig(made, format="svg", metadata={"Date": None})
    return made.getvalue()


def _named(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Return the lines with a `value` for each name that was measured or reported."""
    found: dict[str, list[Line]] = {}
    for one in lines:
        for kind in ("measured", "reported"):
            values = one.get(kind)
            for name, value in values.items() if isinstance(values, dict) else ():
                if name != "epoch":  # it counts, as the axes do
                    found.setdefault(name, []).append({**one, "value": value})
    return found


def _scale(lines: Sequence[Line]) -> float:
    """Return the length (s) of the unit in which this duration is a readable number."""
    times = [one["time"] for one in lines]
    took = max(times) - min(times)
    return 1.0 if took < 300 else 60.0 if took < 4 * 3600 else 3600.0


def _unit(lines: Sequence[Line]) -> str:
    return {1.0: "s", 60.0: "min", 3600.0: "h"}[_scale(lines)]
