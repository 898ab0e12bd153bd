"""Worker groups of Yan and Shao in virtual time: traffic, speed-up, and accuracy by k and rule."""

from __future__ import annotations

import math
from typing import Any

from matplotlib import pyplot

from gadei_ps.benchmarks.reproduce import part
from gadei_ps.benchmarks.reproduce.digits import Digits
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.groups.compress import Wire
from gadei_ps.show.colours import colours
from gadei_ps.simulate import groups_report, groups_setting
from gadei_ps.simulate.groups_report import Learning
from gadei_ps.simulate.groups_setting import GroupSetting, Links
from gadei_ps.simulate.run_times import parse

TIMES = "normal:mean=0.05,std=0.005"
LINKS = Links((125e6,), 0.001)
VALUES = 25_000_000  # 100 MB
GROUP_SIZES = (2, 4, 8, 16)
MACHINES = (1, 4, 16, 64, 256)
SPEED_K = 100
BATCH = 32
LR = 0.1
PASSES = 4
TRAINED = 8
"""Machines that train."""
RULES = (
    "replace", "mix:0.5", "outer:1:0", "outer:0.7:0.5", "outer:0.7:0.9", "outer:0.7:0.9:1",
    "outer:0.7:0.9:4",
)  # fmt: skip
COMPARED = ("replace", "mix:0.5", "outer:0.7:0.9")
KS = ("5", "20", "100", "1epoch")
GROUPS = (1, 2, 4, 8)
K, P = "20", 4


def run(quick: bool = False) -> Part:
    """Count traffic, measures speed-up, and trains every case for the same number of passes."""
    traffic, speeds = _traffic(), _speeds(MACHINES[:3] if quick else MACHINES)
    problem = Digits(LR, 500 if quick else None)
    if quick:
        problem.samples = 2048
    passes = 1 if quick else PASSES
    alone = _train(problem, "replace", 1, 1, K, passes)
    cases = [(rule, K, P) for rule in RULES]
    cases += [(rule, k, P) for k in KS if k != K for rule in COMPARED]
    cases += [(rule, K, groups) for groups in GROUPS if groups != P for rule in COMPARED]
    runs = []
    for rule, k, groups in cases[:2] if quick else cases:
        told = _train(problem, rule, TRAINED, groups, k, passes)
        runs.append({"rule": rule, "k": k, "groups": groups, **told})
    data = {"traffic": traffic, "speeds": speeds, "alone": alone, "runs": runs}
    draw(data)
    return Part(
        "Worker groups: traffic, speed-up, and accuracy",
        "Yan and Shao, *Asynchronous Distributed Data Parallelism for Machine Learning*, in "
        "virtual time, with the rules that machines use. They give two figures: a machine "
        "sends 2(m - 1)/m models in an aggregation among m machines and 1 in a broadcast, and the "
        "speed-up is quasi linear. Traffic and speed-up: a model of 100 MB, 125 MB a second, "
        "latency 1 ms, a ring of groups, mini-batches of 0.05 s with a deviation of 10%; "
        f"speed-up with groups of 4 and k = {SPEED_K}. "
        "They count (m - 1)/m for an aggregation on links that send and receive at once. But each "
        "machine has to send (m - 1)/m to have the sums made and (m - 1)/m to give its sum away, "
        "so its link sends for twice that long.\n\n"
        "Accuracy: the network of 64 hidden units on MNIST, plain gradient descent with rate "
        f"{LR}, mini-batches of {BATCH}, {passes} passes over the training set by {TRAINED} "
        f"machines, k = {K} mini-batches, {P} groups in a ring unless the row gives another number."
        f" One machine that trains as many samples alone reaches {alone['accuracy']:.2%}. The "
        "figure is the mean of the groups' models on the test images. The paper has none here.",
        [*_traffic_rows(traffic), *_speed_rows(speeds), *_accuracy_rows(alone, runs)],
        plots=["groups.svg"],
        data=data,
    )


def _setting(machines: int, groups: int, k: int, rounds: int, **how: Any) -> GroupSetting:
    given: dict[str, Any] = {"values": VALUES, "links": LINKS} | how
    return GroupSetting(
        groups_setting.sizes(str(groups), machines),
        groups_setting.neighbours("ring", groups),
        parse(TIMES, 0),
        k=k,
        batch=BATCH,
        rounds=rounds,
        **given,
    )


