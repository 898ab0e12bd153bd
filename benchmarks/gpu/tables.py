"""Writes the tables of docs/gpu.md from the results of the parts.

    python -m gadei_ps.benchmarks.gpu.tables

They stand below comments such as `<!-- gpu-overhead.json: table -->`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gadei_ps.benchmarks.tables import Table

OURS, TORCH, END_TO_END = "gadei-ps", "torch SGD", "gadei-ps, end to end"
ON_HOST = "host, profiled"
PAGE = "gpu.md"
PARTS = 8
"""Parts of a step in a table, those that take most."""

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
        rows.append(
            [where[0], _megabytes(found[OURS]), where[1], *(f"{one:.1f}" for one in us), met]
        )
    header = [
        "network",
        "size, MB",
        "time in step()",
        "gadei-ps, µs",
        "torch SGD, µs",
        "under 30 µs",
    ]
    return [*_table(header, rows), "", *_parts(result)]


def _parts(result: Result) -> list[str]:
    """Make the table of the host's time of a step, by network."""
    rows = []
    for who in (OURS, TORCH):
        profiled = [
            one for one in result["rows"] if one.get("of") == ON_HOST and one["contender"] == who
        ]
        for network in dict.fromkeys(one["network"] for one in profiled):
            parts = [one for one in profiled if one["network"] == network][:PARTS]
            told = [f"{one['part']} {1e6 * one['mean']:.0f}" for one in parts]
            whole = sum(one["mean"] for one in profiled if one["network"] == network)
            rows.append([network, who, f"{1e6 * whole:.0f}", "; ".join(told)])
    return _table(["network", "contender", "step, µs", "its parts on the host, µs"], rows)


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
    return _table([*header, "met", "until applied, GB/s"], rows)


def _learners(result: Result) -> list[str]:
    rows = [one for one in result["rows"] if "part" not in one]
    contenders = list(dict.fromkeys((one["contender"], one["learners"]) for one in rows))
    speeds: dict[tuple[Any, ...], dict[tuple[str, int], float]] = {}
    for one in rows:
        where = one["network"], one["block"], one["mini_batch"]
        speeds.setdefault(where, {})[one["contender"], one["learners"]] = one["median"]
    ratios = {
        (one["network"], one["block"], one["mini_batch"], one["contender"], one["learners"]): one
        for one in result["ratios"]
    }
    fastest = {key[:3]: one for key, one in ratios.items() if key[3] == "the fastest peer"}
    lines = []
    for where, found in sorted(speeds.items()):
        four = ratios.get((*where, f"{OURS}, one learner", 4))
        shown = [f"{one['ratio']:.2f}" if one else "" for one in (four, fastest.get(where))]
        told = [f"{found[one]:,.0f}" if one in found else "" for one in contenders]
        lines.append([where[0], where[1], str(where[2]), *told, *shown])
    header = ["network", "block", "mini-batch", *(f"{name}, {count}" for name, count in contenders)]
    return _table([*header, "4 learners / 1", "fastest / fastest peer"], lines)


def _vision(result: Result) -> list[str]:
    ratios = {(one["model"], one["mini_batch"], one["gpus"]): one for one in result["ratios"]}
    rows = []
    for where, found in _by(result["rows"], "model", "mini_batch", "gpus").items():
        rates = [f"{found[who]['median']:,.0f}" if who in found else "" for who in (OURS, TORCH)]
        facts = [where[0], _megabytes(found[OURS]) if "bytes" in found[OURS] else ""]
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
        rows.append([network, str(mini_batch), *told])
    header = ["network", "mini-batch", "time with computation", "pushes that overlap with it"]
    picture = "![compute, push and pull streams of a learner](plots/gpu-timeline.svg)"
    return [*_table([*header, "pulls that overlap with it"], rows), "", picture]


def _server_on_gpu(result: Result) -> list[str]:
    rows = []
    for (count, learners), found in sorted(_by(result["rows"], "bytes", "learners").items()):
        speeds = [found[who]["median"] if who in found else None for who in NAMES]
        told = ["" if one is None else f"{one:,.0f}" for one in speeds]
        ratio = f"{speeds[1] / speeds[0]:.2f}" if speeds[0] and speeds[1] else ""
        rows.append([f"{count / 1e6:g}", str(learners), *told, ratio])
    header = ["size, MB", "learners", "on the host, gradients/s", "prototype, gradients/s", "ratio"]
    return _table(header, rows)


NAMES = "gadei-ps, on the host", "prototype, on the GPU"


def _with_source(lines: Callable[[Result], list[str]]) -> Callable[[Result], list[str]]:
    """Add where and with which commit it was measured."""

    def whole(result: Result) -> list[str]:
        gpu, machine = result["gpu"], result["machine"]
        versions = f"driver {gpu['driver']}, CuPy {gpu['cupy']}, PyTorch {machine['torch']}"
        source = (
            f"{', '.join(gpu['gpus'])}, {versions}; {machine['cores']} cores of {machine['cpu']}"
        )
        return [*lines(result), "", f"{source}; commit {result['commit']}."]

    return whole


TABLES = tuple(
    Table(f"gpu-{name}", PAGE, _with_source(lines))
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
