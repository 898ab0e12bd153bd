"""Accuracy against time of virtual workers, on MNIST and trec6, beside a plain learner."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import numpy as np
import torch

from gadei_ps.benchmarks.reproduce import part, virtual_learner
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.benchmarks.reproduce.virtual_learner import BATCHES, Problem, accuracy, problem
from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import JobFailed
from gadei_ps.job.config import from_mapping
from gadei_ps.job.control import Status
from gadei_ps.machine import process
from gadei_ps.machine.launch import Learners
from gadei_ps.memory import weights
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.segment import attach
from gadei_ps.memory.shm import segment_name
from gadei_ps.show.colours import colours

WORKERS, STAGES = 2, 2
MODELS = tuple((D, s_local) for D in (0, 1, 4) for s_local in (0, 3))
EPOCHS = {"mnist": 6, "trec6": 8}
SEEDS = {"mnist": (0,), "trec6": (0, 1, 2)}
RATES = {"mnist": 0.05, "trec6": 0.02}
REACH = 0.01
LOOK_S = 0.5
PATIENCE_S = 300.0


def run(quick: bool = False) -> Part:
    """Train the plain learner and the virtual workers, the same number of epochs each."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    runs: list[dict[str, Any]] = []
    for name in EPOCHS:
        one = problem(name)
        epochs = 1 if quick else EPOCHS[name]
        seeds = SEEDS[name][:1] if quick else SEEDS[name]
        cases = [None, *MODELS[:: len(MODELS) - 1 if quick else 1]]
        # Seed by seed, so that what else the machine does meets all of them.
        found: dict[tuple[int, int] | None, list[dict[str, Any]]] = {case: [] for case in cases}
        for seed in seeds:
            for case in cases:
                found[case].append(train(name, one, case, epochs, seed))
        runs += [each for some in found.values() for each in some]
        rows += _rows(name, found)
    draw({"runs": runs})
    told = {"rates": RATES, "batches": BATCHES, "epochs": EPOCHS, "seeds": SEEDS}
    return Part(
        "Virtual workers: accuracy against time",
        f"{WORKERS} virtual workers of {STAGES} stages each, all on this machine's cores (so "
        "more threads than cores), beside one plain learner with the same optimizer of its own. "
        f"MNIST: two hidden layers of {virtual_learner.HIDDEN} units, SGD, rate "
        f"{RATES['mnist']:g}, mini-batches of {BATCHES['mnist']}, {EPOCHS['mnist']} epochs. "
        f"trec6: an embedding of {virtual_learner.EMBEDDING} values, a convolution with "
        f"{virtual_learner.MAPS} filters, maximum, dropout; Adagrad, rate {RATES['trec6']:g}, "
        f"mini-batches of {BATCHES['trec6']}, {EPOCHS['trec6']} epochs, the mean of "
        f"{len(SEEDS['trec6'])} runs; there are 500 test questions, so one question is 0.2 "
        "points. All contenders have the same rate, and all updates are added. Accuracy on the "
        "test files at the end of the last epoch.",
        rows,
        ["virtual_accuracy.svg"],
        {"runs": runs, "workers": WORKERS, "stages": STAGES, **told},
    )


def train(
    name: str, one: Problem, case: tuple[int, int] | None, epochs: int, seed: int
) -> dict[str, Any]:
    """One job: the plain learner, or virtual workers with D and s_local.

    Returns its end, and a curve of seconds and accuracy. Seconds count from the first update.
    """
    sync = "asp" if case is None else "wsp:D={},s_local={}".format(*case)
    job = f"reproduce-{os.getpid()}"
    told = {
        "name": job,
        "history": False,
        "sync": sync,
        "optimizer": {"kind": "add"},
        "standby": False,
    }
    layers = one.layers()
    curve: list[tuple[float, float]] = []
    command = process.module_command("gadei_ps.benchmarks.reproduce.virtual_learner")
    arguments = (name, RATES[name], epochs, seed, 1 if case is None else STAGES)
    with Daemon(from_mapping(told, job), silent=True) as served:
        learners = Learners(
            [*command, *map(str, arguments)], 1 if case is None else WORKERS, str(served.socket)
        )
        try:
            begin, until = 0.0, time.monotonic() + PATIENCE_S
            while not (status := served.request(Status()))["version"]:
                _check(until)
                time.sleep(0.01)
            begin = time.monotonic()
            segment = attach(segment_name(job, "weights"), SegmentKind.WEIGHTS, writable=False)
            shared = weights.read_table(segment).views(weights.data(segment))
            while True:
                done = status["work"]["state"] == "done" and not status["learners"]
                seconds = time.monotonic() - begin
                curve.append((seconds, _accuracy(layers, shared, one)))
                if done:
                    break
                _check(until)
                time.sleep(LOOK_S)
                status = served.request(Status())
        finally:
            learners.kill()
    return {
        "set": name,
        "sync": sync,
        "seed": seed,
        "curve": curve,
        "seconds": curve[-1][0],
        "accuracy": curve[-1][1],
        "updates": status["version"],
    }


def _check(until: float) -> None:
    if time.monotonic() > until:
        raise JobFailed(f"the learners have not ended after {PATIENCE_S:g} s")


def _accuracy(layers: list[torch.nn.Module], shared: dict[str, np.ndarray], one: Problem) -> float:
    for key, parameter in torch.nn.Sequential(*layers).named_parameters():
        parameter.data = torch.from_numpy(shared[key].copy())
    return accuracy(layers, one.test)


def _rows(name: str, found: dict[Any, list[dict[str, Any]]]) -> list[Row]:
    mean = {case: statistics.fmean(one["accuracy"] for one in some) for case, some in found.items()}
    rows = []
    for case, some in found.items():
        seconds = statistics.fmean(one["seconds"] for one in some)
        why = (
            f"{seconds:.1f} s, {round(statistics.fmean(one['updates'] for one in some)):,} updates"
        )
        if case is None:
            rows.append(Row(f"{name}, plain learner", "", f"{mean[case]:.2%}", why))
            continue
        more = 100 * (mean[case] - mean[None])
        ours = f"{mean[case]:.2%} ({more:+.2f} points)"
        reach = f"within {100 * REACH:g} point of the plain learner"
        rows.append(Row(f"{name}, {some[0]['sync']}", reach, ours, why))
    return rows


def draw(data: dict[str, Any]) -> None:
    """Draw the curves of the first seed."""
    from matplotlib import pyplot

    runs = data["runs"]
    colour = colours(dict.fromkeys(one["sync"] for one in runs), {"asp": "tab:gray"})
    sets = list(dict.fromkeys(one["set"] for one in runs))
    figure, axes = pyplot.subplots(1, len(sets), figsize=(8, 4), layout="constrained")
    for axis, name in zip(axes, sets, strict=True):
        for one in runs:
            if one["set"] == name and one["seed"] == 0:
                points = np.array(one["curve"])
                label = "plain learner" if one["sync"] == "asp" else one["sync"]
                style = {"color": colour[one["sync"]], "linewidth": 1}
                axis.plot(points[:, 0], points[:, 1], label=label, **style)
        best = max(one["accuracy"] for one in runs if one["set"] == name)
        axis.set_ylim(best - 0.15, best + 0.01)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("time, s")
    axes[0].set_ylabel("accuracy on the test file")
    axes[0].legend()
    part.save(figure, "virtual_accuracy.svg")