def _traffic() -> list[dict[str, Any]]:
    """Measure the models that a machine sends in a round, for two groups of several sizes."""
    found = []
    cases = [(m, Wire.FLOAT32, True) for m in GROUP_SIZES]
    cases += [(4, Wire.FLOAT32, False), (4, Wire.BFLOAT16, True), (4, Wire.INT8, True)]
    for m, wire, whole in cases:
        setting = _setting(2 * m, 2, 10, 5, wire=wire, whole=whole)
        told = groups_report.run("replace", setting).as_dict()
        kept = ("aggregation_models", "aggregation_models_paper", "broadcast_models")
        found.append({"m": m, "wire": wire, "whole": whole} | {key: told[key] for key in kept})
    return found


def _traffic_rows(traffic: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for one in traffic:
        plain = one["wire"] is Wire.FLOAT32 and one["whole"]
        how = "" if plain else f", {one['wire']}"
        how += "" if one["whole"] else ", broadcast in parts"
        sent, paper = one["aggregation_models"], one["aggregation_models_paper"]
        rows.append(
            Row(
                f"models sent, groups of {one['m']}{how}",
                f"{paper:.3f} + 1",
                f"{sent:.3f} + {one['broadcast_models']:.3f}",
                f"aggregation {sent / paper - 1:+.1%}",
            )
        )
    return rows


def _speeds(machines: tuple[int, ...]) -> list[dict[str, Any]]:
    found = []
    for count in machines:
        setting = _setting(count, max(1, count // 4), SPEED_K, 50)
        told = groups_report.run("replace", setting).as_dict()
        kept = ("speed_up", "speed_up_share", "waiting_share", "exchange_share")
        found.append({"machines": count} | {key: told[key] for key in kept})
    return found


def _speed_rows(speeds: list[dict[str, Any]]) -> list[Row]:
    return [
        Row(
            f"speed-up, {one['machines']} machines",
            "quasi linear",
            f"{one['speed_up']:.1f}",
            f"{one['speed_up_share']:.1%} of linear; waiting {one['waiting_share']:.1%}, "
            f"aggregating {one['exchange_share']:.1%}",
        )
        for one in speeds
        if one["machines"] > 1
    ]


def _train(
    problem: Digits, rule: str, machines: int, groups: int, k: str, passes: int
) -> dict[str, Any]:
    """Loss and accuracy after these passes over the training set."""
    batches = groups_setting.batches(k, problem.samples, machines, BATCH)
    of_a_pass = math.ceil(problem.samples / machines / BATCH / batches)
    values = len(problem.initial())
    setting = _setting(machines, groups, batches, passes * of_a_pass, values=values)
    found = groups_report.run(rule, setting, Learning(problem, LR))
    assert found.training is not None
    return {**found.training, "curve": found.curve, "seconds": found.seconds}


def _accuracy_rows(alone: dict[str, Any], runs: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for one in runs:
        case = one["rule"]
        case += "" if one["k"] == K else f", k = {one['k']}"
        case += "" if one["groups"] == P else f", groups: {one['groups']}"
        within = one["accuracy"] - alone["accuracy"]
        rows.append(
            Row(
                f"accuracy, {case}",
                f"within 1 point of {alone['accuracy']:.2%}",
                f"{one['accuracy']:.2%}",
                f"{100 * within:+.2f} points; groups from {one['accuracy_least']:.2%} to "
                f"{one['accuracy_most']:.2%}; their mean model {one['accuracy_of_mean']:.2%}",
            )
        )
    return rows


def draw(data: dict[str, Any]) -> None:
    """Draw the speed-up, and the accuracy of each rule with the usual k and number of groups."""
    speeds, alone = data["speeds"], data["alone"]
    runs = [one for one in data["runs"] if (one["k"], one["groups"]) == (K, P)]
    colour = colours((one["rule"] for one in runs), {})
    figure = pyplot.figure(figsize=(8, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    machines = [one["machines"] for one in speeds]
    left.loglog(machines, machines, color="black", linestyle="--", label="linear")
    speed_up = [one["speed_up"] for one in speeds]
    left.loglog(machines, speed_up, marker="o", color="tab:blue", label="groups of 4")
    left.set_xlabel("machines")
    left.set_ylabel("speed-up")
    left.legend()
    for label, one in [("one machine", alone), *((one["rule"], one) for one in runs)]:
        points = [(point["samples"], point["accuracy"]) for point in one["curve"]]
        # A machine alone is what all rules are compared with.
        style = {"color": colour.get(label, "black"), "linewidth": 1}
        right.plot(*zip(*points, strict=True), label=label, **style)
    top = max(point["accuracy"] for one in (alone, *runs) for point in one["curve"])
    right.set_ylim(max(0.0, top - 0.15), top + 0.005)
    right.set_xlabel("samples")
    right.set_ylabel("accuracy on the test images")
    right.legend()
    part.save(figure, "groups.svg")
