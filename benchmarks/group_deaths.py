"""Cost of a death for its group, and a check that nothing is lost or counted twice.

Replicas train in one group, as jobs that Ray has placed (benchmarks/machines.py). Processes are
killed (SIGKILL) at random instants. Times begin at the kill and end when a survivor's job has the
weights of the next finished round.

    no death       the same wait from instants without a kill: mostly the rest of a round
    machine        all processes of a replica; what is beyond `no death` is the price of the death
    agent          the actor of Ray beside a replica
    learner        a learner of a replica
    coordinator    the actor of Ray that commits rounds
    head of Ray    all replicas must train on; the same command is run again, which adopts them, and
                   the wait is for the next round then
    all are back   until all replicas are members again and have made two rounds
    longest pause  the longest time between two rounds meanwhile; after a death of the head, no
                   rounds are made until the command is run again, so these are left out

What must not happen is counted (group_deaths_counts.py): a survivor that goes back, whose job has
got a round twice, or that has other weights than others after the same round; a survivor without a
new gradient for STOPPED_S (not `divided`); a batch of a finished pass that is not in the weights,
or twice (`divided` alone: the replicas divide the batches of each pass, and each copy of the
weights costs a pause of all servers and a process); anything that is left behind.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps.benchmarks.common import Report, summary
from gadei_ps.benchmarks.gang import Failed
from gadei_ps.benchmarks.group_deaths_counts import (
    AGAIN,
    COMPARED,
    FAULTS,
    FINISHED,
    LEFT,
    MISSING,
    STOPPED,
    Rounds,
    Sight,
    batches,
)
from gadei_ps.benchmarks.group_deaths_learner import BATCHES, PLACES
from gadei_ps.benchmarks.machines import LOOK_S, Machines, job, needs_ray, place, settings, until
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.replicas import copies

DIVIDED = "divided"
NONE, MACHINE, AGENT, LEARNER = "no death", "machine", "agent", "learner"
COORDINATOR, HEAD, BACK = "coordinator", "head of Ray", "all are back"
PAUSE = "longest pause"
REACH_S = 3.0
STOPPED_S = 15.0
"""Time without a gradient after which a survivor counts as stopped (s)."""
ACTORS = {AGENT: "ray::ReplicaActor", COORDINATOR: "ray::Coordinator"}
SETTLED = 2
"""Rounds that each machine makes before the next kill."""


class Storm:
    """Kills in one run, and what has been seen of its rounds."""

    def __init__(self, run: Machines, machines: int, seed: int, divided: bool = False) -> None:
        self.run, self._numbers, self._divided = run, range(machines), divided
        self._chance = random.Random(seed)
        self.times: dict[str, list[float]] = {}
        self.counts: Counter[str] = Counter()
        self._rounds = Rounds(self.counts)
        self._round_s = 0.5
        self._newest, self._pause_s = (0, time.monotonic()), 0.0
        """The last round and when it was seen, and the longest time between two since a kill."""
        self._killed = ""
        self._moved: dict[int, tuple[int, float]] = {}
        """Gradients of each survivor's job, and when their number was last another one."""

    def _look(self, numbers: Sequence[int]) -> dict[int, tuple[int, float]]:
        """Return rounds and time of the last round of machines that are members; count faults."""
        found = {}
        for number in numbers:
            facts = self.run.facts(number)
            sight = Sight.of(number, facts, self.run.assignments(number))
            self._note_training(number, facts)
            if sight is not None and facts is not None:
                self._rounds.saw(sight)
                ago = facts["exchange"]["last_round_s"]
                found[number] = sight.rounds, time.monotonic() - (math.inf if ago is None else ago)
        rounds, now = max((one for one, _ in found.values()), default=0), time.monotonic()
        if rounds > self._newest[0]:
            self._pause_s = max(self._pause_s, now - self._newest[1])
            self._newest = rounds, now
        return found

    def _note_training(self, number: int, facts: dict[str, Any] | None) -> None:
        """Count a survivor that has stopped to train."""
        now, job = time.monotonic(), (facts or {}).get("job")
        if not job or not job["gradients_applied"]:  # it has not begun, or not again
            self._moved.pop(number, None)
            return
        gradients = int(job["gradients_applied"])
        before, since = self._moved.setdefault(number, (gradients, now))
        if before != gradients:
            self._moved[number] = gradients, now
        elif now - since > STOPPED_S and not self._divided:
            self.counts[STOPPED] += 1
            self._moved[number] = gradients, now

    def settle(self) -> None:
        """Wait until all are members and have made SETTLED rounds more, then a random time."""
        start = max((rounds for rounds, _ in self._look(self._numbers).values()), default=0)
        begin = time.monotonic()

        def settled() -> bool:
            self.run.check()
            seen = self._look(self._numbers)
            return len(seen) == len(self._numbers) and all(
                rounds >= start + SETTLED for rounds, _ in seen.values()
            )

        until(settled, "all machines in their group", self.run.said)
        self._rounds.settle()
        self._moved.clear()
        if self.times:  # not at the start
            self.times.setdefault(BACK, []).append(time.monotonic() - begin)
            if self._killed != HEAD:
                self.times.setdefault(PAUSE, []).append(self._pause_s)
            self._pause_s = 0.0
        time.sleep(2 * self._round_s * self._chance.random())

    def _next_round(self, what: str, survivors: Sequence[int], begin: float, had: int) -> None:
        """Wait for a round after `had` that a survivor's job has after `begin`."""
        ends: list[float] = []

        def come() -> bool:
            seen = self._look(survivors)
            ends.extend(at for rounds, at in seen.values() if rounds > had and at > begin)
            return bool(ends)

        until(come, f"the next round ({what})", self.run.said)
        self.times.setdefault(what, []).append(min(ends) - begin)
        self.counts[what] += 1

    def wait(self) -> None:
        """The control."""
        self._next_round(NONE, self._numbers, time.monotonic(), self._most(self._numbers))
        self._round_s = 2 * statistics.median(self.times[NONE])

    def _most(self, numbers: Sequence[int]) -> int:
        return max((rounds for rounds, _ in self._look(numbers).values()), default=0)

    def kill(self, what: str) -> None:
        """Kill a replica or a part of it, the coordinator, or the head of Ray."""
        self._killed, self._pause_s = what, 0.0
        if what == HEAD:
            self._kill_head()
            return
        target = None if what in (COORDINATOR, AGENT) else self._chance.choice(self._numbers)
        survivors = [number for number in self._numbers if number != target]
        had = self._most(survivors)
        if target is None:
            begin = self.run.kill_actor(ACTORS[what], self._chance)
        elif what == LEARNER:
            begin = self.run.kill_learner(target, self._chance)
        else:
            begin = self.run.kill(target, self._chance)
        self._next_round(what, survivors, begin, had)

    def _kill_head(self) -> None:
        """The head of Ray dies; all replicas train on, and the command is run again."""
        had, begin = self._most(self._numbers), self.run.kill_head()
        self.run.await_loss()
        before = {number: self.run.gradients(number) for number in self._numbers}
        if not self._divided:  # else they train until they have answered the batches that they have
            until(
                lambda: all(self.run.gradients(one) > before[one] for one in self._numbers),
                "gradients of all replicas without Ray",
            )
        self.run.start()
        self._next_round(HEAD, self._numbers, begin, had)


