"""Throughput of learned cutoffs on a cluster in which one node is slow for some time.

Teng and Wood 2018, Figure 2 and sections 4.1 and 4.2.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import pyplot

from gadei_ps.benchmarks.reproduce import cutting, part
from gadei_ps.benchmarks.reproduce.cutting import COLOURS, Driven
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.run_times import fitting
from gadei_ps.run_times.fitting import TrainingResult
from gadei_ps.run_times.traces import Trace
from gadei_ps.sync.order_statistics import NormalPredictor, SampledPredictor, elfving
from gadei_ps.sync.prediction import FloatArray
from gadei_ps.sync.run_time_model import RunTimeModel

LEARNERS = 158
NODE = 40
"""Learners of a node. The last node has 38, because two of 160 processes are not learners."""
PAPER_MEAN, PAPER_STD = 1.057, 0.393
MEAN, SLOW = 0.9119, 2.2326
"""Seconds of an undisturbed run time, and the factor of a slow node. With these, the recording has
the paper's mean and deviation."""
SWITCH = 60
"""The node is slow in iterations 1 to 60 and recovers at iteration 61."""
TEST, SETTLED = 200, 85
RECORDED = 1600
"""Iterations of the recording: about an hour, as the paper's."""


def cluster(
    slow: npt.NDArray[np.bool_],
    seed: int,
    *,
    learners: int = LEARNERS,
    node: int = NODE,
    which: int = 0,
) -> FloatArray:
    """Run times in seconds, (iterations, learners). slow: whether node `which` is, (iterations,).

    Learners differ a little at all times. The run times of the cluster and of nodes vary together
    over some iterations. Each run time has its own noise (8%). One in a hundred is longer by a
    fifth or more.
    """
    generator = np.random.default_rng(seed)
    iterations = len(slow)
    of_node = np.arange(learners) // node
    # A fixed seed, because the machines are the same in every recording.
    times = MEAN * np.exp(np.random.default_rng(0).normal(0, 0.03, learners))
    times = times * np.exp(_wander(generator, iterations, 1, 0.02))
    times *= np.exp(_wander(generator, iterations, int(of_node[-1]) + 1, 0.03))[:, of_node]
    times *= np.exp(generator.normal(0, 0.08, times.shape))
    late = generator.random(times.shape) < 0.01
    times *= np.where(late, 1.2 + generator.exponential(0.4, times.shape), 1.0)
    times[:, of_node == which] *= np.where(slow, SLOW, 1.0)[:, None]
    found: FloatArray = times
    return found


def _wander(generator: np.random.Generator, iterations: int, count: int, std: float) -> FloatArray:
    """Independent series, (iterations, count), with deviation `std` and correlation 0.9."""
    series = generator.normal(0, std, (iterations, count))
    for before, now in pairwise(series):
        now *= np.sqrt(1 - 0.9**2)
        now += 0.9 * before
    return series


