"""The cost of a gradient by the size of the model, the number of learners and of shards.

Learners push a prepared float32 gradient as fast as they can, and read the weights in place. The
server applies plain SGD. The figure is the time from the first learner's start to the last one's
end, divided by the number of gradients. A series changes one of the three parameters. Its ratios
compare the cost of a byte with that in the first row. Above 1, a byte costs less.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Self

from gadei_ps.benchmarks.common import Report, alternate, cores, ratios_of, summary
from gadei_ps.benchmarks.gang import Gang
from gadei_ps.benchmarks.sizes import MB, sizes
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping

LEARNER = "-m", "gadei_ps.benchmarks.peers_learner"
BY_LEARNERS_BYTES = 1 * MB
BY_SHARDS_BYTES = 16 * MB
LEAST_TIMES = 3
SLOTS = 2
# Share of the free shared memory that is used. Other programs need some too.
SHARE = 0.8


@dataclass(frozen=True)
class Point:
    """One job. shards 0: the job's default."""

    series: str
    bytes: int
    learners: int = 1
    shards: int = 0

    @property
    def memory_bytes(self) -> int:
        """Approximate memory: weights, and for each learner slots, gradient and copy."""
        return self.bytes * (1 + self.learners * (SLOTS + 2))


def points(size: Mapping[str, Sequence[int]]) -> list[list[Point]]:
    """The series."""
    return [
        [Point("bytes", model) for model in size["bytes"]],
        [Point("learners", BY_LEARNERS_BYTES, learners) for learners in size["learners"]],
        [Point("shards", BY_SHARDS_BYTES, 1, shards) for shards in size["shards"]],
    ]


def free_bytes() -> int:
    """Free bytes of shared memory, and at most those of memory."""
    shared = os.statvfs("/dev/shm")
    left = shared.f_bavail * shared.f_frsize
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return min(left, int(line.split()[1]) * 1024)
    return left


class Running:
    """A context with the job of a point and its learners, which sleep between rounds."""

    def __init__(self, point: Point, number: int, call_s: float) -> None:
        """number: index of this point among those that exist at once."""
        name = f"scale-{os.getpid()}-{number}"
        self.point = point
        self.call_s = call_s
        self.config = from_mapping(
            {
                "name": name,
                "history": False,
                "optimizer": {"kind": "sgd", "lr": 1e-6},
                "shards": point.shards,
                "tensors": [{"name": "w", "shape": [point.bytes // 4]}],
            },
            "scale",
        )
        self.shards = self.config.resolved_shards(point.bytes // 4)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(Daemon(self.config, silent=True))
            self.learners = stack.enter_context(Gang([LEARNER] * self.point.learners))
            self.learners.ask({"job": self.config.name})
            self._run(SLOTS)  # touches all memory
            once = self._run(LEAST_TIMES) * self.point.learners
            self.times = max(LEAST_TIMES, round(self.call_s / once))
            self._stack = stack.pop_all()
        return self

    def _run(self, times: int) -> float:
        """Return the time (s) of one gradient if each learner pushes `times` gradients."""
        taken = self.learners.seconds({"times": times, "copy": False})
        return taken / (times * self.point.learners)

    def seconds(self) -> float:
        """Return the time (s) of one gradient in a round."""
        return self._run(self.times)

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def fitting(series: list[Point], notes: list[str]) -> list[Point]:
    """The points, from the first on, whose jobs fit into memory at once."""
    room = SHARE * free_bytes()
    found = []
    for point in series:
        room -= point.memory_bytes
        if room < 0:
            notes.append(f"{point.bytes / 1e6:g} MB is left out: too little memory")
            break
        found.append(point)
    return found


def compare(
    report: Report, point: Point, shards: int, taken: list[float], first: tuple[Point, list[float]]
) -> None:
    """Add one row, and compare its cost of a byte with that of the first row of the series."""
    told: dict[str, Any] = {**asdict(point), "shards": shards}
    row = {"contender": "gadei-ps", **told, **summary(taken)}
    row["seconds_per_byte"] = row["median"] / point.bytes
    row["bytes_per_s"] = point.bytes / row["median"]
    report.rows.append(row)
    ours = [one / point.bytes for one in taken]
    linear = [one / first[0].bytes for one in first[1]]
    ratios = ratios_of(ours, linear)
    report.ratios.append({"contender": "linear", **told, **ratios})
    report.lines.append(
        [
            f"{point.series}: {point.bytes / 1e6:g} MB",
            str(point.learners),
            str(shards),
            f"{row['median'] * 1e6:.1f} ±{row['spread']:.0%}",
            f"{row['seconds_per_byte'] * 1e9:.3f}",
            f"{row['bytes_per_s'] / 1e9:.2f}",
            f"{ratios['ratio']:.2f}",
        ]
    )


def measure(quick: bool) -> Report:
    """Measure the points of each series in turn. Each has its own job and learners."""
    size = sizes("scale", quick)
    report = Report(["series", "learners", "shards", "us", "ns/byte", "GB/s", "linear/ours"])
    for series in points(size):
        with ExitStack() as stack:
            running = [
                stack.enter_context(Running(point, number, size["call_s"]))
                for number, point in enumerate(fitting(series, report.notes))
            ]
            rounds = {str(number): one.seconds for number, one in enumerate(running)}
            taken = list(alternate(rounds, size["rounds"]).values())
        for one, seconds in zip(running, taken, strict=True):
            compare(report, one.point, one.shards, seconds, (running[0].point, taken[0]))
    if max(size["learners"]) + 1 > cores():
        report.notes.append(f"learners and shards share {cores()} cores if they are more")
    return report
