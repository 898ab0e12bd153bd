"""peers_latency with MPI messages: mpiexec -n 2 python -m …. Rank 0 is the learner."""

from __future__ import annotations

import numpy as np

from gadei_ps.benchmarks.peers import Numpy, answer, gradient, orders
from gadei_ps.benchmarks.peers_latency import BYTES, WARM_UP, quantiles, timed
from gadei_ps.benchmarks.peers_mpi import STOP, told, world


def serve(times: int) -> None:
    """Apply `times` gradients and answer each."""
    update, weights = Numpy(), np.zeros(BYTES // 4, np.float32)
    buffer, done = np.empty(BYTES // 4, np.float32), np.ones(1, np.uint8)
    for _ in range(times):
        world.Recv(buffer, source=0)
        update(weights, buffer)
        world.Send(done, dest=0)


def main() -> None:
    """Order to rank 0, {"times", "pause_s"}: push `times` times, with a pause before each push."""
    pushed, done = gradient(BYTES // 4), np.empty(1, np.uint8)

    def push() -> None:
        world.Send(pushed, dest=1)
        world.Recv(done, source=1)

    if world.rank == 0:
        for order in orders():
            told((WARM_UP + order["times"], 0))
            answer(quantiles(timed(push, order["times"], order["pause_s"])))
        told((STOP, 0))
    else:
        while (times := told((STOP, 0))[0]) != STOP:
            serve(times)


if __name__ == "__main__":
    main()
