"""The planner of virtual workers: its predictions of times and memory against what stages take.

Times: layers that wait, and layers that compute. The planner measures them alone and cuts them for
two stages, which are then timed while the pipeline trains. Stages that compute share caches and
Python's lock then, and two cores with the learner's own thread and the server. Memory: a model that
exceeds what one stage may hold. On one device the planner refuses it; on two it trains, and all
storages that a stage's operations touch are counted while they exist.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gadei_ps.benchmarks.common import Report
from gadei_ps.benchmarks.gang import Gang
from gadei_ps.benchmarks.virtual_jobs import Jobs
from gadei_ps.benchmarks.virtual_shape import Shape

OURS = "gadei-ps"
REACH = 0.1
"""Allowed relative distance of a stage's time from the prediction."""
IN_FLIGHT = 4
DEVICES = ["host:1"] * 2


def measure(report: Report, members: Gang, size: Mapping[str, Any], jobs: Jobs) -> None:
    """members: one of them trains."""

    def ask(shape: Shape, devices: Sequence[str], **more: object) -> dict[str, Any]:
        order = {"shape": shape.told(), "planned": jobs.job(IN_FLIGHT - 1, shape), **more}
        return members.ask({**order, "in_flight": IN_FLIGHT, "devices": devices}, first=1)[0]

    for name, told in size["planned"].items():
        shape = Shape(**told)
        seconds = 2 * size["call_s"]
        _times(report, name, [ask(shape, DEVICES, seconds=seconds) for _ in range(size["rounds"])])
    limit, shape = size["limit"], Shape(**size["large"])
    one, two = (ask(shape, some, limits=[limit] * len(some)) for some in (DEVICES[:1], DEVICES))
    _memory(report, one, two, limit)


def _off(told: Mapping[str, Any]) -> float:
    """Return the relative distance of the worst stage from its prediction."""
    pairs = zip(told["stages_s"], told["predicted_s"], strict=True)
    return float(max(abs(real / predicted - 1) for real, predicted in pairs))


def _times(report: Report, name: str, rounds: Sequence[Mapping[str, Any]]) -> None:
    """The round whose worst stage is in the middle."""
    middle = statistics.median_low(map(_off, rounds))
    told = next(one for one in rounds if _off(one) == middle)
    rate = told["mini_batches"] / told["seconds"]
    facts = {"series": "planned", "layers": name, "cuts": told["cuts"], "rounds": len(rounds)}
    seconds = {"stages_s": told["stages_s"], "predicted_s": told["predicted_s"]}
    rates = {"rate": rate, "predicted_rate": told["predicted_rate"]}
    off = {"contender": OURS, "median": middle, "unit": "of the prediction"}
    report.rows.append({**off, **facts, **seconds, **rates})
    reached = {"ratio": 1 + middle, "reach": 1 + REACH, "reached": middle <= REACH}
    report.ratios.append({"contender": "the planner's prediction", **facts, **reached})
    predicted, real = (
        ", ".join(f"{1e3 * one:.2f}" for one in seconds[key]) + " ms"
        for key in ("predicted_s", "stages_s")
    )
    paces = f"{told['predicted_rate']:.1f}/s, in fact {rate:.1f}/s"
    report.lines.append(
        [f"planned: layers that {name}", f"{OURS}, predicted {predicted}", real, paces]
    )


def _memory(report: Report, one: Mapping[str, Any], two: Mapping[str, Any], limit: int) -> None:
    if "refused" not in one:
        raise AssertionError(f"one device holds the model in {limit} bytes: {one}")
    report.notes.append(f"one device of {limit / 2**20:g} MiB: {one['refused']}")
    for stage, peak in enumerate(two["peak_bytes"]):
        facts = {"series": "memory", "stage": stage, "limit": limit, "refused": one["refused"]}
        row = {"contender": OURS, "median": peak, "unit": "bytes", **facts}
        row["predicted"] = predicted = two["predicted_bytes"][stage]
        report.rows.append(row)
        reached = {"ratio": limit / peak, "reach": 1.0, "reached": peak <= limit}
        report.ratios.append({"contender": "limit", **facts, **reached})
        beside = f"planned {predicted / 2**20:.1f}, limit {limit / 2**20:g}"
        what = "memory of a stage, MiB"
        report.lines.append([what, f"{OURS}, stage {stage}", f"{peak / 2**20:.1f}", beside])
