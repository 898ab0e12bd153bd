"""Accuracy against time under ElasticBSP, Zhao et al. 2019, figure 4: real gradients."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot

from gadei_ps.benchmarks.reproduce import part
from gadei_ps.benchmarks.reproduce.cutoff_loss import reached
from gadei_ps.benchmarks.reproduce.digits import Digits
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.show.colours import colours
from gadei_ps.simulate import compare, oracle
from gadei_ps.simulate.descent import Learning
from gadei_ps.simulate.run_times import parse
from gadei_ps.simulate.setting import Setting

LEARNERS = 4
SPEEDS = "speeds:1,1.3,1.7,2.2,std=0.05"
ALIKE = "normal:mean=1,std=0.1"
BATCH = 128
DECAY = 0.0005
LR = 0.1
EPOCHS = 12
AHEAD = (15, 30, 60, 120, 240)
MODELS = ("bsp", "ssp:3", "asp", *(f"elastic-bsp:{R}" for R in AHEAD))
BOUND = 0.96
POINTS = 120


def run(quick: bool = False) -> Part:
    """Measure each model for the same number of epochs."""
    problem = Digits(LR * LEARNERS, 1000 if quick else None)
    epochs = 0.1 if quick else EPOCHS
    gradients = round(epochs * problem.samples / BATCH)
    setting = Setting(LEARNERS, parse(SPEEDS, 0), gradients=gradients)
    learning = Learning(problem, BATCH, lr_on_arrival=LR, points=POINTS, decay=DECAY)
    best = oracle.run(setting)
    runs = {}
    for spec in MODELS:
        found = compare.run(compare.model(spec, LEARNERS), setting, learning)
        runs[spec] = found.as_dict(best.throughput)
    alike = Setting(LEARNERS, parse(ALIKE, 0), gradients=gradients)
    times = {spec: _seconds(spec, alike) for spec in MODELS}
    draw({"runs": runs})
    return Part(
        "ElasticBSP: accuracy against time",
        f"Figure 4 of Zhao et al. 2019 in virtual time, with real gradients of a network with one "
        f"hidden layer of 64 units on MNIST for {epochs:g} epochs. {LEARNERS} learners do 1, 1.3, "
        f"1.7 and 2.2 iterations a second, with a deviation of 5%; mini-batches of {BATCH}, "
        f"weight decay {DECAY}, plain SGD. The rate is {LR} for a gradient that is applied on "
        f"arrival and {LR * LEARNERS:g} for BSP's mean of {LEARNERS}, so that each gradient has "
        f"the same weight. The paper trains deep networks on equal machines; the last rows are "
        f"therefore of "
        f"equal learners, with a deviation of 10%. The paper's system has bottlenecks that are "
        f"not simulated here: the server, and planning for large R, whose cost is in the section "
        f"on ZipLine.",
        [*_rows(runs), *_alike_rows(times)],
        plots=["elastic_loss.svg"],
        data={"oracle": best.as_dict(), "runs": runs, "seconds_alike": times},
    )


def _seconds(spec: str, setting: Setting) -> float:
    """Return the time (s) of all epochs, without training."""
    return compare.run(compare.model(spec, LEARNERS), setting).seconds


def _alike_rows(times: dict[str, float]) -> list[Row]:
    told = {"bsp": "last", "ssp:3": "first", "asp": "second", "elastic-bsp:15": "third"}
    return [
        Row(
            f"{spec}, learners alike",
            told.get(spec, "third" if spec == "elastic-bsp:30" else ""),
            f"{seconds:.0f} s ({seconds / times['bsp']:.0%} of BSP's)",
        )
        for spec, seconds in times.items()
    ]


def _rows(runs: dict[str, dict[str, Any]]) -> list[Row]:
    rows = []
    slowest = runs["bsp"]["seconds"]
    for spec, one in runs.items():
        at = reached(one["curve"], "accuracy", BOUND, above=True)
        last = one["curve"][-5:]
        accuracy = sum(point["accuracy"] for point in last) / len(last)
        told = "BSP" if spec == "bsp" else ""
        if spec in ("ssp:3", "asp"):
            told = "faster than ElasticBSP (AlexNet)"
        elif spec.startswith("elastic"):
            told = "faster than BSP" if int(spec.partition(":")[2]) < 240 else "extra time"
        rows.append(
            Row(
                spec,
                told,
                f"{one['seconds']:.0f} s ({one['seconds'] / slowest:.0%} of BSP's); {BOUND:.0%} at "
                f"{'never' if at is None else f'{at:.0f} s'}; {accuracy:.2%} at the end",
                f"waiting {one['waiting_share']:.1%}; staleness {one['staleness']['mean']:.1f}, at "
                f"most {one['staleness']['max']}",
            )
        )
    return rows


def draw(data: dict[str, Any]) -> None:
    """Draw the curves and the times; of ElasticBSP the least and the greatest R."""
    kept = (AHEAD[0], AHEAD[-1])
    shown = [spec for spec in MODELS if "elastic" not in spec or int(spec.split(":")[1]) in kept]
    runs = {spec: data["runs"][spec] for spec in shown}
    colour = colours(runs)
    figure = pyplot.figure(figsize=(8, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for spec, one in runs.items():
        points = [(point["seconds"], point["accuracy"]) for point in one["curve"]]
        left.plot(*zip(*points, strict=True), label=spec, color=colour[spec], linewidth=1)
    top = max(point["accuracy"] for one in runs.values() for point in one["curve"])
    left.set_ylim(max(0.0, top - 0.1), top + 0.005)
    left.set_xlabel("virtual time, s")
    left.set_ylabel("accuracy on the test images")
    left.legend()
    seconds = [one["seconds"] for one in runs.values()]
    right.barh(list(runs), seconds, color=list(colour.values()))
    right.invert_yaxis()
    right.set_xlabel("virtual time for all epochs, s")
    right.tick_params(labelsize=8)
    part.save(figure, "elastic_loss.svg")
