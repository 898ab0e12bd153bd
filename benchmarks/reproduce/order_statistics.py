"""Predicted against observed order statistics of run times, for 158 and for 2,175 learners.

Teng and Wood 2018, Figure 3 and section 4.1.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from gadei_ps.benchmarks.reproduce import cutoff_cluster, cutting, part
from gadei_ps.benchmarks.reproduce.cutting import COLOURS, Calibration
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.run_times import fitting
from gadei_ps.run_times.fitting import TrainingResult
from gadei_ps.sync.order_statistics import NormalPredictor, SampledPredictor, best_cutoff
from gadei_ps.sync.prediction import FloatArray
from gadei_ps.sync.run_time_model import RunTimeModel

SHOWN = (21, 50, 62, 100, 200)
"""Iterations of the plot: two with a slow node, one just after it recovered, and a later one."""


@dataclass
class Cluster:
    """A size from the paper: number of learners, and of learners of a node."""

    learners: int
    node: int


CLUSTERS = (
    Cluster(158, 40),
    # 32 nodes of 68 cores; one core is not a learner's.
    Cluster(2175, 68),
)


@dataclass
class Measured:
    """The results of a cluster. shown: by iteration, predicted, deviations and observed."""

    cluster: Cluster
    trained: TrainingResult
    calibration: dict[str, Calibration]
    shown: dict[int, tuple[FloatArray, FloatArray, FloatArray]]


def run(quick: bool = False) -> Part:
    """Figure 3."""
    measured = [_measure(one, quick) for one in CLUSTERS[: 1 if quick else None]]
    _plot(measured)
    return Part(
        title="Cutoff SGD: predicted order statistics",
        text=_text(measured),
        rows=[row for one in measured for row in _rows(one)],
        plots=["cutoff_order_statistics.svg"],
        data={
            str(one.cluster.learners): {
                "training_seconds": one.trained.seconds,
                "held_out_elbo": one.trained.held_out_elbo,
                "error": {name: found.error.tolist() for name, found in one.calibration.items()},
                "covered": one.calibration["learned"].covered.tolist(),
            }
            for one in measured
        },
    )


def _measure(cluster: Cluster, quick: bool) -> Measured:
    size = {"learners": cluster.learners, "node": cluster.node}
    times = cutoff_cluster.trial(0, **size)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        trained = fitting.train(
            cutoff_cluster.recording(**size),
            out=file,
            epochs=4 if quick else fitting.EPOCHS,
        )
        calibration = {
            "learned": cutting.calibrate(RunTimeModel.load(file), times),
            "order": cutting.calibrate(NormalPredictor(), times),
            "sampled": cutting.calibrate(SampledPredictor(), times),
        }
        model = RunTimeModel.load(file)
    shown = {}
    nobody = np.zeros(cluster.learners, np.bool_)
    for iteration, row in enumerate(times, start=1):
        found = cutting.predicted(model, np.arange(cluster.learners))
        if found is not None and iteration in SHOWN:
            shown[iteration] = (*found, np.sort(row))
        model.observe(row, nobody)
    return Measured(cluster, trained, calibration, shown)


def _text(measured: list[Measured]) -> str:
    trained = "; ".join(
        f"{one.cluster.learners:,} learners: {one.trained.iterations:,} iterations recorded, "
        f"{one.trained.parameters:,} parameters, {one.trained.seconds:.0f} s of training"
        for one in measured
    )
    return f"""\
Figure 3 of Teng and Wood 2018, on the synthetic cluster of the section on throughput. The run times
of each iteration are predicted from the {fitting.LAG} iterations before it, whose run times are
all known. Predicted and observed run times are compared in ascending order. {trained}. The larger
cluster stands for the paper's 32 nodes of 68 cores; one of its nodes is also slow at first.

The plot shows single iterations of one run: the prediction with two deviations to either side, the
observed run times, and the chosen cutoff. The error of an order statistic is |predicted - observed|
/ observed. The coverage is the share of observed order statistics within two predicted deviations.
The paper gives no number for either.
"""


def _rows(one: Measured) -> list[Row]:
    size = f"{one.cluster.learners:,} learners"
    rows = []
    for name, found in one.calibration.items():
        tail = found.error[-max(1, one.cluster.learners // 20) :]
        rows.append(Row(f"error, {name}, {size}", "", cutting.percent(found.error)))
        rows.append(Row(f"error of the largest 5%, {name}, {size}", "", cutting.percent(tail)))
    covered = one.calibration["learned"].covered
    rows.append(
        Row(
            f"coverage of two deviations, learned, {size}",
            "",
            cutting.percent(covered),
            "should be 95.4%; the model is too sure of the level that all learners share",
        )
    )
    return rows


def _plot(measured: list[Measured]) -> None:
    figure, grid = pyplot.subplots(
        len(measured),
        len(SHOWN),
        figsize=(9, 2.3 * len(measured)),
        sharex="row",
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for line, one in zip(grid, measured, strict=True):
        # More than a few hundred points cannot be distinguished.
        step = -(-one.cluster.learners // 300)
        ranks = np.arange(1, one.cluster.learners + 1)[::step]
        for axes, (iteration, found) in zip(line, one.shown.items(), strict=True):
            mean, std, observed = (part[::step] for part in found)
            low, high = mean - 2 * std, mean + 2 * std
            axes.fill_between(ranks, low, high, color=COLOURS["learned"], alpha=0.25, linewidth=0)
            axes.plot(ranks, mean, color=COLOURS["learned"], linewidth=1, label="predicted")
            axes.plot(ranks, observed, color="black", linewidth=1, label="observed")
            axes.axvline(best_cutoff(found[0]), color="tab:gray", linestyle="--", linewidth=0.8)
            axes.set_title(f"{one.cluster.learners:,}: iteration {iteration}", fontsize=8)
            axes.tick_params(labelsize=8)
            axes.set_xlabel("rank of the learner", fontsize=8)
        line[0].set_ylabel("run time, s")
    grid[0][0].legend(loc="upper left")
    part.save(figure, "cutoff_order_statistics.svg")
