"""A parameter server by MPI: rank 0 serves, the others learn.

mpiexec -n RANKS python -m gadei_ps.benchmarks.peers_mpi two-sided | one-sided

two-sided: learners send gradients and receive weights. The server posts a receive for each learner,
so that gradients arrive while it applies another.

one-sided: a learner puts its gradient into one of its two places in the server's window, sends an
empty message, and gets the weights. The server sends an empty message when the place is free.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from gadei_ps.benchmarks.peers import Floats, Numpy, answer, gradient, orders

IDLE_S = 0.002
SLOTS = 2
EMPTY = np.empty(0, np.uint8)
STOP = 0

world: Any = MPI.COMM_WORLD


class TwoSided:
    """Gradients and weights as messages."""

    def __init__(self, count: int) -> None:
        self.update = Numpy()
        self.weights = np.zeros(count, np.float32)  # on a learner: its copy
        learners = 0 if world.rank else world.size - 1
        self.buffers = [np.zeros(count, np.float32) for _ in range(learners)]
        self.gradient = gradient(count)

    def serve(self, times: int) -> None:
        """Serve `times` gradients of each learner, in order of arrival."""
        arriving = [world.Irecv(b, source=i + 1) for i, b in enumerate(self.buffers)]
        leaving = [MPI.REQUEST_NULL] * len(self.buffers)
        left = [times] * len(self.buffers)
        for _ in range(times * len(self.buffers)):
            i = MPI.Request.Waitany(arriving)
            self.update(self.weights, self.buffers[i])
            left[i] -= 1
            if left[i]:
                arriving[i] = world.Irecv(self.buffers[i], source=i + 1)
            leaving[i].Wait()
            leaving[i] = world.Isend(self.weights, dest=i + 1)
        MPI.Request.Waitall(leaving)

    def learn(self, times: int) -> None:
        """Send its gradient and receive the weights, `times` times."""
        for _ in range(times):
            pull = world.Irecv(self.weights, source=0)
            world.Send(self.gradient, dest=0)
            pull.Wait()

    def free(self) -> None:
        """Nothing."""


class OneSided:
    """A window of the server with the weights, then each learner's two places."""

    def __init__(self, count: int) -> None:
        self.update = Numpy()
        self.count = count
        parts = 0 if world.rank else 1 + SLOTS * (world.size - 1)
        self.window: Any = MPI.Win.Allocate(4 * count * parts, 4, comm=world)
        self.window.Lock_all()
        self.parts: list[Floats] = []
        if world.rank == 0:
            shared: Any = self.window.tomemory()
            memory = np.frombuffer(shared, np.float32)
            memory[:] = 0
            self.parts = list(memory.reshape(parts, count))
        self.gradient = gradient(count)
        self.copy = np.zeros(count, np.float32)

    def serve(self, times: int) -> None:
        """Apply `times` gradients of each learner, in order of arrival."""
        status = MPI.Status()
        for _ in range(times * (world.size - 1)):
            world.Recv(EMPTY, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
            learner, slot = status.Get_source(), status.Get_tag()
            self.window.Sync()
            self.update(self.parts[0], self.parts[self._part(learner, slot)])
            self.window.Sync()
            world.Send(EMPTY, dest=learner, tag=slot)

    def learn(self, times: int) -> None:
        """Put its gradient and get the weights, `times` times. Waits for the server."""
        for number in range(times):
            slot = number % SLOTS
            if number >= SLOTS:
                world.Recv(EMPTY, source=0, tag=slot)
            to = self.count * self._part(world.rank, slot)
            self.window.Put(self.gradient, 0, (to, self.count, MPI.FLOAT))
            self.window.Flush(0)
            world.Send(EMPTY, dest=0, tag=slot)
            self.window.Get(self.copy, 0, (0, self.count, MPI.FLOAT))
            self.window.Flush(0)
        for _ in range(min(SLOTS, times)):
            world.Recv(EMPTY, source=0)

    def free(self) -> None:
        """Free the window. All ranks must call it."""
        self.parts.clear()
        self.window.Unlock_all()
        self.window.Free()

    @staticmethod
    def _part(learner: int, slot: int) -> int:
        return 1 + SLOTS * (learner - 1) + slot


def told(order: tuple[int, int]) -> tuple[int, int]:
    """Broadcast rank 0's order. Ranks sleep until it comes, because waiting in MPI spins."""
    numbers = np.array(order, np.int64)
    request = world.Ibcast(numbers, root=0)
    while not request.Test():
        time.sleep(IDLE_S)
    return int(numbers[0]), int(numbers[1])


class Rank:
    """One rank, which carries out orders."""

    def __init__(self, kind: str) -> None:
        self.kind = TwoSided if kind == "two-sided" else OneSided
        self.size = 0
        self.side: TwoSided | OneSided | None = None

    def run(self, size: int, times: int) -> tuple[float, float]:
        """Run `times` iterations. Returns the first learner's start and the last one's end."""
        if size != self.size or self.side is None:
            self.close()
            self.size, self.side = size, self.kind(size // 4)
        side = self.side
        act = side.learn if world.rank else side.serve
        act(1)
        world.Barrier()
        begin = time.perf_counter()
        act(times)
        spans = world.gather((begin, time.perf_counter()))
        return (min(s[0] for s in spans), max(s[1] for s in spans)) if spans else (0.0, 0.0)

    def close(self) -> None:
        """Free the resources of the last order."""
        if self.side is not None:
            self.side.free()
        self.side = None


def main() -> None:
    """Order to rank 0, {"bytes", "times"}: push and pull `times` times."""
    rank = Rank(sys.argv[1])
    if world.rank == 0:
        for order in orders():
            begin, end = rank.run(*told((order["bytes"], order["times"])))
            answer({"begin": begin, "end": end})
        told((STOP, 0))
    else:
        while (wanted := told((STOP, 0)))[0] != STOP:
            rank.run(*wanted)
    rank.close()


if __name__ == "__main__":
    main()
