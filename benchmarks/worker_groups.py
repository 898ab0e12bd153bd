"""Samples a second and accuracy of machines in groups, beside one machine.

One machine is a job of `gadei-ps run`; the machines in groups are jobs that Ray has placed
(benchmarks/machines.py), each with as many learners. All share the cores of this host, so each
learner waits in each iteration, as if its gradient took longer. That wait is the same for both.

Both train the same number of samples in all. The clock begins when every learner has pushed and
every machine has had two rounds. The accuracy is on the test rows: the mean of five copies of the
weights of machine 0 during the last fifth of the training, so that it says less of chance. A copy
is taken where a round has just ended, so it is what the group has in common. `worst` is that of the
machine whose weights are worst at the end. Settings were chosen without the test rows
(worker_groups_choice.py).

ratio: samples a second of the groups over those of one machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gadei_ps.benchmarks import worker_groups_tasks as tasks
from gadei_ps.benchmarks.common import Report
from gadei_ps.benchmarks.gang import Failed
from gadei_ps.benchmarks.machines import (
    LOOK_S,
    Machines,
    assignments,
    job,
    needs_ray,
    place,
    settings,
    until,
)
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.benchmarks.worker_groups_tasks import Examples, Task
from gadei_ps.errors import GadeiError
from gadei_ps.job.faults import Processes
from gadei_ps.machine import process
from gadei_ps.memory import segment, weights
from gadei_ps.memory.layout import REPLICA, SegmentKind
from gadei_ps.memory.shm import segment_name
from gadei_ps.memory.totals import total
from gadei_ps.memory.weights import FloatArray

ONE, GROUPS = "one machine", "groups"
EARLY, LATE = (0.25, 0.5, 0.75), (0.8, 0.85, 0.9, 0.95, 1.0)
"""Shares of the training at which the weights are copied."""
REACH_SHARE = 0.9
"""Target as a share of one machine's speed times the number of machines."""
REACH_POINTS = 1.0
MOST_S = 600.0
END_S = 30.0

Check = Callable[[], None]


class Job:
    """The memory of a job that trains: what it has counted, and its weights."""

    def __init__(self, name: str) -> None:
        """Raise GadeiError if it has no learner's model yet."""
        self._control = Processes(name).control
        mapped = segment.attach(segment_name(name, "weights"), SegmentKind.WEIGHTS, writable=False)
        self._flat, self._table = weights.data(mapped), weights.read_table(mapped)
        self._common: FloatArray | None = None
        self._rounds = assignments(self._control)

    @property
    def samples(self) -> int:
        """Number of samples that its gradients were computed from."""
        return total(self._control, "samples")

    @property
    def learners(self) -> int:
        """Number of learners that have pushed."""
        roster = self._control["roster"]
        return int(((roster["applied"] > 0) & (roster["name"] != REPLICA)).sum())

    def look(self) -> bool:
        """Copy the weights if a round has just ended; return whether it has."""
        if (rounds := assignments(self._control)) <= self._rounds:
            return False
        self._rounds, self._common = rounds, self._flat.copy()
        return True

    def copy(self) -> FloatArray:
        """The weights as they were after the last round that was seen to end; those of now where
        there are no rounds. Gradients may be applied while they are copied."""
        return self._flat.copy() if self._common is None else self._common

    def accuracy(self, flat: FloatArray, model: torch.nn.Module, found: Examples) -> float:
        """Return the accuracy on the held-out rows (%)."""
        views = self._table.views(flat)
        model.load_state_dict({name: torch.from_numpy(view) for name, view in views.items()})
        return 100 - found.held_out(model)


@dataclass
class Trained:
    """Result of one training. accuracies: at the shares EARLY and LATE (%)."""

    rate: float
    accuracies: list[float]
    worst: float
    rounds: int = 0
    seconds: float = field(default=0.0)

    @property
    def accuracy(self) -> float:
        """The mean of the late copies."""
        return statistics.mean(self.accuracies[len(EARLY) :])


def command(name: str, size: dict[str, Any], seed: int) -> list[str]:
    """Return the command of a learner."""
    module = "gadei_ps.benchmarks.worker_groups_learner"
    return [sys.executable, "-P", "-m", module, name, str(size["wait_s"]), str(seed)]


def watch(
    names: Sequence[str],
    learners: int,
    samples: int,
    check: Check,
    ready: Callable[[], bool],
    judge: tuple[torch.nn.Module, Examples],
) -> Trained:
    """Wait until these jobs have trained so many samples in all. Raises Failed."""
    jobs: list[Job] = []

    def begun() -> bool:
        check()
        with contextlib.suppress(GadeiError, OSError):
            while len(jobs) < len(names):
                jobs.append(Job(names[len(jobs)]))
            return all(one.learners >= learners for one in jobs) and ready()
        return False

    until(begun, "the first gradients of all machines")
    first, begin = sum(one.samples for one in jobs), time.monotonic()
    copies = []
    for share in (*EARLY, *LATE):
        while sum(one.samples for one in jobs) < share * samples:
            check()
            if time.monotonic() > begin + MOST_S:
                raise Failed(f"{samples} samples: not within {MOST_S:g} s")
            jobs[0].look()
            time.sleep(LOOK_S)
        copies.append(jobs[0].copy())
    done, seconds = sum(one.samples for one in jobs) - first, time.monotonic() - begin
    for one in jobs[1:]:
        until(one.look, "the end of a round")
    ends = [one.copy() for one in jobs]
    accuracies = [jobs[0].accuracy(one, *judge) for one in copies]
    worst = min(one.accuracy(flat, *judge) for one, flat in zip(jobs, ends, strict=True))
    return Trained(done / seconds, accuracies, worst, seconds=seconds)


