"""Writes the tables of docs/gpu.md from the results of the parts.

    python -m gadei_ps.benchmarks.gpu.tables

They stand below comments such as `<!-- gpu-overhead.json: table -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gadei_ps.benchmarks.tables import Table

OURS, TORCH, END_TO_END = "gadei-ps", "torch SGD", "gadei-ps, end to end"
ON_HOST = "host, profiled"
PAGE = "gpu.md"
PARTS = 8
"""Parts of a step in a table: those that take most, of each network and contender."""
NAMES = {
    "alexnet": "AlexNet",
    "vgg": "VGG",
    "mlp": "perceptron",
    "stream, busy": "GPU, host ahead",
    "stream, as it trains": "GPU, as it trains",
    "everything else": "outside all parts",
}
"""Names in tables, where they differ from those of the results."""
NO_TIME = re.compile(r"(.+): not measured: no time")
NO_BATCHES = re.compile(r"(.+): no time for mini-batches \[(.+)\]")
SENTENCES = (
    (r"nvidia-cuda-mps-control of others runs: no", ""),
    (r"sentences of (.+)", r"The sentences are those of \1."),
    (r"precision is torch's default, in both", "Both compute with torch's default precision."),
    (r"(\d+) shards", r"The job has \1 shards."),
)
"""Notes of results, and the sentences for them; other notes are shown as they are."""

Result = dict[str, Any]
Row = dict[str, Any]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


def _by(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Return rows by contender, by their values of these names, in the order of the first."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if "part" not in row:
            found.setdefault(tuple(row[name] for name in names), {})[row["contender"]] = row
    return found


def _megabytes(row: Row) -> str:
    return f"{row['bytes'] / 1e6:.3g}"


def _met(ratio: Row) -> str:
    return "" if ratio["reached"] is None else "yes" if ratio["reached"] else "no"


def _overhead(result: Result) -> list[str]:
    goals = {(one["network"], one["of"]): one for one in result["ratios"] if one["reach"]}
    rows = []
    for where, found in _by(result["rows"], "network", "of").items():
        us = [1e6 * (one.get("median_with_pull") or one["median"])
              for one in (found[who] for who in (OURS, TORCH))]  # fmt: skip
        met = _met(goals[where]) if where in goals else ""
        facts = [where[0], _megabytes(found[OURS]), NAMES.get(where[1], where[1])]
        rows.append([*facts, *(f"{one:.1f}" for one in us), met])
    header = ["network", "size, MB", "step() on", "gadei-ps, µs", "torch SGD, µs"]
    return [*_table([*header, "target met: under 30 µs"], rows), *_parts(result)]


def _parts(result: Result) -> list[str]:
    """Make the table of the host's time of a step: a row for each part."""
    columns: dict[tuple[str, str], dict[str, float]] = {}
    for one in result["rows"]:
        if one.get("of") == ON_HOST:
            where = one["network"], one["contender"]
            columns.setdefault(where, {})[one["part"]] = 1e6 * one["mean"]
    if not columns:
        return []
    shown = dict.fromkeys(part for parts in columns.values() for part in list(parts)[:PARTS])
    cells = {part: [parts.get(part) for parts in columns.values()] for part in shown}
    cells["other parts"] = [
        sum(us for part, us in parts.items() if part not in shown) or None
        for parts in columns.values()
    ]
    cells["whole step"] = [sum(parts.values()) for parts in columns.values()]
    rows = [
        [NAMES.get(part, part), *("" if us is None else f"{us:.0f}" for us in found)]
        for part, found in cells.items()
    ]
    header = ["part of a step", *(f"{network}, {who}, µs" for network, who in columns)]
    return ["", *_table(header, rows)]


def _bandwidth(result: Result) -> list[str]:
    goals = {(one["bytes"], one["way"]): one for one in result["ratios"] if one["reach"]}
    rows = []
    for where, found in sorted(
        _by(result["rows"], "bytes", "way").items(), key=lambda one: one[0][0]
    ):
        limit, goal = next(iter(found.values())), goals[where]
        end = f"{found[END_TO_END]['median'] / 1e9:.1f}" if END_TO_END in found else ""
        rates = [f"{one['median'] / 1e9:.1f}" for one in (limit, found[OURS])]
        share = [f"{goal['ratio']:.2f}", f"{goal['reach']:g}", _met(goal)]
        rows.append([_megabytes(limit), where[1], *rates, *share, end])
    header = ["size, MB", "direction", "pinned copy, GB/s", "gadei-ps, GB/s", "ratio", "target"]
    return _table([*header, "met", "back to back, GB/s"], rows)


def _learners(result: Result) -> list[str]:
    """Make a table with a column for each network, with MPS and without it."""
    speeds: dict[tuple[int, str, int], dict[tuple[str, str], str]] = {}
    for one in result["rows"]:
        if "part" not in one:
            who = one["mini_batch"], one["contender"], one["learners"]
            speed = f"{one['median']:,.0f}"
            speeds.setdefault(who, {})[one["network"], one["block"]] = speed
    columns = _blocks(result)
    rows = [
        [*map(str, who), *(found.get(where, "") for where in columns)]
        for who, found in sorted(speeds.items(), key=lambda one: one[0][0])
    ]
    header = [f"{network}, {block}, samples/s" for network, block in columns]
    return _table(["mini-batch", "contender", "processes", *header], rows)


