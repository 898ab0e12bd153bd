"""ElasticBSP's Table II: the time to plan a superstep, by algorithm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gadei_ps.benchmarks.reproduce import searches
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.sync import zipline
from gadei_ps.sync.zipline import EndTimes

# Microseconds, by algorithm, learners and R.
PAPER = {
    "ZipLine": {(10, 15): 149, (10, 150): 1320, (100, 15): 6370, (100, 150): 49_900,
                (1000, 15): 253_000, (1000, 150): 2_380_000},
    "FullGridScan": {(10, 15): 1540, (10, 150): 46_700, (100, 15): 81_300,
                     (100, 150): 2_150_000, (1000, 15): 4_040_000, (1000, 150): 207_000_000},
    "GridScan": {(10, 15): 168, (10, 150): 5500, (100, 15): 1110, (100, 150): 43_800,
                 (1000, 15): 7450, (1000, 150): 257_000},
}  # fmt: skip
SEARCHES: dict[str, Callable[[EndTimes], Any]] = {
    "ZipLine": searches.zipline_literal,
    "FullGridScan": searches.full_grid_scan,
    "GridScan": searches.grid_scan,
    "planner": zipline.plan,
}
TRIALS = 10
LONG_S = 30.0  # a cell that has taken this long gets no more trials


def end_times(learners: int, ahead: int, seed: int) -> EndTimes:
    """Return end times; learners' speeds differ by a factor of four at most, a learner's by 5%."""
    chance = np.random.default_rng([seed, learners, ahead])
    speed = chance.uniform(1.0, 4.0, (learners, 1))
    return np.cumsum(speed * chance.normal(1.0, 0.05, (learners, ahead)).clip(0.5, 2), axis=1)


def run(quick: bool = False) -> Part:
    """Measure all cells. The algorithms alternate within a trial."""
    sizes = [size for size in PAPER["ZipLine"] if not quick or size[0] * size[1] <= 1500]
    for search in SEARCHES.values():
        search(end_times(2, 2, 0))  # compiled or loaded before anything is timed
    data = []
    for learners, ahead in sizes:
        spent: dict[str, list[float]] = {name: [] for name in SEARCHES}
        windows: dict[str, list[float]] = {name: [] for name in SEARCHES}
        for trial in range(2 if quick else TRIALS):
            times = end_times(learners, ahead, trial)
            for name, search in SEARCHES.items():
                if sum(spent[name]) > LONG_S:
                    continue
                begin = time.perf_counter()
                _, window = search(times)
                spent[name].append(time.perf_counter() - begin)
                windows[name].append(window)
        data += [
            {
                "algorithm": name,
                "learners": learners,
                "R": ahead,
                "mean_us": statistics.fmean(spent[name]) * 1e6,
                "median_us": statistics.median(spent[name]) * 1e6,
                "trials": len(spent[name]),
                "mean_window": statistics.fmean(windows[name]),
                "paper_us": PAPER.get(name, {}).get((learners, ahead)),
            }
            for name in SEARCHES
        ]
    return Part(
        "ElasticBSP, Table II: what planning costs",
        "Zhao et al. 2019 measure their three algorithms on a Xeon E5-2620 v3: the mean of 10 "
        "trials, in microseconds; they do not name the language. Here Numba compiles their loops, "
        "and all take turns in each trial. The server uses `planner`, which gives exactly "
        "ZipLine's answer by a few calls of NumPy ([why](decisions/0025-planning-in-numpy.md)): "
        "it sorts all times, and finds the ends of all windows at once. The end times are those of "
        "learners whose speeds differ by up to a factor of four; each iteration is within "
        "about 5% of its learner's mean. The paper does not name the times it uses.",
        _rows(data),
        data={"cells": data},
    )


def _rows(data: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for cell in data:
        if cell["paper_us"] is None:
            literal = next(
                other
                for other in data
                if other["algorithm"] == "ZipLine"
                and (other["learners"], other["R"]) == (cell["learners"], cell["R"])
            )
            ratio = literal["median_us"] / cell["median_us"]
            why = f"{ratio:.1f} times as fast as literal ZipLine"
        else:
            why = f"{cell['trials']} trials" if cell["trials"] < TRIALS else ""
        rows.append(
            Row(
                f"{cell['algorithm']}, {cell['learners']} learners, R = {cell['R']}",
                "" if cell["paper_us"] is None else f"{cell['paper_us']:,} µs",
                f"{cell['mean_us']:,.0f} µs",
                why,
            )
        )
    return rows
