"""Bytes of gradients a second that the server receives and applies.

Each learner is a process that pushes a prepared float32 gradient and pulls the weights into memory
of its own, as fast as it can. The server applies plain SGD. The figure counts the bytes of all
learners' gradients, from the start of the first learner to the end of the last one. `gadei-ps,
weights in place` pulls without a copy.

The limit is the bandwidth of this machine's memory. As many threads as could be busy move the same
bytes between arrays of the same sizes, without waiting for each other. Each gradient is copied into
a slot (which moves 2 times its size) and applied (3), and the weights are copied (2).

All contenders start at once, after an unmeasured iteration. A peer's learner continues while the
server works, as far as its way of communication allows.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps.benchmarks.common import Report, alternate, cores, ratios_of, summary
from gadei_ps.benchmarks.gang import Failed, Gang, mpi_gang
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import JobConfig, from_mapping
from gadei_ps.show.counts import counted

PACKAGE = "gadei_ps.benchmarks"
OURS, IN_PLACE, LIMIT, RAY = "gadei-ps", "gadei-ps, weights in place", "limit", "Ray actor"
PEERS = "MPI one-sided", "MPI two-sided", "gloo"
REACH = {LIMIT: 0.8, RAY: 10.0} | dict.fromkeys(PEERS, 3.0)
SLOTS = 2
MOVED = 7  # sizes of a gradient, from the learner and back
LEAST_TIMES = 2

Seconds = Callable[[int], float]
"""Takes a number of iterations of each learner. Returns the seconds that they take."""


class Limit:
    """The arrays of a job with this number of learners, and threads that share them."""

    def __init__(self, size: int, learners: int, threads: int) -> None:
        """size: bytes of the model."""
        count = size // 4
        edges = [count * i // threads for i in range(threads + 1)]
        self.parts = list(itertools.pairwise(edges))
        self.weights = np.zeros(count, np.float32)
        self.learners = [
            [np.full(count, 1e-3, np.float32) for _ in range(2 + SLOTS)] for _ in range(learners)
        ]

    def _move(self, start: int, end: int, times: int) -> None:
        """Move the part of one thread. Omits the factor of the update, which moves no memory."""
        weights = self.weights[start:end]
        cut = [[array[start:end] for array in arrays] for arrays in self.learners]
        for number in range(times):
            for gradient, copy, *slots in cut:
                slot = slots[number % SLOTS]
                np.copyto(slot, gradient)
                np.subtract(weights, slot, out=weights)
                np.copyto(copy, weights)

    def seconds(self, times: int) -> float:
        """The seconds for this number of gradients of each learner."""
        threads = [threading.Thread(target=self._move, args=(*p, times)) for p in self.parts]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin


class Gangs:
    """A context with the processes of all contenders, for one number of learners.

    A contender that cannot run on this machine is left out, and a note says so.
    """

    def __init__(self, learners: int, notes: list[str], *, with_ray: bool) -> None:
        self.learners = learners
        self.notes = notes
        self.with_ray = with_ray
        self.ours: Gang
        self.peers: dict[str, Gang] = {}

    def __enter__(self) -> Gangs:
        with ExitStack() as stack:
            learner = ["-m", f"{PACKAGE}.peers_learner"]
            self.ours = stack.enter_context(Gang([learner] * self.learners))
            scratch = stack.enter_context(
                # Ray's daemons may still write when its driver has ended.
                tempfile.TemporaryDirectory(prefix="gadei-ps-", ignore_cleanup_errors=True)
            )
            for name, start in self._starts(Path(scratch)).items():
                try:
                    self.peers[name] = stack.enter_context(start())
                except Failed as error:
                    self.leave_out(name, str(error))
            self._stack = stack.pop_all()
        return self

    def _starts(self, scratch: Path) -> dict[str, Callable[[], Gang]]:
        ranks = self.learners + 1
        meet = [str(self.learners), str(scratch / "meet")]
        starts: dict[str, Callable[[], Gang]] = {
            "MPI one-sided": lambda: mpi_gang(f"{PACKAGE}.peers_mpi", ranks, "one-sided"),
            "MPI two-sided": lambda: mpi_gang(f"{PACKAGE}.peers_mpi", ranks, "two-sided"),
            "gloo": lambda: Gang(
                [["-m", f"{PACKAGE}.peers_gloo", str(rank), *meet] for rank in range(ranks)],
                env={"GLOO_SOCKET_IFNAME": "lo"},
            ),
        }
        if self.with_ray:
            starts[RAY] = lambda: Gang(
                [["-m", f"{PACKAGE}.peers_ray", str(scratch)]],
                how=signal.SIGTERM,  # its driver ends its daemons
            )
        return starts

    def leave_out(self, name: str, why: str) -> None:
        """Note once that a peer does not take part."""
        self.peers.pop(name, None)
        note = f"{name} is left out: {why}"
        if note not in self.notes:
            self.notes.append(note)

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def job(name: str, size: int) -> JobConfig:
    """The configuration of a job with a model of `size` bytes."""
    tensors = [{"name": "w", "shape": [size // 4]}]
    return from_mapping(
        {
            "name": name,
            "history": False,
            "optimizer": {"kind": "sgd", "lr": 1e-6},
            "tensors": tensors,
        },
        "ingest",
    )


def contenders(gangs: Gangs, size: int, ray_bytes: int, threads: int) -> dict[str, Seconds]:
    """All contenders, for a model of `size` bytes. Attaches our learners to a job."""

    def ours(copy: bool) -> Seconds:
        return lambda times: gangs.ours.seconds({"times": times, "copy": copy})

    def peer(gang: Gang) -> Seconds:
        order = {"bytes": size, "learners": gangs.learners}
        return lambda times: gang.seconds({**order, "times": times})

    found = {OURS: ours(True), IN_PLACE: ours(False)}
    found[LIMIT] = Limit(size, gangs.learners, threads).seconds
    for name, gang in gangs.peers.items():
        if name != RAY or size <= ray_bytes:
            found[name] = peer(gang)
    return found


def rates(
    seconds: Mapping[str, Seconds], gangs: Gangs, size: int, call_s: float
) -> dict[str, Callable[[], float]]:
    """Return bytes/s by contender, in rounds of about call_s; omit those that fail first."""
    found: dict[str, Callable[[], float]] = {}
    for name, measure in seconds.items():
        try:
            measure(1)
            times = max(LEAST_TIMES, round(call_s / (measure(LEAST_TIMES) / LEAST_TIMES)))
        except Failed as error:
            if name not in gangs.peers:
                raise
            gangs.leave_out(name, str(error))
            continue
        moved = size * gangs.learners * times
        found[name] = lambda m=measure, t=times, b=moved: b / m(t)  # type: ignore[misc]
    return found


def compare(report: Report, figures: Mapping[str, list[float]], told: Mapping[str, Any]) -> None:
    """Add the rows and ratios of one model and number of learners."""
    line = [f"{told['bytes'] / 1e6:g} MB, {counted(told['learners'], 'learner')}"]
    for name in (OURS, IN_PLACE, LIMIT, *PEERS, RAY):
        if name not in figures:
            line.append("-")
            continue
        row = {"contender": name, **told, **summary(figures[name], "B/s", larger=True)}
        if name == LIMIT:
            row["memory_bytes_per_s"] = MOVED * row["median"]
        report.rows.append(row)
        line.append(f"{row['median'] / 1e9:.2f} ±{row['spread']:.0%}")
    for name, reach in REACH.items():
        if name in figures:
            found = ratios_of(figures[OURS], figures[name], larger=True)
            reached = found["ratio"] >= reach
            row = {"contender": name, **told, **found, "reach": reach, "reached": reached}
            report.ratios.append(row)
    there = [name for name in PEERS if name in figures]
    best = max(there, key=lambda name: statistics.median(figures[name]), default=None)
    for other in (LIMIT, best, RAY):
        if other is None or other not in figures:
            line.append("-")
        else:
            line.append(f"{ratios_of(figures[OURS], figures[other], larger=True)['ratio']:.2f}")
    report.lines.append(line)


def measure(quick: bool) -> Report:
    """Measure each number of learners at each size."""
    size = sizes("ingest", quick)
    header = ["GB/s", OURS, "in place", LIMIT, *PEERS, RAY, "/limit", "/best", "/Ray"]
    report = Report(header)
    if quick:
        report.notes.append(f"{RAY} is left out: it takes long to start")
    for learners in size["learners"]:
        with Gangs(learners, report.notes, with_ray=not quick) as gangs:
            for model in size["bytes"]:
                _at(report, gangs, model, size)
    return report


def _at(report: Report, gangs: Gangs, model: int, size: Mapping[str, Any]) -> None:
    """Measure one size of the model."""
    config = job(f"ingest-{os.getpid()}", model)
    threads = min(cores(), gangs.learners + config.resolved_shards(model // 4))
    with Daemon(config, silent=True):
        gangs.ours.ask({"job": config.name})
        found = contenders(gangs, model, size["ray_bytes"], threads)
        figures = alternate(rates(found, gangs, model, size["call_s"]), size["rounds"])
        gangs.ours.ask({"job": None})
    compare(report, figures, {"bytes": model, "learners": gangs.learners, "limit_threads": threads})