def audit(run: Machines, machines: int, directory: Path) -> dict[str, int]:
    """Count batches of finished passes that are not in the group's weights, or twice."""
    done = []
    for number in range(machines):
        facts = run.facts(number)
        if facts is None or facts["job"] is None:
            raise Failed(f"machine {number} is not there at the end")
        done.append(int(facts["job"]["work"]["epochs_done"]))
    run.await_rounds(range(machines), max(run.rounds(n) for n in range(machines)) + SETTLED)
    # Between two gradients: one shard may be some gradients behind the other.
    flat = copies.of_job(job(run.name, 0))["w"]
    numbers: dict[int, list[float]] = {}
    for log in directory.glob("*.pushed"):
        for line in log.read_text().splitlines():
            if line.count(" ") == 1:  # the last one may be cut off
                at, number_ = line.split()
                numbers.setdefault(int(at), []).append(float(number_))
    return batches(flat[:PLACES], flat[PLACES:], min(done) * BATCHES, numbers)


def storm(
    report: Report, size: dict[str, Any], kind: str, kills: dict[str, int], most_s: float
) -> None:
    """One run with its kills, as many as there is time for; adds rows.

    kills: number of each kind.
    """
    divided, model = kind == DIVIDED, size.get("bytes", {}).get(kind, 0)
    with place() as directory:
        name = f"deaths-{kind.replace(' ', '')}-{os.getpid()}".lower()
        given = settings(
            every=size["every"],
            rule="outer:1:0",
            optimizer="sgd",
            lr=1.0,
            divide=divided,
            groups=[size["machines"]],
        )
        module = "gadei_ps.benchmarks.group_deaths_learner"
        command = [sys.executable, "-P", "-m", module, str(directory), str(model)]
        with closing(Machines(directory, name, given, command)) as run:
            seen = Storm(run, size["machines"], size["seed"], divided)
            run.start()
            order = [what for what, count in kills.items() for _ in range(count)]
            random.Random(size["seed"]).shuffle(order)
            end = time.monotonic() + most_s
            for number, what in enumerate(order):
                if time.monotonic() > end:
                    report.notes.append(f"{kind}: {number} of {len(order)} kills in {most_s:g} s")
                    break
                seen.settle()
                seen.wait()
                seen.kill(what)
            for _ in range(2):  # the second one has seen nothing from before the first
                seen.settle()
            if divided:
                seen.counts.update(audit(run, size["machines"], directory))
            run.stop()
            left = _left(run)
            seen.counts[LEFT] = len(left)
            report.notes += [f"left behind: {', '.join(left[:9])}"] if left else []
    _tell(report, seen, kind)


