"""ElasticBSP's Figure 4 with real processes: accuracy against time on MNIST, 4 unequal learners."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from gadei_ps.benchmarks.reproduce import mnist, part
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping
from gadei_ps.job.control import Status, ask
from gadei_ps.machine import process
from gadei_ps.machine.launch import Learners
from gadei_ps.memory import weights
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.segment import attach
from gadei_ps.memory.shm import segment_name
from gadei_ps.show.colours import colours

SECONDS = (0.020, 0.025, 0.035, 0.050)
"""Duration of an iteration, by learner."""
BATCH = 128
EPOCHS = 12
RATE = 0.1
LOOK_S = 0.25
PATIENCE_S = 600.0
MODELS = ("bsp", "ssp:s=3", "asp", *(f"elastic-bsp:R={R}" for R in (15, 30, 60, 120, 240)))


def train(sync: str, epochs: int, test: mnist.Images) -> dict[str, Any]:
    """Run one job. Returns its end, and a curve of seconds, accuracy and loss on test images."""
    name = f"reproduce-{os.getpid()}"
    tensors = [{"name": name_, "shape": list(shape)} for name_, shape in mnist.SHAPES.items()]
    config = from_mapping(
        {
            "name": name,
            "history": False,
            "sync": sync,
            "optimizer": {"kind": "sgd", "lr": RATE},
            "tensors": tensors,
        },
        name,
    )
    curve: list[tuple[float, float, float]] = []
    # Otherwise each learner has NumPy threads for all cores, and they compete for two cores.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with Daemon(config) as served:
        segment = attach(segment_name(name, "weights"), SegmentKind.WEIGHTS, writable=True)
        model = weights.read_table(segment)
        shared = model.views(weights.data(segment))
        for key, values in mnist.start().items():
            shared[key][...] = values
        command = process.module_command("gadei_ps.benchmarks.reproduce.mnist_learner")
        command += [",".join(map(str, SECONDS)), str(BATCH), str(epochs), "0"]
        learners = Learners(command, len(SECONDS), str(served.socket))
        try:
            begin = 0.0
            until = time.monotonic() + PATIENCE_S
            while True:
                told = ask(name, Status())
                if not begin and told["version"] > 0:
                    begin = time.monotonic()
                now = time.monotonic()
                copy = {key: values.copy() for key, values in shared.items()}
                right, loss = mnist.accuracy(copy, test)
                if begin:
                    curve.append((now - begin, right, loss))
                if told["work"]["state"] == "done" or now > until:
                    break
                time.sleep(LOOK_S)
        finally:
            learners.kill()
    return {
        "sync": sync,
        "curve": curve,
        "seconds": curve[-1][0],
        "accuracy": curve[-1][1],
        "best": max(point[1] for point in curve),
        "updates": told["supersteps"] or told["version"],
        "applied": told["gradients_applied"],
        "finished": told["work"]["state"] == "done",
    }


def run(quick: bool = False) -> Part:
    """Measure all models in turn, with the same number of epochs."""
    test = mnist.load("t10k")
    epochs = 1 if quick else EPOCHS
    runs = [train(sync, epochs, test) for sync in (MODELS[:4] if quick else MODELS)]
    draw({"runs": runs})
    slowest = next(one for one in runs if one["sync"] == "bsp")
    rows = []
    for one in runs:
        at = next((t for t, right, _ in one["curve"] if right >= 0.95), None)
        rows.append(
            Row(
                one["sync"],
                "ElasticBSP (R = 15) ends before BSP and is more accurate"
                if one["sync"].startswith("elastic")
                else "",
                f"{one['seconds']:.1f} s, {one['accuracy']:.2%}",
                f"{slowest['seconds'] / one['seconds']:.2f} x BSP's speed, "
                + (f"95% after {at:.1f} s" if at else "95% not reached")
                + f", {one['updates']:,} updates",
            )
        )
    return Part(
        "ElasticBSP, Figure 4: accuracy against time, real processes",
        f"Zhao et al. 2019 train AlexNet and ResNet-50 on CIFAR on 4 machines. Here 4 learner "
        f"processes train a network of {mnist.HIDDEN} hidden units on MNIST for {epochs} epochs, "
        f"by SGD with rate {RATE} and mini-batches of {BATCH}. Their iterations take "
        f"{', '.join(f'{s * 1e3:.0f}' for s in SECONDS)} ms, with a deviation of 5%; a learner "
        "sleeps for the time that computing leaves. The table shows total time and test accuracy "
        "at the end. As in the paper all models have the same rate. BSP applies the mean of four "
        "gradients, so it updates the weights a quarter as often as the others.",
        rows,
        ["elastic_accuracy.svg"],
        {"runs": runs, "seconds": SECONDS, "batch": BATCH, "epochs": epochs, "rate": RATE},
    )


def draw(data: dict[str, Any]) -> None:
    """Draw the curves; of ElasticBSP the least and the greatest R, since they differ little."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    runs = [one for one in data["runs"] if not one["sync"].endswith(("=30", "=60", "=120"))]
    colour = colours(one["sync"] for one in runs)
    for one in runs:
        points = np.array(one["curve"])
        name = one["sync"]
        axes.plot(points[:, 0], points[:, 1], label=name, color=colour[name], linewidth=1)
    axes.set_xlabel("time, s")
    axes.set_ylabel("accuracy on the test images")
    axes.set_ylim(0.85, 1.0)
    axes.legend()
    part.save(figure, "elastic_accuracy.svg")
