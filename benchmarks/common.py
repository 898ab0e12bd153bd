"""What all benchmarks share: the machine's description, fair rounds, and the result file.

A result file is `benchmarks/results/<benchmark>.json` with the keys benchmark, machine, command,
rows and ratios. A row is one contender at one size, with its median and spread in seconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# Read when the benchmark begins, before its own threads count: what else the machine was doing.
_LOAD = os.getloadavg()[0]
_PACKAGES = ("numpy", "numba", "llvmlite", "torch")


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, usable cores, memory, kernel and versions."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "cpu": _processor(),
        "cores": cores(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_at_start": _LOAD,
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
    }


def cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def _processor() -> str:
    """Return the processor's name with its family and model: the name alone may say little."""
    told: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        told.setdefault(name.strip(), value.strip())
    name = told.get("model name", platform.machine())
    return f"{name}, family {told.get('cpu family', '?')}, model {told.get('model', '?')}"


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Let each contender measure itself once a round and return its seconds, round by round.

    The order turns by one each round, so that none always runs after the same other; one round
    before the first is thrown away.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = contenders[name]()
            if number > 0:
                seconds[name].append(taken)
    return seconds


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the median, the best and the spread of one row's seconds.

    spread: half the distance between the quartiles over the median, a part of 1.
    """
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {
        "median_s": middle,
        "best_s": min(seconds),
        "spread": (high - low) / 2 / middle,
        "unit": "s",
        "rounds": len(seconds),
    }


def ratios_of(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return theirs / ours, above 1 where ours is faster, in two ways.

    ratio: the median over the rounds. The pair of one round shares what else the machine was doing,
    which the medians of each side do not. best_ratio: between the fastest rounds of each, which on
    a busy machine are those that nothing disturbed.
    """
    return {
        "ratio": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        "best_ratio": min(theirs) / min(ours),
    }


def write_results(
    benchmark: str, rows: Sequence[Mapping[str, Any]], ratios: Sequence[Mapping[str, Any]]
) -> Path:
    """Write `results/<benchmark>.json` and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{benchmark}.json"
    result = {
        "benchmark": benchmark,
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]),
        "rows": list(rows),
        "ratios": list(ratios),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as text in columns, the first to the left, the others to the right."""
    rows = [list(header), *[list(line) for line in lines]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
