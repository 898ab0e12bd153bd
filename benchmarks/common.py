"""Shared by all benchmarks: the machine's description, fair rounds, and reports.

Each benchmark is a module with a function `measure(quick) -> Report`. A row is one contender with
its parameters, and the median and the spread of its figure. A ratio compares gadei-ps with a
contender. Above 1, gadei-ps is better.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The load by other programs: read at the start, before the benchmark's own threads count.
_LOAD = os.getloadavg()[0]
_PACKAGES = (
    "numpy", "numba", "llvmlite", "torch", "mpi4py", "mpich", "ray", "hivemind", "pyzmq",
    "iceoryx2",
)  # fmt: skip


@dataclass
class Report:
    """The results of a benchmark. header and lines: its table for people."""

    header: Sequence[str]
    lines: list[list[str]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """One line each: what was left out, and what readers must know."""


def machine() -> dict[str, Any]:
    """Return processor, usable cores, memory, kernel and versions: figures depend on them."""
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
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def _processor() -> str:
    """Return the processor's name, family and model, because the name alone may say little."""
    told: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        told.setdefault(name.strip(), value.strip())
    name = told.get("model name", platform.machine())
    return f"{name}, family {told.get('cpu family', '?')}, model {told.get('model', '?')}"


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Let each contender measure itself once a round and return its figures, round by round.

    The order rotates by one each round, so that no contender always runs after the same other. One
    round before the first is discarded, unless one round is all there is, as in a trial.
    """
    names = list(contenders)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(0 if rounds > 1 else 1, rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            figure = contenders[name]()
            if number > 0:
                figures[name].append(figure)
    return figures


def summary(figures: Sequence[float], unit: str = "s", *, larger: bool = False) -> dict[str, Any]:
    """Return the median, the best and the spread of one row's figures.

    spread: half the distance between the quartiles, as a share of the median. larger: True if a
    larger figure is better.
    """
    middle = statistics.median(figures)
    low = high = middle
    if len(figures) > 1:
        low, _, high = statistics.quantiles(figures, n=4)
    return {
        "median": middle,
        "best": max(figures) if larger else min(figures),
        "spread": (high - low) / 2 / middle if middle else 0.0,
        "unit": unit,
        "rounds": len(figures),
    }


def ratios_of(
    ours: Sequence[float], theirs: Sequence[float], *, larger: bool = False
) -> dict[str, float]:
    """Return two ratios of ours to theirs. Above 1, ours is better.

    ratio: the median of the rounds' ratios. Both figures of a round are under the same load of the
    machine; the medians of each side are not. best_ratio: between the best rounds of each. On a
    busy machine, these are the least disturbed rounds.
    """
    if larger:
        ours, theirs = theirs, ours
    best = max if larger else min
    return {
        "ratio": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        "best_ratio": best(theirs) / best(ours),
    }


def end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process by SIGTERM, unless it has ended; kill it after `grace_s` seconds."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return cells as text in columns: the first left-aligned, the others right-aligned."""
    rows = [list(header), *[list(line) for line in lines]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
