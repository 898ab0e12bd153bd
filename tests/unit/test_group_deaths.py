"""Counts of `bench group_deaths`: each fault is found, and no correct run has one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support import daemon, eventually

from gadei_ps.benchmarks.group_deaths_counts import (
    AGAIN,
    COMPARED,
    DIFFER,
    FINISHED,
    LOST,
    MISSING,
    TWICE,
    Rounds,
    Sight,
    batches,
)
from gadei_ps.benchmarks.machines import Machines, assignments, is_of, place
from gadei_ps.job.faults import Processes
from gadei_ps.learners.client import Client

MACHINES, ROUNDS, EACH = 3, 5, 4


class Seen:
    """Rounds of machines whose agents add each round to their jobs, and report it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._rounds = Rounds(self.counts)
        self.frames = [0] * MACHINES

    def tell(self, machine: int, rounds: int, life: int = 0, checksum: int | None = None) -> None:
        sum_ = 1000 + rounds if checksum is None else checksum
        pid = 10 * machine + life
        self._rounds.saw(Sight(machine, pid, rounds, sum_, self.frames[machine]))

    def make(self, rounds: range, machines: tuple[int, ...] = (0, 1, 2), life: int = 0) -> None:
        """These rounds; each is seen at two instants."""
        for number in rounds:
            for machine in machines:
                self.frames[machine] += 1
                if number > rounds.start:
                    self.tell(machine, number - 1, life)  # it is applied, and not reported yet
                self.tell(machine, number, life)
        self._rounds.settle()

    @property
    def faults(self) -> dict[str, int]:
        return {name: count for name, count in self.counts.items() if count and name != COMPARED}


def test_machines_that_die_and_join_are_no_fault() -> None:
    seen = Seen()
    seen.make(range(1, 6))
    seen.make(range(6, 9), (0, 2))
    seen.frames[1] = 3  # a job of its own again
    seen.make(range(9, 12), (1,), life=1)
    seen.make(range(9, 12), (0, 2))
    assert not seen.faults
    assert seen.counts[COMPARED] == 11


def test_a_round_that_a_job_gets_twice() -> None:
    seen = Seen()
    seen.make(range(1, 6))
    seen.frames[1] += 1
    seen.make(range(6, 9))
    seen.make(range(9, 12))
    assert seen.faults == {TWICE: 1}


def test_rounds_that_are_lost_and_that_differ() -> None:
    seen = Seen()
    seen.make(range(1, 6))
    seen.tell(2, 3)
    assert seen.faults == {LOST: 2}
    seen.tell(1, 5, checksum=7)
    assert seen.faults == {LOST: 2, DIFFER: 1}


def test_what_is_told_of_a_machine() -> None:
    exchange = {"state": "member", "incarnation": 5, "rounds": 3, "checksum": 9}
    assert Sight.of(1, {"exchange": exchange}, 4) == Sight(1, 5, 3, 9, 4)
    assert Sight.of(1, {"exchange": exchange | {"state": "joining"}}, 4) is None
    assert Sight.of(1, None, None) is None


def test_assignments_are_counted_beside_gradients(job_name: str) -> None:
    """The count by which a round is found that was applied twice."""
    with daemon(job_name, tensors=[{"name": "w", "shape": [8]}]), Client(job_name) as client:
        control = Processes(job_name).control
        for number in range(3):
            client.push({"w": np.ones(8, np.float32)}, samples=1)
            client.wait_applied()
            client.add({"w": np.ones(8, np.float32)})
            assert assignments(control) == number + 1


class Group:
    """Machines that train batches, a part each, and take the mean of their weights."""

    def __init__(self) -> None:
        self.numbers = {
            at: [float(number)]
            for at, number in enumerate(np.random.default_rng(1).uniform(1, 1000, 60))
        }
        self.weights = np.zeros((MACHINES, 2, 60))

    def train(self, machine: int, at: int, number: float | None = None) -> None:
        self.weights[machine, :, at] += 1, self.numbers[at][0] if number is None else number

    def exchange(self, again: int | None = None) -> None:
        """Weight members unequally. again: this one takes its difference twice."""
        mean = np.average(self.weights, axis=0, weights=[1, 2, 5])
        if again is not None:
            twice = 2 * mean - self.weights[again]
        self.weights[:] = mean
        if again is not None:
            self.weights[again] = twice

    def run(self, skipped: int | None = None) -> None:
        for start in range(0, 60, MACHINES * EACH):
            for at in range(start, start + MACHINES * EACH):
                if at != skipped:
                    self.train(at % MACHINES, at)
            self.exchange()

    def count(self, machine: int = 0) -> dict[str, int]:
        counted, weighed = self.weights[machine].astype(np.float32)
        return batches(counted, weighed, 48, self.numbers)


def test_each_batch_is_there_once() -> None:
    group = Group()
    group.run()
    assert group.count() == {FINISHED: 48, MISSING: 0, AGAIN: 0}


@pytest.mark.parametrize(("skipped", "missing"), [(17, 1), (50, 0)])
def test_a_batch_that_is_missing(skipped: int, missing: int) -> None:
    """The last pass is not finished: its batches may be missing."""
    group = Group()
    group.run(skipped)
    assert group.count() == {FINISHED: 48, MISSING: missing, AGAIN: 0}


def test_a_batch_that_two_machines_have_trained() -> None:
    """Each has drawn a number of its own."""
    group = Group()
    group.run()
    group.numbers[17].append(group.numbers[17][0] / 2)
    group.train(2, 17, group.numbers[17][1])
    group.exchange()
    assert group.count() == {FINISHED: 48, MISSING: 0, AGAIN: 1}


def test_a_round_that_was_added_twice_shows_in_the_weights_of_its_job() -> None:
    group = Group()
    group.train(0, 17)
    group.exchange(again=0)
    assert group.count()[AGAIN] == 1


def test_what_is_left_behind_is_found() -> None:
    with place() as directory:
        run = Machines(directory, f"left-{os.getpid()}", "", [])
        memory = Path(f"/dev/shm/left-by-a-test-{os.getpid()}")
        with contextlib.ExitStack() as stack:
            memory.touch()
            stack.callback(memory.unlink)
            (directory / "run" / "socket").touch()
            process = subprocess.Popen(["sleep", "100"])
            stack.callback(process.wait)
            stack.callback(process.kill)
            left = {f"process {process.pid}", memory.name, "socket"}
            # A process that has just been started has no environment for a moment.
            eventually(lambda: left <= set(run.left()), what=run.left)
        run.close()
    assert is_of("gadei-ps.0.run-3.weights", "run") and is_of("plasma", "run")
    assert not is_of("gadei-ps.0.runs-3.weights", "run")
