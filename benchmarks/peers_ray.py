"""A parameter server by Ray actors, as in Ray's own example of an asynchronous one.

A learner returns its gradient, whose reference goes to the server. The server applies it and
returns the weights, whose reference goes to the learner. As for other contenders, the gradient is
prepared in advance. Other than in the example, the server updates in place.

    python -m gadei_ps.benchmarks.peers_ray DIRECTORY
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import ray

from gadei_ps.benchmarks.peers import Floats, Numpy, answer, gradient, orders

STORE_BYTES = 1_000_000_000


class ParameterServer:
    """The weights."""

    def __init__(self, count: int) -> None:
        self.weights = np.zeros(count, np.float32)
        self.update = Numpy()

    def apply_gradients(self, *gradients: Floats) -> Floats:
        """Apply the gradients and return the weights."""
        for given in gradients:
            self.update(self.weights, given)
        return self.weights

    def get_weights(self) -> Floats:
        """The weights."""
        return self.weights


class DataWorker:
    """A learner."""

    def __init__(self, count: int) -> None:
        self.gradient = gradient(count)

    def compute_gradients(self, weights: Floats) -> Floats:
        """Return its gradient."""
        return self.gradient


def run(server: Any, workers: list[Any], times: int) -> None:
    """Apply `times` gradients of each worker, in order of arrival."""
    weights = server.get_weights.remote()
    computed = {worker.compute_gradients.remote(weights): worker for worker in workers}
    for number in range(times * len(workers)):
        ready, _ = ray.wait(list(computed))
        worker = computed.pop(ready[0])
        weights = server.apply_gradients.remote(ready[0])
        if number < (times - 1) * len(workers):
            computed[worker.compute_gradients.remote(weights)] = worker
    ray.get(weights)


def begin_ray(store_bytes: int) -> None:
    """Start Ray on this machine alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_TMPDIR"] = sys.argv[1]  # for sockets and logs, which would stay in /tmp/ray
    ray.init(
        num_cpus=16,  # only for the scheduler, so that all actors run
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=store_bytes,
    )


def main() -> None:
    """Order {"bytes", "learners", "times"}: each learner pushes and pulls `times` times."""
    begin_ray(STORE_BYTES)
    server: Any = ray.remote(ParameterServer)
    worker: Any = ray.remote(DataWorker)
    made: tuple[int, int] | None = None
    actors: list[Any] = []
    for order in orders():
        wanted = order["bytes"], order["learners"]
        if wanted != made:
            for actor in actors:
                ray.kill(actor)
            count = wanted[0] // 4
            actors = [server.remote(count)]
            actors += [worker.remote(count) for _ in range(wanted[1])]
            made = wanted
        run(actors[0], actors[1:], 1)
        begin = time.perf_counter()
        run(actors[0], actors[1:], order["times"])
        answer({"begin": begin, "end": time.perf_counter()})
    ray.shutdown()


if __name__ == "__main__":
    main()
