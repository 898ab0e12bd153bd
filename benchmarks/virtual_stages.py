"""Two stages of real layers: what two threads of one process reach, and the whole pipeline.

Passes alone: forward and backward passes of one stage by one thread; then by two threads, each with
a stage of its own; then by two processes with a thread each. All begin at one moment, and their
passes a second are compared with those of the one thread. Beside that, the pipeline of two stages
and the same model in one plain learner with one thread and with two threads of torch; the optimizer
is the learner's own, and all push once a wave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.gang import Gang
from gadei_ps.benchmarks.virtual_jobs import Jobs
from gadei_ps.benchmarks.virtual_shape import Shape

OURS = "gadei-ps"
ONE, THREADS, PROCESSES = "one thread", "two threads", "two processes"
PLAIN = {f"plain learner, {count} of torch's threads": count for count in (1, 2)}
S_LOCAL = 3
BEFORE_S = 0.05  # the order has come by then, and the towers are made


def measure(report: Report, members: Gang, size: Mapping[str, Any], jobs: Jobs) -> None:
    """members: two processes."""
    for width, layers, samples in size["towers"]:
        shape = Shape(2, width, layers, samples)
        contenders = {
            **_alone(members, shape, size["call_s"]),
            **_whole(members, shape, jobs.job(S_LOCAL, shape), size["call_s"]),
        }
        _tell(report, shape, alternate(contenders, size["rounds"]))


def _alone(members: Gang, shape: Shape, seconds: float) -> dict[str, Callable[[], float]]:
    def passes(count: int, processes: int) -> Callable[[], float]:
        def measured() -> float:
            order = {"shape": shape.told(), "towers": count, "seconds": seconds}
            at = time.monotonic() + BEFORE_S
            told = members.ask({**order, "at": at}, first=processes)
            return float(sum(one["rate"] for one in told))

        return measured

    return {ONE: passes(1, 1), THREADS: passes(2, 1), PROCESSES: passes(1, 2)}


def _whole(members: Gang, shape: Shape, job: str, seconds: float) -> dict[str, Callable[[], float]]:
    def rate(way: Mapping[str, Any]) -> Callable[[], float]:
        order = {"shape": shape.told(), "seconds": seconds, **way}

        def measured() -> float:
            told = members.ask(order, first=1)[0]
            return float(told["mini_batches"] / told["seconds"])

        return measured

    found = {OURS: rate({"pipeline": job})}
    for name, count in PLAIN.items():
        found[name] = rate({"plain": job, "threads": count})
    return found


def _tell(report: Report, shape: Shape, figures: Mapping[str, list[float]]) -> None:
    facts: dict[str, Any] = {
        "series": "stages",
        "width": shape.width,
        "layers": shape.layers,
        "samples": shape.samples,
    }
    facts["stage_s"] = 1 / summary(figures[ONE], larger=True)["median"]
    for name, rates in figures.items():
        row = {"contender": name, **facts, **summary(rates, "1/s", larger=True)}
        of = ONE if name in (THREADS, PROCESSES) else OURS if name in PLAIN else None
        beside = f"a stage of {1e3 * facts['stage_s']:.2f} ms" if name == ONE else ""
        if of:
            first, second = (name, of) if of == ONE else (of, name)
            ratio = ratios_of(figures[first], figures[second], larger=True)
            report.ratios.append({"contender": name, "of": of, **facts, **ratio})
            beside = f"{ratio['ratio']:.2f} times {ONE}"
            if of == OURS:
                beside = f"{OURS} is {ratio['ratio']:.2f} times as fast"
        report.rows.append(row)
        figure = f"{row['median']:,.1f}/s ±{row['spread']:.0%}"
        report.lines.append([str(shape), name, figure, beside])
