"""A job's history as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gadei_ps.show.counts import rate
from gadei_ps.show.optimizer_line import text
from gadei_ps.show.progress import NO_LOSS
from gadei_ps.show.strict_json import is_number
from gadei_ps.show.tables import FittedTable, alike, when

Line = Mapping[str, Any]
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
    losses = alike([one["loss"] if is_number(one.get("loss")) else None for one in points])
    numbers = ("gradients", "loss", speed, "staleness", "queue", "learners")
    dispensable = ("learners", "queue", "staleness")
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
            rate(one[name]) if is_number(one.get(name)) else "",
            _number(one.get("staleness"), ".2f"),
            _number(one.get("queue"), ".0f"),
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
    hint = f"gadei-ps history RUN shows one; the files are in {directory}"
    if len(found) > last:
        hint = f"{len(found) - last:,} older ones: --last {len(found)}; {hint}"
    return Group(made, Text(hint, style="dim"))


def _name(run: Line, directory: str) -> str:
    """Return the argument of `history` for this run: the job's name, or an older file of it."""
    file = str(run["file"])
    return file.removeprefix(f"{directory}/") if file.endswith(".old.jsonl") else str(run["job"])


def _result(run: Line) -> str:
    if is_number(run["accuracy"]):
        return f"accuracy {run['accuracy']:.4f}"
    return f"loss {run['loss']:.4g}" if is_number(run["loss"]) else ""


def _number(value: Any, form: str) -> str:
    return format(value, form) if is_number(value) else ""


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
