"""Accuracy of `gadei-ps train` on trec6 under every synchronization model."""

from __future__ import annotations

import tempfile
from pathlib import Path

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


def run(quick: bool = False) -> Part:
    """Run each model once, with the defaults of `gadei-ps train --model cnn`."""
    found = {}
    more = ["--epochs", "1"] if quick else []
    with tempfile.TemporaryDirectory() as scratch:
        train_file, test_file = files(data_directory(), "trec6", 1, Path(scratch))
        out = Path(scratch) / "model"
        cases = [("one learner", 1, "asp"), *((model, 2, model) for model in MODELS)]
        for name, learners, model in cases:
            options = ["--sync", model, *more]
            found[name] = train(train_file, test_file, learners, 0.0, 0, out, options, "cnn")
            found[name].pop("model_dir")  # a temporary directory
            print(name, found[name]["test_accuracy"], flush=True)
    one = found.pop("one learner")
    rows = [Row("one learner", "", f"{one['test_accuracy']:.1%}", _told(one))]
    for model, told in found.items():
        less = (one["test_accuracy"] - told["test_accuracy"]) * 100
        rows.append(
            Row(
                f"two learners, {model}",
                "within 1 point of one learner",
                f"{told['test_accuracy']:.1%} ({-less:+.1f} points)",
                _told(told),
            )
        )
    return Part(
        "Accuracy on trec6 for every model",
        "One run of `gadei-ps train --model cnn`, the sentence classifier of GaDei, for each "
        "model, with the defaults: Adagrad, and a stop after five epochs without improvement. "
        "There are 500 test questions, so one question is 0.2 points. Collecting models apply the "
        "mean of two gradients, the others apply each gradient.",
        rows,
        data={"one": one, "two": found},
    )


def _told(run: dict[str, object]) -> str:
    return (
        f"{run['epochs']} epochs, {run['gradients_applied']:,} gradients applied, "
        f"{run['gradients_dropped']:,} dropped, {run['training_seconds']:.0f} s"
    )
