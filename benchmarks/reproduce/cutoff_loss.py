"""Validation loss against time under cutoffs, Teng and Wood 2018, figure 4: real gradients."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot

from gadei_ps.benchmarks.reproduce import cutoff_cluster, part
from gadei_ps.benchmarks.reproduce.digits import Digits
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.show.colours import SYNC
from gadei_ps.simulate import compare, oracle
from gadei_ps.simulate.descent import Learning
from gadei_ps.simulate.run_times import RecordedTimes
from gadei_ps.simulate.setting import Setting

BATCH = 64  # of a learner; 10,112 for all 158, as in the paper
LR = 0.64
ITERATIONS = 500
QUICK_ITERATIONS = 22  # two more than the predictors need
POINTS = 200
SEED = 100  # not the seed of the recording that trains the model
REACHED = (0.30, 0.20, 0.15)  # validation losses
MODELS = {"wild": "asp", "cutoff": "cutoff", "order": "cutoff:by=order", "sync": "bsp"}
"""The colours are those of these models."""


def run(quick: bool = False) -> Part:
    """Measure the four methods for the same number of iterations."""
    learners = cutoff_cluster.LEARNERS
    # Twice the mean number of iterations, for learners that never wait.
    slow = np.arange(2 * ITERATIONS) < cutoff_cluster.SWITCH
    times = RecordedTimes(cutoff_cluster.cluster(slow, SEED))
    setting = Setting(learners, times, iterations=QUICK_ITERATIONS if quick else ITERATIONS)
    learning = Learning(Digits(LR, 1000 if quick else None), BATCH, points=POINTS)
    best = oracle.run(setting)
    runs = {}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        cutoff_cluster.model(file, quick)
        specs = {"wild": "asp", "cutoff": f"cutoff:file={file}"}
        specs |= {"order": "cutoff:by=order", "sync": "bsp"}
        for name, spec in specs.items():
            found = compare.run(compare.model(spec, learners), setting, learning)
            runs[name] = found.as_dict(best.throughput) | {"model": spec.partition("=")[0]}
    draw({"runs": runs})
    return Part(
        "Cutoff SGD: validation loss against time",
        f"Figure 4 of Teng and Wood 2018 in virtual time, with real gradients of a network with "
        f"one hidden layer of 64 units on MNIST. {learners} learners have mini-batches of {BATCH}. "
        f"As in the paper, plain SGD has a rate of {LR} for the mean of a superstep and "
        f"{LR}/{learners} for single gradients. Run times are those of the cluster in the section "
        f"on throughput: a node of 40 is slow until iteration 60. wild: asp; cutoff: by the "
        f"learned model, which has not seen this run; order: by Elfving's formula; sync: bsp. Each "
        f"contender runs for {setting.iterations} iterations per learner on average, including "
        f"those that were dropped; stragglers drop theirs at once. The loss is that of the test "
        f"images.",
        _rows(runs),
        plots=["cutoff_loss.svg"],
        data={"oracle": best.as_dict(), "runs": runs},
    )


def reached(curve: list[dict[str, float]], key: str, bound: float, above: bool) -> float | None:
    """Return the time (s) of the first point that reaches the bound; None if there is none."""
    for point in curve:
        if (point[key] >= bound) if above else (point[key] <= bound):
            return point["seconds"]
    return None


def _rows(runs: dict[str, dict[str, Any]]) -> list[Row]:
    told = {
        "wild": "fastest, but to a higher loss",
        "cutoff": "fastest of the synchronous ones, to the lowest loss",
        "order": "between cutoff and sync",
        "sync": "slowest",
    }
    # The plot shows the rest of the curve, which at first goes up and down.
    why = {"wild": "to the same loss here; staleness shows as jumps on the way; "}
    rows = []
    for name, one in runs.items():
        last = one["curve"][-1]
        times = [reached(one["curve"], "loss", bound, above=False) for bound in REACHED]
        rows.append(
            Row(
                name,
                told[name],
                "loss "
                + ", ".join(
                    f"{bound:.2f} at {'never' if at is None else f'{at:.0f} s'}"
                    for bound, at in zip(REACHED, times, strict=True)
                )
                + f"; {last['loss']:.3f} at the end, {one['seconds']:.0f} s",
                why.get(name, "")
                + f"accuracy {last['accuracy']:.1%}; {one['gradients_per_s']:.0f} gradients/s, "
                f"{one['oracle_share']:.0%} of the oracle; {one['dropped']:,} dropped",
            )
        )
    # The loss of every method when the first of them is done.
    end = min(one["seconds"] for one in runs.values())
    rows.append(
        Row(
            f"loss after {end:.0f} s, when the first is done",
            "wild, cutoff, order, sync in ascending order",
            ", ".join(f"{name} {_at(one['curve'], end):.3f}" for name, one in runs.items()),
        )
    )
    return rows


def _at(curve: list[dict[str, float]], moment: float) -> float:
    """The loss at `moment`, interpolated between the points."""
    times = [point["seconds"] for point in curve]
    return float(np.interp(moment, times, [point["loss"] for point in curve]))


def draw(data: dict[str, Any]) -> None:
    """Draw the curves."""
    figure = pyplot.figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, one in data["runs"].items():
        points = [(point["seconds"], point["loss"]) for point in one["curve"]]
        colour = SYNC[MODELS[name]]
        axes.plot(*zip(*points, strict=True), label=name, color=colour)
        axes.plot(*points[-1], marker="o", markersize=4, color=colour)
    axes.set_xlabel("virtual time, s")
    axes.set_ylabel("loss of the test images")
    axes.set_yscale("log")
    axes.legend(fontsize=8)
    part.save(figure, "cutoff_loss.svg")
