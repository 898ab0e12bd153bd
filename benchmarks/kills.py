"""Loss over time of one job twice: undisturbed, and with a process killed every few seconds.

Learners train a network in PyTorch. The server hands out each mini-batch once an epoch; both runs
train the same epochs. In the second run a learner, the active server or the watchdog is killed
(SIGKILL) at random instants, 4 s apart in the mean, or as soon as all of them are there again.
This process computes the loss of the weights in shared memory on rows that are held out, once a
second.

The model has a value for each mini-batch, to which each gradient of that mini-batch adds exactly 1.
So at the end each value must be the number of epochs: less is a lost gradient, more is one that was
applied twice.

ratio: seconds of the undisturbed run over those of the run with kills.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gadei_ps.benchmarks import kills_data
from gadei_ps.benchmarks.common import Report, cores
from gadei_ps.benchmarks.gang import Failed
from gadei_ps.benchmarks.kills_data import Network
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.benchmarks.soak import older
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping
from gadei_ps.job.faults import Processes, Role, Target, send
from gadei_ps.machine import process
from gadei_ps.memory import segment, weights
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.shm import segment_name
from gadei_ps.show.counts import counted
from gadei_ps.watchdog.restart import USEFUL_S, Policy

LEARNERS = 2
LOOK_S = 1.0
POLL_S = 0.01
PATIENCE_S = 120.0  # without a gradient
MATURE_S = {Role.LEARNER: USEFUL_S + 1.0, Role.WATCHDOG: 2.0, Role.SERVER: 0.0}
"""Age from which a process is killed (s): a job fails after early deaths."""
UNDISTURBED, KILLS = "gadei-ps, undisturbed", "gadei-ps, processes killed"


class _Watched:
    """Starts the next watchdog after a death, in a thread, as long as the `with` block lasts."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self._daemon.check()


