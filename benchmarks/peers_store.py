"""Linear partition by Ray actors: parts and sums go through Ray's object store.

An actor for each member returns its model in parts, sums one part of all models, and puts the sums
together. Only references go through the driver.

With NODES each member is on a node of its own, as on machines of their own: Ray carries what others
ask for from store to store, over loopback. Without it all share one store.

    python -m gadei_ps.benchmarks.peers_store DIRECTORY [NODES]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray

from gadei_ps.benchmarks.peers import Floats, answer, orders
from gadei_ps.benchmarks.peers_ray import begin_ray

STORE_BYTES = 4_000_000_000
NODE_STORE_BYTES = 1_000_000_000
PLACE = "member"
"""Each node has one of this resource, and each member takes one."""


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


@contextmanager
def _nodes(number: int) -> Iterator[None]:
    """A Ray cluster with so many nodes on this machine, to which this process is connected."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_TMPDIR"] = sys.argv[1]  # the cluster notes its address there, too
    cluster = Cluster()
    try:
        for _ in range(number):
            cluster.add_node(
                wait=False,
                include_dashboard=False,
                object_store_memory=NODE_STORE_BYTES,
                resources={PLACE: 1},
            )
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def _one_store() -> Iterator[None]:
    begin_ray(STORE_BYTES)
    try:
        yield
    finally:
        ray.shutdown()


def main() -> None:
    """Order {"bytes", "members", "times"}: aggregates `times` times."""
    if len(sys.argv) > 2:
        with _nodes(int(sys.argv[2])):
            serve(ray.remote(resources={PLACE: 1})(Member))
    else:
        with _one_store():
            serve(ray.remote(Member))


def serve(member: Any) -> None:
    """Answer commands with actors of this class."""
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


if __name__ == "__main__":
    main()