def switches(iterations: int, seed: int) -> npt.NDArray[np.bool_]:
    """Return whether the node is slow, by iteration. It changes every 40 to 160 iterations."""
    generator = np.random.default_rng(seed)
    turns = generator.integers(40, 161, iterations // 40 + 1)
    return np.repeat(np.arange(len(turns)) % 2 == 0, turns)[:iterations]


def recording(iterations: int = RECORDED, *, learners: int = LEARNERS, node: int = NODE) -> Trace:
    """The recording that trains the model: both regimes, several switches."""
    times = cluster(switches(iterations, 1), 1, learners=learners, node=node)
    names = tuple(str(learner) for learner in range(learners))
    return Trace(times, np.zeros(times.shape, np.bool_), names)


def trial(seed: int, *, learners: int = LEARNERS, node: int = NODE, which: int = 0) -> FloatArray:
    """200 iterations, the first 60 with a slow node, with a seed that no recording has."""
    slow = np.arange(TEST) < SWITCH
    return cluster(slow, 100 + seed, learners=learners, node=node, which=which)


def model(out: Path, quick: bool) -> TrainingResult:
    """Train the model of this cluster."""
    return fitting.train(recording(), out=out, epochs=4 if quick else fitting.EPOCHS)


def run(quick: bool = False) -> Part:
    """Figure 2."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        trained = model(file, quick)
        times = [trial(seed) for seed in range(1 if quick else 5)]
        hindsight = [cutting.best_fixed(one) for one in times]
        runs: dict[str, list[Driven]] = {
            "learned": [cutting.drive(RunTimeModel.load(file), one) for one in times],
            "order": [cutting.drive(NormalPredictor(), one) for one in times],
            "sampled": [cutting.drive(SampledPredictor(), one) for one in times],
            "best fixed": [
                cutting.fixed(one, cutoff) for one, cutoff in zip(times, hindsight, strict=True)
            ],
            "full": [cutting.fixed(one, LEARNERS) for one in times],
        }
        unseen = trial(0, which=2)
        others = {
            "learned": cutting.drive(RunTimeModel.load(file), unseen),
            "order": cutting.drive(NormalPredictor(), unseen),
            "sampled": cutting.drive(SampledPredictor(), unseen),
        }
    recorded = recording().times
    data = {
        "mean": float(recorded.mean()),
        "std": float(recorded.std()),
        "training_seconds": trained.seconds,
        "held_out_elbo": trained.held_out_elbo,
        "best_fixed": hindsight,
        "share": {name: [one.share.tolist() for one in made] for name, made in runs.items()},
        "cutoffs": {name: [one.cutoffs.tolist() for one in made] for name, made in runs.items()},
        "oracle": [cutting.oracle(one).tolist() for one in times],
    }
    draw(data)
    return Part(
        title="Cutoff SGD: throughput with predicted cutoffs",
        text=_text(trained, hindsight),
        rows=_rows(runs, others, recorded),
        plots=["cutoff_throughput.svg"],
        data=data,
    )


def _text(trained: TrainingResult, hindsight: list[int]) -> str:
    return f"""\
Figure 2 of Teng and Wood 2018. Their recordings are not public, so the cluster is synthetic and
follows their section 4.1: {LEARNERS} learners on four nodes. One node is slow until iteration
{SWITCH} and then like the others. The mean and the deviation of the run times are calibrated to the
paper's; how run times spread within a node is our guess. The model is trained on a recording of
{RECORDED} iterations (about an hour) with several switches, which takes {trained.seconds:.0f} s on
this machine, and tested on {TEST} iterations of other seeds. A predictor sees the run times only of
the learners that it has waited for; in the first 20 iterations it waits for all. The share of an
iteration is its throughput c / x_(c) divided by the oracle's, which has the run times in advance.
The best fixed cutoff is chosen with hindsight ({min(hindsight)} to {max(hindsight)}). The plot
shows the median of five trials, and their range.

In the rows on another node the third node is slow, which is never slow in the recording. There the
paper's networks alone are not better than Elfving's formula. The learner's levels, an addition of
ours (see gadei_ps.sync.run_time_model), make up for that.
"""


def _rows(
    runs: dict[str, list[Driven]], others: dict[str, Driven], recorded: FloatArray
) -> list[Row]:
    mean, std = float(recorded.mean()), float(recorded.std())
    largest = elfving(LEARNERS, PAPER_MEAN, PAPER_STD)[-1]
    rows = [
        Row("mean run time of the recording", "1.057 s", f"{mean:.3f} s", "calibrated"),
        Row("deviation of the recording", "0.393 s", f"{std:.3f} s", "calibrated"),
        Row(
            "Elfving's largest of 158 at the paper's mean and deviation",
            "2.1063 s",
            f"{largest:.4f} s",
            "ours is the formula of Royston 1982; the paper's last digits differ from it",
        ),
    ]
    parts = {
        "iterations 21 to 60": (20, SWITCH),
        "iterations 61 to 85": (SWITCH, SETTLED),
        "iterations 86 to 200": (SETTLED, TEST),
        "all 200 iterations": (0, TEST),
    }
    told = {
        ("learned", "iterations 61 to 85"): "suboptimal for a few iterations",
        ("learned", "iterations 86 to 200"): "near maximum",
    }
    for name, made in runs.items():
        for what, (begin, end) in parts.items():
            share = cutting.over(made, lambda one: one.share, begin, end)
            rows.append(
                Row(f"share of the oracle, {name}, {what}", told.get((name, what), ""), share)
            )
    for name, other in others.items():
        share = cutting.over([other], lambda one: one.share, 20, SWITCH)
        what = f"share of the oracle, {name}, iterations 21 to 60, another node slow"
        rows.append(Row(what, "", share))
    settled = [int(np.argmax(one.share[SWITCH:] >= 0.95)) for one in runs["learned"]]
    rows.append(
        Row(
            "iterations from the switch until the learned cutoff has 95% of the oracle",
            "a few, settled by the 25th",
            f"{min(settled)} to {max(settled)}",
        )
    )
    seconds = {name: sum(float(one.seconds.sum()) for one in made) for name, made in runs.items()}
    rows.append(
        Row(
            "seconds of an iteration, learned over full",
            "less (figure only)",
            f"{seconds['learned'] / seconds['full']:.2f}",
        )
    )
    return rows


def draw(data: dict[str, Any]) -> None:
    """Draw throughput and length of each iteration: median and range of the trials."""
    figure, (top, below) = pyplot.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    oracle = np.array(data["oracle"])
    _band(top, "oracle", oracle)
    for name in ("full", "best fixed", "order", "learned"):
        rate = oracle * data["share"][name]
        _band(top, name, rate)
        _band(below, name, data["cutoffs"][name] / rate)
    top.set_ylabel("gradients/s")
    top.legend(ncols=5, loc="lower right")
    below.set_ylabel("iteration, s")
    below.set_xlabel("iteration")
    for axes in (top, below):
        axes.set_ylim(bottom=0)
    part.save(figure, "cutoff_throughput.svg")


def _band(axes: Any, name: str, trials: FloatArray) -> None:
    """Draw a curve with its range. trials: (trials, iterations)."""
    iterations = np.arange(1, trials.shape[1] + 1)
    shade = COLOURS[name]
    low, high = trials.min(axis=0), trials.max(axis=0)
    axes.fill_between(iterations, low, high, color=shade, alpha=0.25, linewidth=0)
    axes.plot(iterations, np.median(trials, axis=0), color=shade, linewidth=1, label=name)