def _blocks(result: Result) -> list[tuple[str, str]]:
    """Return the networks, each without MPS and with it."""
    found = {(one["network"], one["block"]) for one in result["rows"] if "block" in one}
    return sorted(found, reverse=True)


def _vision(result: Result) -> list[str]:
    ratios = {(one["model"], one["mini_batch"], one["gpus"]): one for one in result["ratios"]}
    rows = []
    for where, found in _by(result["rows"], "model", "mini_batch", "gpus").items():
        rates = [f"{found[who]['median']:,.0f}" if who in found else "" for who in (OURS, TORCH)]
        network = NAMES.get(where[0], where[0])
        facts = [network, _megabytes(found[OURS]) if "bytes" in found[OURS] else ""]
        rows.append([*facts, *map(str, where[1:]), *rates, f"{ratios[where]['ratio']:.2f}"])
    header = ["network", "size, MB", "mini-batch", "GPUs", "gadei-ps, images/s"]
    return _table([*header, "torch SGD, images/s", "ratio"], rows)


def _timeline(result: Result) -> list[str]:
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for one in result["rows"]:
        found.setdefault((one["network"], one["mini_batch"]), {})[one["of"]] = one
    rows = []
    for (network, mini_batch), lanes in found.items():
        shares = [lanes["compute"]["busy"], lanes["push"]["overlap"], lanes["pull"]["overlap"]]
        told = ["" if one is None else f"{one:.0%}" for one in shares]
        rows.append([NAMES.get(network, network), str(mini_batch), *told])
    header = ["network", "mini-batch", "time with computation", "push time beside it"]
    picture = "![compute, push and pull streams of a learner](plots/gpu-timeline.svg)"
    return [*_table([*header, "pull time beside it"], rows), "", picture]


def _server_on_gpu(result: Result) -> list[str]:
    rows = []
    for (count, learners), found in sorted(_by(result["rows"], "bytes", "learners").items()):
        speeds = [found[who]["median"] if who in found else None for who in PLACES]
        told = ["" if one is None else f"{one:,.0f}" for one in speeds]
        ratio = f"{speeds[1] / speeds[0]:.2f}" if speeds[0] and speeds[1] else ""
        rows.append([f"{count / 1e6:g}", str(learners), *told, ratio])
    header = ["size, MB", "learners", "on the host, gradients/s", "prototype, gradients/s", "ratio"]
    return _table(header, rows)


PLACES = "gadei-ps, on the host", "prototype, on the GPU"


def _with_source(lines: Callable[[Result], list[str]]) -> Callable[[Result], list[str]]:
    """Add where and with which commit it was measured, and the notes."""

    def whole(result: Result) -> list[str]:
        gpu, machine = result["gpu"], result["machine"]
        versions = f"driver {gpu['driver']}, CuPy {gpu['cupy']}, PyTorch {machine['torch']}"
        where = f"{', '.join(gpu['gpus'])}, {versions}, {machine['cores']} cores"
        source = f"{where}; commit {result['commit']}."
        return [*lines(result), "", " ".join([source, *_notes(result)])]

    return whole


def _notes(result: Result) -> list[str]:
    """Return the notes as sentences; the last one lists what there was no time for."""
    models = {one.get("model") for one in result["rows"]}
    sentences: list[str] = []
    missing: list[str] = []
    batches: dict[str, list[str]] = {}
    for note in result["notes"]:
        if found := NO_BATCHES.fullmatch(note):
            batches.setdefault(found[2], []).append(found[1])
        elif found := NO_TIME.fullmatch(note):
            name, _, size = found[1].partition(" with ")
            missing.append(NAMES.get(name, name) + (f" at mini-batch {size}" if size else ""))
        elif "vgg" in models or not note.startswith("VGG"):
            sentences.append(_sentence(note))
    for sizes, where in batches.items():
        everywhere = len(where) == len(_blocks(result))
        missing.append(f"mini-batches {sizes}" + ("" if everywhere else f" ({', '.join(where)})"))
    if missing:
        missing.sort(key=lambda one: [int(number) for number in re.findall(r"\d+", one)])
        sentences.append(f"Not measured for lack of time: {', '.join(missing)}.")
    return [one for one in sentences if one]


def _sentence(note: str) -> str:
    """Return the sentence for a note; empty if it is not worth one."""
    for pattern, text in SENTENCES:
        if found := re.fullmatch(pattern, note):
            return found.expand(text)
    return f"{note}."


TABLES = tuple(
    Table(f"gpu-{name}", PAGE, _with_source(lines), notes=False)
    for name, lines in (
        ("overhead", _overhead),
        ("bandwidth", _bandwidth),
        ("learners", _learners),
        ("vision", _vision),
        ("timeline", _timeline),
        ("server_on_gpu", _server_on_gpu),
    )
)


if __name__ == "__main__":
    for table in TABLES:
        table.write()