def _left(run: Machines) -> list[str]:
    """List the remains after the ending processes have had their time."""
    end = time.monotonic() + 5.0
    while run.left() and time.monotonic() < end:
        time.sleep(LOOK_S)
    return run.left()


def _tell(report: Report, seen: Storm, kind: str) -> None:
    for what, seconds in seen.times.items():
        p50, p99 = (float(one) for one in np.quantile(seconds, [0.5, 0.99]))
        told = {"contender": "gadei-ps", "batches": kind, "what": what} | summary(seconds)
        told |= {"p50": p50, "p99": p99, "most": max(seconds)}
        if what == MACHINE:
            told |= {"reach_s": REACH_S, "reached": p50 <= REACH_S}
        report.rows.append(told)
        shown = [f"{one:.2f}" for one in (p50, p99, max(seconds))]
        report.lines.append([f"{kind}: {what}", *shown, str(len(seconds))])
    for what in (COMPARED, FINISHED, *FAULTS):
        if what in ((STOPPED,) if kind == DIVIDED else (FINISHED, MISSING, AGAIN)):
            continue
        count = seen.counts[what]
        row: dict[str, Any] = {"contender": "gadei-ps", "batches": kind, "what": what}
        row |= {"unit": "count", "count": count}
        report.rows.append(row | ({"reach": 0, "reached": count == 0} if what in FAULTS else {}))
        report.lines.append([f"{kind}: {what}", "", "", "", str(count)])
    base, theirs = seen.times[NONE], seen.times.get(MACHINE)
    if theirs:
        ratio = statistics.median(base) / statistics.median(theirs)
        best = {"contender": NONE, "batches": kind, "best_ratio": min(base) / min(theirs)}
        report.ratios.append(best | {"ratio": ratio})


def measure(quick: bool) -> Report:
    """Kill machines of a run with whole passes, of one that divides them, of one with 22 MB."""
    needs_ray("group_deaths")
    size = sizes("group_deaths", quick)
    report = Report(["until the next round, s", "p50", "p99", "most", "number"])
    for kind, (kills, most_s) in size["kills"].items():
        storm(report, size, kind, kills, most_s)
    machines = size["machines"]
    report.notes.append(
        f"{machines} replicas on one host, Ray by ray.cluster_utils.Cluster; learners wait "
        "10 ms after each gradient"
    )
    return report
