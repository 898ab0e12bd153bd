"""Accuracy of `gadei-ps train` on trec6 under every synchronization model."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from gadei_ps.benchmarks.accuracy import train
from gadei_ps.benchmarks.classifier import files
from gadei_ps.benchmarks.nlc_texts import data_directory
from gadei_ps.benchmarks.reproduce.part import Part, Row

MODELS = (
    "asp",
    "ssp:s=3",
    "bsp",
    "elastic-bsp:R=15",
    "cutoff:c=1",
    "cutoff:by=order",
    "wsp:D=1,s_local=1",
)
SEEDS = (0, 1, 2)


def run(quick: bool = False) -> Part:
    """Run each model with each seed, with the defaults of `gadei-ps train --model cnn`."""
    cases = [("one learner", 1, "asp"), *((model, 2, model) for model in MODELS)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in cases}
    more = ["--epochs", "1"] if quick else []
    with tempfile.TemporaryDirectory() as scratch:
        train_file, test_file = files(data_directory(), "trec6", 1, Path(scratch))
        out = Path(scratch) / "model"
        for seed in SEEDS[:1] if quick else SEEDS:
            for name, learners, model in cases:
                options = ["--sync", model, *more]
                one = train(train_file, test_file, learners, 0.0, seed, out, options, "cnn")
                one.pop("model_dir")  # a temporary directory
                found[name].append(one)
                print(seed, name, one["test_accuracy"], flush=True)
    one_learner = found.pop("one learner")
    rows = [Row("one learner", "", _accuracy(one_learner), _means(one_learner))]
    for model, runs in found.items():
        more_than_one = 100 * (_mean(runs, "test_accuracy") - _mean(one_learner, "test_accuracy"))
        rows.append(
            Row(
                f"two learners, {model}",
                "within 1 point of one learner",
                f"{_accuracy(runs)} ({more_than_one:+.1f} points)",
                _means(runs),
            )
        )
    return Part(
        "Accuracy on trec6 for every model",
        "The sentence classifier of GaDei (`--model cnn`) for each model with three seeds and the "
        "defaults: Adagrad, and a stop after five epochs without improvement. Figures are means, "
        "with the standard error. There are 500 test questions, so one question is 0.2 points. "
        "Collecting models apply the mean of two gradients, the others apply each gradient.",
        rows,
        data={"one": one_learner, "two": found},
    )


def _mean(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(run[name] for run in runs)


def _accuracy(runs: list[dict[str, Any]]) -> str:
    figures = [100 * run["test_accuracy"] for run in runs]
    error = statistics.stdev(figures) / len(figures) ** 0.5 if len(figures) > 1 else 0.0
    return f"{statistics.fmean(figures):.1f} ± {error:.1f}%"


def _means(runs: list[dict[str, Any]]) -> str:
    return (
        f"{_mean(runs, 'epochs'):.0f} epochs, {_mean(runs, 'gradients_applied'):,.0f} gradients "
        f"applied, {_mean(runs, 'gradients_dropped'):,.0f} dropped, "
        f"{_mean(runs, 'training_seconds'):.0f} s"
    )
