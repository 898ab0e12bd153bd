"""The time of a push of 4 KB until it is applied and the learner knows it.

spinning: pushes follow each other. If a contender can spin, both sides wait in a loop. asleep: the
learner pauses before each push, and both sides sleep while they wait. Peers apply in numpy and
answer with a byte; a gadei-ps learner reads the weights. MPI always spins, so it has no figure for
asleep.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from gadei_ps.benchmarks.common import Report, alternate, cores, ratios_of, summary
from gadei_ps.benchmarks.gang import Failed, Gang, mpi_gang
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping

PACKAGE = "gadei_ps.benchmarks"
OURS, MPI = "gadei-ps", "MPI"
PEERS = {
    "Pipe": "pipe",
    "Queue": "queue",
    "ZeroMQ": "zmq",
    "iceoryx2": "iceoryx2",
}
QUANTILES = "p50", "p99"
PAUSE_S = {"spinning": 0.0, "asleep": 2e-3}
SPIN_US = {"spinning": 1000.0, "asleep": 0.0}
REACH_S = {"spinning": 5e-6, "asleep": 30e-6}
MODEL = [{"name": "w", "shape": [1024]}]
SHARED = Path("/dev/shm")
FIRST_S = 10.0


class Gangs:
    """A context with a learner of each contender in one mode."""

    def __init__(self, mode: str, notes: list[str]) -> None:
        self.mode = mode
        self.notes = notes
        self.members: dict[str, Gang] = {}

    def __enter__(self) -> Gangs:
        with ExitStack() as stack:
            name = f"latency-{os.getpid()}"
            config = from_mapping(
                {"name": name, "history": False, "spin_us": SPIN_US[self.mode], "tensors": MODEL},
                "latency",
            )
            stack.enter_context(Daemon(config, silent=True))
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="gadei-ps-latency-"))
            stack.callback(remove_shared, Path(scratch).name)
            self.members[OURS] = stack.enter_context(self._start(OURS, name))
            for who, kind in PEERS.items():
                self._add(stack, who, partial(self._start, kind, scratch))
            if self.mode == "spinning":
                self._add(stack, MPI, lambda: mpi_gang(f"{PACKAGE}.peers_latency_mpi", 2))
            self._stack = stack.pop_all()
        return self

    def _start(self, kind: str, where: str) -> Gang:
        return Gang([["-m", f"{PACKAGE}.peers_latency", kind, self.mode, where]])

    def _add(self, stack: ExitStack, who: str, start: Callable[[], Gang]) -> None:
        """Start a peer and give it a first order. If it fails, note why."""
        try:
            gang = stack.enter_context(start())
            gang.ask({"times": 1, "pause_s": 0}, timeout_s=FIRST_S)
            self.members[who] = gang
        except Failed as error:
            self.notes.append(f"{who} is left out of {self.mode}: {error}")

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def remove_shared(prefix: str) -> None:
    """Remove what iceoryx2 leaves in shared memory when one of its processes is killed."""
    for path in SHARED.glob(f"{prefix}_*"):
        path.unlink(missing_ok=True)


def rounds_of(gangs: Gangs, times: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each round, by contender and quantile."""
    order = {"times": times, "pause_s": PAUSE_S[gangs.mode]}
    highs: dict[str, list[float]] = {who: [] for who in gangs.members}

    def one(who: str) -> float:
        told = gangs.members[who].ask(order)[0]
        highs[who].append(told["p99"])
        return float(told["p50"])

    found = alternate({who: partial(one, who) for who in gangs.members}, rounds)
    # `alternate` discards the first round; this list must do so too.
    return {who: {"p50": found[who], "p99": highs[who][1:]} for who in found}


def compare(report: Report, mode: str, found: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Add the rows and ratios of one mode."""
    for who, figures in found.items():
        line = [f"{who}, {mode}"]
        for quantile in QUANTILES:
            told: dict[str, Any] = {"contender": who, "mode": mode, "quantile": quantile}
            row = {**told, **summary(figures[quantile])}
            if who == OURS and quantile == "p50":
                reach = REACH_S[mode]
                row |= {"reach_s": reach, "reached": row["median"] <= reach}
            report.rows.append(row)
            line.append(f"{row['median'] * 1e6:.1f} ±{row['spread']:.0%}")
            if who != OURS:
                ratios = ratios_of(found[OURS][quantile], figures[quantile])
                reached = ratios["ratio"] >= 1.0
                report.ratios.append({**told, **ratios, "reach": 1.0, "reached": reached})
                line.append(f"{ratios['ratio']:.2f}")
            else:
                line.append("-")
        report.lines.append(line)


def measure(quick: bool) -> Report:
    """Measure each mode. All its contenders exist; those whose turn it is not sleep."""
    size = sizes("latency", quick)
    report = Report(["4 KB push", "p50 µs", "/ours", "p99 µs", "/ours"])
    if cores() < 2:
        report.notes.append("with one core, no contender can spin while the other side works")
    for mode in PAUSE_S:
        with Gangs(mode, report.notes) as gangs:
            compare(report, mode, rounds_of(gangs, size[mode], size["rounds"]))
    return report
