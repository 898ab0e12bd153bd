"""An experiment: weights and their update on the GPU, shared by CUDA IPC, beside the host's way.

An owner has the weights on the GPU, and for each learner two slots for gradients; learners, which
are other processes, map that memory. A learner computes a gradient from the weights in place,
copies it into a slot on the device, and continues; the owner's kernel subtracts it. The two wait
for each other by interprocess events, and by counters in memory that the processes share, because
an event can only be waited for once it has been recorded.

The host's way is a real job, with the same computation: a gradient goes over the bus into a ring,
the server's threads apply it, and weights come back over the bus.

The experiment lacks what a server must have. Nothing is applied exactly once: a GPU's memory goes
with the process that has made it, so a kill -9 of the owner loses the weights; a kernel that was
cut off looks like one that was not, and there is no undo log. It does not check gradients or count
staleness, and it knows no optimizer except SGD and no second GPU.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.gang import Failed, Gang
from gadei_ps.benchmarks.gpu.target import Target, job, noted, started
from gadei_ps.benchmarks.scale import SHARE, free_bytes

PROCESS = "gadei_ps.benchmarks.gpu.server_on_gpu_process"
START_S = 60.0
RUN_S = 20.0
LEAST_TIMES = 5
HOST, DEVICE = "gadei-ps, on the host", "prototype, on the GPU"
SEGMENTS = 2.5
"""Shared memory of a job for each learner, and once more, in sizes of the model."""

Seconds = Callable[[int], float]
"""Takes a number of gradients of each learner. Returns the seconds that they take."""


def measure(target: Target) -> Iterator[Report]:
    """Measure each number of learners at each size, both ways in turns."""
    size = target.sizes("server_on_gpu")
    report = Report(["MB", "learners", "of", HOST, DEVICE, "prototype/host"])
    if not target.on_gpu:
        report.notes.append(f"{DEVICE}: not measured: it needs a GPU")
    taken = 0.0  # by the number of learners before
    for learners in size["learners"]:
        if target.left() < taken / 2:
            report.notes.append(f"{learners} learners: not measured: no time")
            continue
        begin = time.monotonic()
        with ExitStack() as stack:
            makers = {HOST: functools.partial(_gang, target, learners, None)}
            if target.on_gpu:
                scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="gadei-ps-ipc-"))
                path = Path(scratch) / "counters"
                makers[DEVICE] = functools.partial(_gang, target, learners, path)
            gangs = started(report, stack, makers)
            yield from _sizes(report, target, gangs, learners, size)
        taken = time.monotonic() - begin


def _sizes(
    report: Report, target: Target, gangs: dict[str, Gang], learners: int, size: dict[str, Any]
) -> Iterator[Report]:
    """Measure each size of the model, as long as there is time for one as large as the last."""
    taken = 0.0
    for count in size["bytes"]:
        what = f"{count / 1e6:g} MB with {learners}"
        if SEGMENTS * (1 + learners) * count > SHARE * free_bytes():
            report.notes.append(f"{what}: not measured: too little memory")
            continue
        if target.left() < taken or HOST not in gangs:
            report.notes.append(f"{what}: not measured: no time, or no learners")
            continue
        begin = time.monotonic()
        with noted(report, what):
            _at(report, gangs, count, learners, size)
        yield report
        taken = time.monotonic() - begin


def _gang(target: Target, learners: int, counters: Path | None) -> Gang:
    """The learners; with a path for their counters, the owner comes first."""
    commands = [["-m", PROCESS, target.device, f"learner{n}"] for n in range(learners)]
    if counters is not None:
        commands.insert(0, ["-m", PROCESS, target.device, "owner"])
        commands = [[*one, str(counters), str(learners)] for one in commands]
    return Gang(commands, start_s=START_S)


def _at(
    report: Report, gangs: dict[str, Gang], count: int, learners: int, size: dict[str, Any]
) -> None:
    """Measure one size of the model. count: bytes."""
    what = f"{DEVICE}, {count / 1e6:g} MB with {learners}"
    with job(f"on-gpu-{learners}", tensors=[{"name": "w", "shape": [count // 4]}]) as name:
        gangs[HOST].ask({"job": name}, timeout_s=RUN_S)
        contenders = {HOST: _rate(gangs[HOST], size["call_s"], learners)}
        if DEVICE in gangs:
            with _or_without(report, gangs, what):
                (owner,) = gangs[DEVICE].ask({"bytes": count}, first=1, timeout_s=RUN_S)
                gangs[DEVICE].ask({"open": owner}, timeout_s=RUN_S)
                rate = _rate(gangs[DEVICE], size["call_s"], learners)
                rate()
                contenders[DEVICE] = rate
        figures: dict[str, list[float]] = {}
        with _or_without(report, gangs, what):
            figures = alternate(contenders, size["rounds"])
        if not figures:  # the prototype has failed in the middle
            figures = alternate({HOST: contenders[HOST]}, size["rounds"])
        gangs[HOST].ask({"job": None}, timeout_s=RUN_S)
    _tell(report, figures, {"bytes": count, "learners": learners})
    if DEVICE in gangs:
        with _or_without(report, gangs, f"{what}: the end"):
            gangs[DEVICE].ask({"close": True}, timeout_s=RUN_S)
            gangs[DEVICE].ask({"free": True}, first=1, timeout_s=RUN_S)


@contextlib.contextmanager
def _or_without(report: Report, gangs: dict[str, Gang], what: str) -> Iterator[None]:
    """End the prototype if it fails: the host's way is measured without it."""
    try:
        yield
    except Failed as error:
        report.notes.append(f"{what}: {error}")
        if DEVICE in gangs:
            gangs.pop(DEVICE).close()


def _rate(gang: Gang, call_s: float, learners: int) -> Callable[[], float]:
    """Return the gradients/s of all learners together, in rounds of about call_s."""

    def seconds(times: int) -> float:
        return gang.seconds({"times": times}, timeout_s=RUN_S)

    seconds(LEAST_TIMES)
    times = max(LEAST_TIMES, round(call_s / (seconds(LEAST_TIMES) / LEAST_TIMES)))
    return lambda: learners * times / seconds(times)


def _tell(report: Report, figures: dict[str, list[float]], facts: dict[str, Any]) -> None:
    """Report gradients a second, and the time of a learner's step, which follows from it."""
    for who, values in figures.items():
        row = {"contender": who, **facts} | summary(values, "gradients/s", larger=True)
        row["step_s"] = facts["learners"] / row["median"]
        report.rows.append(row)
    cells = [f"{summary(figures[who])['median']:.0f}" if who in figures else "-"
             for who in (HOST, DEVICE)]  # fmt: skip
    shown = "-"
    if DEVICE in figures:
        # Above 1 where the host's way is the faster one.
        found = ratios_of(figures[HOST], figures[DEVICE], larger=True)
        report.ratios.append(
            {"contender": DEVICE, **facts, **found, "reach": None, "reached": None}
        )
        shown = f"{1 / found['ratio']:.2f}"
    report.lines.append(
        [f"{facts['bytes'] / 1e6:g}", str(facts["learners"]), "gradients/s", *cells, shown]
    )