@contextlib.contextmanager
def one_machine(
    directory: Path, name: str, task: Task, learners: int, words: Sequence[str]
) -> Iterator[Check]:
    """A job of `gadei-ps run`, until the end of the block."""
    options = ["--learners", str(learners), "--optimizer", task.optimizer, "--lr", str(task.lr)]
    said = directory / f"{name}.said"
    with said.open("wb") as stream:
        started = process.spawn(
            process.module_command("gadei_ps", "run", *options, name, "--", *words),
            stdout=stream,
            stderr=stream,
            how=signal.SIGTERM,
        )

    def check() -> None:
        if started.poll() is not None:
            raise Failed(f"gadei-ps run has ended: {said.read_text(errors='replace')[-300:]}")

    try:
        yield check
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if started.poll() is None:
                started.send_signal(number)
                with contextlib.suppress(Exception):
                    started.wait(END_S)


def alone(
    name: str, size: dict[str, Any], seed: int, judge: tuple[torch.nn.Module, Examples]
) -> Trained:
    """One machine."""
    task = tasks.TASKS[name]
    with place() as directory:
        run = f"alone-{name}-{os.getpid()}"
        words = command(name, size, seed)
        with one_machine(directory, run, task, size["learners"], words) as check:
            samples = round(task.samples * size["share"])
            return watch([run], size["learners"], samples, check, lambda: True, judge)


def together(
    name: str, size: dict[str, Any], seed: int, judge: tuple[torch.nn.Module, Examples]
) -> Trained:
    """Train machines in groups."""
    task, machines = tasks.TASKS[name], sum(size["groups"])
    with place() as directory:
        given = settings(
            every=size["every"],
            rule=size["rule"],
            learners=size["learners"],
            optimizer=task.optimizer,
            lr=task.together,
            groups=size["groups"],
        )
        words = command(name, size, seed)
        with closing(Machines(directory, f"groups-{name}-{os.getpid()}", given, words)) as run:
            run.start()

            def ready() -> bool:
                return all(run.rounds(number) >= 2 for number in range(machines))

            names = [job(run.name, number) for number in range(machines)]
            samples = round(task.samples * size["share"])
            found = watch(names, size["learners"], samples, run.check, ready, judge)
            found.rounds = run.rounds(0)
            run.stop()
            if left := run.left():
                raise Failed(f"left behind: {', '.join(left)}")
            return found


def measure(quick: bool) -> Report:
    """Train each task by one machine and by groups, with each seed."""
    needs_ray("worker_groups")
    size = sizes("worker_groups", quick)
    report = Report(
        ["task", "replicas", "samples/s", "accuracy, %", "worst, %", "ratio", "percentage points"]
    )
    machines = sum(size["groups"])
    for name, own in size["tasks"].items():
        found, chosen, pairs = Examples(name), size | own, []
        for seed in chosen["seeds"]:
            judge = tasks.model(name, found, seed), found
            pairs.append((alone(name, chosen, seed, judge), together(name, chosen, seed, judge)))
        _tell(report, name, chosen, pairs, machines)
        report.notes.append(
            f"{name}: each learner waits {1e3 * chosen['wait_s']:g} ms in each iteration, also "
            f"with one replica; a round each {chosen['every']} gradients of a replica"
        )
    groups = " + ".join(map(str, size["groups"]))
    report.notes.append(
        f"groups of {groups} replicas on one host, Ray by ray.cluster_utils.Cluster; "
        f"{size['learners']} learners a replica; rule {size['rule']}"
    )
    return report


def _tell(
    report: Report,
    name: str,
    size: dict[str, Any],
    pairs: Sequence[tuple[Trained, Trained]],
    machines: int,
) -> None:
    task = tasks.TASKS[name]
    for place_, (who, count, lr) in enumerate(
        ((ONE, 1, task.lr), (GROUPS, machines, task.together))
    ):
        runs = [pair[place_] for pair in pairs]
        row: dict[str, Any] = {
            "contender": "gadei-ps",
            "task": name,
            "what": who,
            "machines": count,
            "lr": lr,
        }
        row |= {"median": statistics.median(one.rate for one in runs), "unit": "samples/s"}
        row |= {"accuracy": statistics.mean(one.accuracy for one in runs)}
        row |= {"accuracies": [one.accuracies for one in runs], "rates": [one.rate for one in runs]}
        row |= {"worst": [one.worst for one in runs], "rounds": [one.rounds for one in runs]}
        row |= {"seconds": [one.seconds for one in runs], "optimizer": task.optimizer}
        row |= {"rule": size["rule"], "every": size["every"], "batch": task.batch}
        report.rows.append(row | {"learners": size["learners"], "wait_s": size["wait_s"]})
    one, all_ = report.rows[-2:]
    ratios = [groups.rate / single.rate for single, groups in pairs]
    points = one["accuracy"] - all_["accuracy"]
    reach = REACH_SHARE * machines
    ratio = {"contender": ONE, "task": name, "ratio": statistics.median(ratios), "ratios": ratios}
    ratio |= {"reach": reach, "reached": min(ratios) >= reach, "points_lost": points}
    report.ratios.append(
        ratio | {"reach_points": REACH_POINTS, "reached_points": points <= REACH_POINTS}
    )
    for row in (one, all_):
        last = [f"{ratio['ratio']:.2f}", f"{-points:+.2f}"] if row is all_ else ["", ""]
        cells = [f"{row['median']:.0f}", f"{row['accuracy']:.2f}", f"{min(row['worst']):.2f}"]
        report.lines.append([f"{name}: {row['what']}", str(row["machines"]), *cells, *last])