@dataclass
class Run:
    """One run of the job."""

    name: str
    rows: int
    mini_batch: int
    epochs: int
    seed: int | None
    """Seed of the kills. None: kill nothing."""
    every_s: float = 0.0
    """Mean time between two kills."""
    most_s: float = float("inf")
    """Time from the first gradient after which the run is stopped."""
    curve: list[tuple[float, float]] = field(default_factory=list, init=False)
    """Seconds since the first gradient, and the loss on the rows held out."""
    kills: list[tuple[float, str]] = field(default_factory=list, init=False)
    seconds: float = field(default=0.0, init=False)
    gradients: int = field(default=0, init=False)
    counts: list[int] = field(default_factory=list, init=False)
    """Number of times that each mini-batch is in the weights."""

    def __post_init__(self) -> None:
        torch.set_num_threads(1)  # the cores are the learners'
        self._chance = random.Random(self.seed)
        self._model = Network(self.mini_batches)
        self._held_out = kills_data.rows(kills_data.HELD_OUT, seed=2)

    @property
    def mini_batches(self) -> int:
        """Mini-batches of an epoch."""
        return self.rows // self.mini_batch

    def train(self) -> None:
        """Train all epochs, or for most_s."""
        threads = max(1, cores() // LEARNERS)
        learner = process.module_command(
            "gadei_ps.benchmarks.kills_learner",
            self.name,
            *map(str, (self.rows, self.mini_batch, self.epochs, threads)),
        )
        wanted = from_mapping(
            {
                "name": self.name,
                "history": False,
                "learners": {"command": learner, "count": LEARNERS},
            },
            "kills",
        )
        with Daemon(wanted, silent=True, learners=LEARNERS) as daemon:
            daemon.policy = Policy(limit=sys.maxsize)
            self._processes = Processes(self.name)
            with _Watched(daemon):
                self._wait_for_a_gradient()
                self._map()
                self._follow()
            self.counts = np.rint(self._views["applied"]).astype(int).tolist()
            self.gradients = self._version

    def _map(self) -> None:
        name = segment_name(self.name, "weights")
        mapped = segment.attach(name, SegmentKind.WEIGHTS, writable=False)
        self._views = weights.read_table(mapped).views(weights.data(mapped))

    def _wait_for_a_gradient(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self._version:
            if time.monotonic() > until:
                raise Failed("no gradient is applied")
            time.sleep(POLL_S)

    @property
    def _version(self) -> int:
        return int(self._processes.control["version"])

    def _follow(self) -> None:
        """Look at the loss and kill processes until all gradients are applied."""
        begin = moved = time.monotonic()
        look, due = begin, begin + self._pause()
        version, last = 0, self.mini_batches * self.epochs
        while version < last and (now := time.monotonic()) - begin < self.most_s:
            if now >= look:
                self.curve.append((round(now - begin, 3), self._loss()))
                look += LOOK_S
            if self.seed is not None and now >= due and self._strike(now - begin):
                due = now + self._pause()
            if self._version != version:
                version, moved = self._version, now
            elif now - moved > PATIENCE_S:
                raise Failed("no gradient is applied")
            time.sleep(POLL_S)
        self.seconds = time.monotonic() - begin
        self.curve.append((round(self.seconds, 3), self._loss()))

    def _pause(self) -> float:
        return self.every_s * (0.5 + self._chance.random())

    def _loss(self) -> float:
        state = {name: torch.from_numpy(view.copy()) for name, view in self._views.items()}
        self._model.load_state_dict(state)
        with torch.no_grad():
            return round(float(self._model.loss(self._held_out)), 5)

    def _strike(self, seconds: float) -> bool:
        """Kill a process of the role with the fewest kills. Return whether one was killed."""
        there = self._there()
        done = Counter(role for _, role in self.kills)
        for role in sorted(there, key=lambda role: (done[role], self._chance.random())):
            old = [one for one in there[role] if older(one, MATURE_S[role])]
            if old and send(self._chance.choice(old), signal.SIGKILL) is not None:
                self.kills.append((round(seconds, 3), str(role)))
                return True
        return False

    def _there(self) -> dict[Role, list[Target]]:
        """Return the processes by role, or nothing while one of the job is missing."""
        found = self._processes
        watchdog, server, standby = found.watchdog(), found.server(ready=True), found.standby()
        learners = found.learners()
        if watchdog is None or server is None or standby is None or len(learners) < LEARNERS:
            return {}
        return {Role.LEARNER: learners, Role.SERVER: [server], Role.WATCHDOG: [watchdog]}

    def row(self, contender: str) -> dict[str, Any]:
        """Return the row of the result."""
        missing = [max(0, self.epochs - count) for count in self.counts]
        excess = [max(0, count - self.epochs) for count in self.counts]
        return {
            "contender": contender,
            "median": self.seconds,
            "unit": "s",
            "rounds": 1,
            "learners": LEARNERS,
            "values": sum(view.size for view in self._views.values()),
            "mini_batch": self.mini_batch,
            "epochs": self.epochs,
            "gradients": self.gradients,
            "counted": sum(self.counts),
            "lost": sum(missing),
            "applied_twice": sum(excess),
            "loss": self.curve[-1][1],
            "killed": dict(Counter(role for _, role in self.kills)),
            "kills": self.kills,
            "curve": self.curve,
        }


def measure(quick: bool) -> Report:
    """Measure the speed, and run the job twice for about the same time."""
    size = sizes("kills", quick)
    rows, mini_batch = size["rows"], size["mini_batch"]
    name = f"kills-{os.getpid()}"
    trial = Run(f"{name}-trial", rows, mini_batch, 10_000, None, most_s=size["trial_s"])
    trial.train()
    epochs = size["seconds"] / trial.seconds * trial.gradients / trial.mini_batches
    report = Report(["run", "s", "kills", "gradients", "lost", "applied twice", "loss"])
    for contender, seed in ((UNDISTURBED, None), (KILLS, size["seed"])):
        run = Run(f"{name}-{seed}", rows, mini_batch, max(1, round(epochs)), seed, size["every_s"])
        run.train()
        row = run.row(contender)
        report.rows.append(row)
        shown = (row["gradients"], row["lost"], row["applied_twice"])
        report.lines.append(
            [contender, f"{run.seconds:.1f}", f"{len(run.kills)}"]
            + [f"{one:,}" for one in shown]
            + [f"{row['loss']:.4f}"]
        )
    calm, killed = report.rows
    report.ratios.append({"contender": UNDISTURBED, "ratio": calm["median"] / killed["median"]})
    report.notes.append(
        f"{counted(LEARNERS, 'learner')}; a network of {calm['values']:,} values in PyTorch; SGD; "
        f"mini-batches of {mini_batch} rows from the server; loss on rows held out"
    )
    return report
