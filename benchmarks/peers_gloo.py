"""A parameter server by torch.distributed's gloo: rank 0 serves, the others learn.

python -m gadei_ps.benchmarks.peers_gloo RANK LEARNERS FILE. The ranks find each other by FILE.

The server posts a receive for each learner, so that gradients arrive while it applies another. It
sends the weights without waiting for their arrival.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from gadei_ps.benchmarks.common import cores
from gadei_ps.benchmarks.peers import LR, answer, orders


class Server:
    """The server: weights, and for each learner a buffer for its gradients."""

    def __init__(self, count: int, learners: int) -> None:
        self.weights = torch.zeros(count)
        self.buffers = [torch.zeros(count) for _ in range(learners)]

    def run(self, times: int) -> None:
        """Serve `times` gradients of each learner, in turn, because all learners are alike."""
        learners = len(self.buffers)
        arriving: list[Any] = [dist.irecv(b, src=i + 1) for i, b in enumerate(self.buffers)]
        leaving: list[Any] = [None] * learners
        for number in range(times):
            for i, buffer in enumerate(self.buffers):
                arriving[i].wait()
                self.weights.add_(buffer, alpha=-LR)
                if number + 1 < times:
                    arriving[i] = dist.irecv(buffer, src=i + 1)
                if leaving[i] is not None:
                    leaving[i].wait()
                leaving[i] = dist.isend(self.weights, dst=i + 1)
        for work in leaving:
            work.wait()


class Learner:
    """A learner: a gradient, and a copy of the weights."""

    def __init__(self, count: int, learners: int) -> None:
        self.gradient = torch.full((count,), 1e-3)
        self.copy = torch.zeros(count)

    def run(self, times: int) -> None:
        """Send the gradient and receive the weights, `times` times."""
        for _ in range(times):
            pull: Any = dist.irecv(self.copy, src=0)
            dist.send(self.gradient, dst=0)
            pull.wait()


def main() -> None:
    """Order {"bytes", "times"}: push and pull `times` times."""
    rank, learners = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(max(1, cores() - learners) if rank == 0 else 1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=learners + 1
    )
    size = 0
    for order in orders():
        if order["bytes"] != size:
            size = order["bytes"]
            side: Server | Learner = (Learner if rank else Server)(size // 4, learners)
        side.run(1)
        dist.barrier()
        begin = time.perf_counter()
        side.run(order["times"])
        answer({"begin": begin, "end": time.perf_counter()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
