"""Linear partition by Ray actors: parts and sums go through Ray's object store.

An actor for each member returns its model in parts, sums one part of all models, and puts the sums
together. Only references go through the driver.

    python -m gadei_ps.benchmarks.peers_store DIRECTORY
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray

from gadei_ps.benchmarks.peers import Floats, answer, orders
from gadei_ps.benchmarks.peers_ray import begin_ray

STORE_BYTES = 4_000_000_000


class Member:
    """A model."""

    def __init__(self, number: int, count: int, members: int) -> None:
        self.model = np.full(count, 1e-3 * number, np.float32)
        self.parts = np.array_split(self.model, members)
        self.out = np.zeros(count, np.float32)

    def give(self) -> Any:
        """The model's parts, an object for each."""
        return self.parts if len(self.parts) > 1 else self.parts[0]

    def mean(self, *parts: Floats) -> Floats:
        """The mean of one part of all models."""
        result = parts[0].copy()
        for part in parts[1:]:
            result += part
        result /= len(parts)
        return result

    def take(self, *means: Floats) -> None:
        """The whole result into this member's own memory."""
        np.concatenate(means, out=self.out)


def aggregate(actors: list[Any]) -> None:
    """One aggregation among all."""
    count = len(actors)
    parts = [actor.give.options(num_returns=count).remote() for actor in actors]
    means = [actor.mean.remote(*(one[i] for one in parts)) for i, actor in enumerate(actors)]
    ray.get([actor.take.remote(*means) for actor in actors])


def main() -> None:
    """Order {"bytes", "members", "times"}: aggregates `times` times."""
    begin_ray(STORE_BYTES)
    member: Any = ray.remote(Member)
    made: tuple[int, int] | None = None
    actors: list[Any] = []
    for order in orders():
        wanted = order["bytes"], order["members"]
        if wanted != made:
            for actor in actors:
                ray.kill(actor)
            actors = [member.remote(i, wanted[0] // 4, wanted[1]) for i in range(wanted[1])]
            made = wanted
        aggregate(actors)
        begin = time.perf_counter()
        for _ in range(order["times"]):
            aggregate(actors)
        answer({"begin": begin, "end": time.perf_counter()})
    ray.shutdown()


if __name__ == "__main__":
    main()
