"""Many learners in one team: a process that starts them by fork, so that 200 take little memory.

python -m gadei_ps.benchmarks.learners_team gadei-ps | Hogwild

gadei-ps: each member attaches to the job as a learner of its own, takes batches that the server
hands out, and pushes a prepared gradient for each. Hogwild: each member adds its gradient to
weights in shared memory, in place and without locks. It takes no batches: such programs give each
process its part of the samples beforehand.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gadei_ps.benchmarks.peers import Floats, Numpy, answer, die_with, gradient, orders
from gadei_ps.learners.client import Client

SAMPLES, EPOCHS = 2**20, 2**20
START_S = 0.05  # until all members have woken up
CHECK = 16  # gradients between two looks at the clock


class Steps(NamedTuple):
    """Steps of a member."""

    push: Callable[[], Any]
    """Makes a gradient."""
    settle: Callable[[], Any]
    """Waits until all are applied."""


class Team:
    """The members, which sleep between rounds."""

    def __init__(self, count: int, ready: Callable[[], Steps]) -> None:
        """ready: runs in each member; returns what it does."""
        words = mmap.mmap(-1, 8 * 2 * count)
        self.spans = np.frombuffer(words, np.float64).reshape(count, 2)
        """Gradients and end of each member's last round."""
        self._done, self._said = os.pipe()
        self._members: list[tuple[int, int]] = []
        gc.freeze()
        for index in range(count):
            orders_, tell = os.pipe()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                try:
                    die_with(parent)
                    self._learn(index, orders_, ready())
                finally:
                    os._exit(0)
            os.close(orders_)
            self._members.append((pid, tell))
            self._await(1)  # one after the other, so that rows are given in order

    def _learn(self, index: int, orders_: int, steps: Steps) -> None:
        os.write(self._said, b".")
        while told := os.read(orders_, 16):
            begin, end = np.frombuffer(told, np.float64)
            time.sleep(max(0.0, begin - time.perf_counter()))
            count = 0
            while not count or time.perf_counter() < end:
                for _ in range(CHECK):
                    steps.push()
                count += CHECK
            steps.settle()
            self.spans[index] = count, time.perf_counter()
            os.write(self._said, b".")

    def _await(self, count: int) -> None:
        """Wait for a sign of so many members. Who started this process limits the wait."""
        while count:
            count -= len(os.read(self._done, count))

    def run(self, active: int, seconds: float) -> dict[str, float]:
        """The first `active` members make gradients for so long.

        Returns gradients a second, until the last is applied, how many were made, and the least and
        the most of a member.
        """
        begin = time.perf_counter() + START_S
        order = np.array([begin, begin + seconds]).tobytes()
        for _, tell in self._members[:active]:
            os.write(tell, order)
        self._await(active)
        counts, ends = self.spans[:active].T
        taken = float(ends.max()) - begin
        told = {"rate": counts.sum() / taken, "made": counts.sum()}
        told |= {"least": counts.min(), "most": counts.max()}
        return {name: float(value) for name, value in told.items()}

    def end(self) -> None:
        """End the members."""
        for pid, tell in self._members:
            os.close(tell)
            os.kill(pid, signal.SIGKILL)
        for pid, _ in self._members:
            os.waitpid(pid, 0)


def learner(job: str) -> Steps:
    """Attach to the job."""
    client = Client(job)
    client.set_work(SAMPLES, 1, EPOCHS)
    pushed = gradient(client.model.elements)

    def push() -> None:
        client.take_batch()
        client.push(pushed)

    return Steps(push, client.wait_applied)


def hogwild(weights: Floats) -> Steps:
    """Take the shared weights."""
    update, pushed = Numpy(), gradient(weights.size)
    return Steps(lambda: update(weights, pushed), lambda: None)


def main() -> None:
    """First order {"learners", "bytes", "job"}: start. Then {"active", "seconds"}: run."""
    team: Team | None = None
    for order in orders():
        if team is not None:
            answer(team.run(order["active"], order["seconds"]))
            continue
        if sys.argv[1] == "gadei-ps":
            ready = partial(learner, order["job"])
        else:
            ready = partial(hogwild, np.frombuffer(mmap.mmap(-1, order["bytes"]), np.float32))
        team = Team(order["learners"], ready)
        answer({})
    if team is not None:
        team.end()


if __name__ == "__main__":
    main()
