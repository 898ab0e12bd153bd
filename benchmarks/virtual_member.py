"""A process of the benchmark of virtual workers, which trains in one of several ways.

    python -m gadei_ps.benchmarks.virtual_member

Orders, each with a shape (gadei_ps.benchmarks.virtual_layers.Shape):

    {"pipeline": JOB, "mini_batches" or "seconds"}     a VirtualWorker, a thread for each stage
    {"plain": JOB, "threads", "seconds"}               a LocalOptimizer, with threads of torch
    {"towers": COUNT, "at", "seconds"}                 passes alone, COUNT stages in threads
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gadei_ps.benchmarks.peers import answer, orders
from gadei_ps.benchmarks.virtual_layers import LR, Shape
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import LocalOptimizer
from gadei_ps.learners.virtual import VirtualWorker

LEAST = 3  # waves, or mini-batches, that are measured


class Pushed:
    """Bytes of the frames that a learner pushes, read from each frame."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._seen = client.published
        self.bytes = 0

    def look(self) -> None:
        """Call it after each mini-batch."""
        if self._client.published > self._seen:
            assert self._client.published == self._seen + 1
            self._seen += 1
            self.bytes += int(self._client.last_frame["payload_bytes"][0])


def _sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LR)


def measured(
    train: Callable[[], object], client: Client, mini_batches: int, seconds: float
) -> dict[str, Any]:
    """Trains whole waves, at least so many mini-batches and so long. The pipeline is full before.

    Returns mini-batches, the seconds that they took, and the bytes and frames that were pushed.
    """
    wave = client.wave
    for _ in range(2 * wave):
        train()
    pushed, frames = Pushed(client), client.published
    done = 0
    begin = now = time.perf_counter()
    while done < max(LEAST * wave, mini_batches) or done % wave or now < begin + seconds:
        train()
        pushed.look()
        done += 1
        now = time.perf_counter()
    return {
        "mini_batches": done,
        "seconds": now - begin,
        "bytes": pushed.bytes,
        "frames": client.published - frames,
    }


def pipeline(
    shape: Shape, job: str, mini_batches: int = 0, seconds: float = 0.0, cores: int = 1
) -> dict[str, Any]:
    """A virtual worker with a stage for each tower. Also returns the seconds of its stages."""
    inputs, targets = shape.sample()
    devices = [f"host:{cores}"] * shape.stages
    with VirtualWorker(shape.towers(), devices, _sgd, job) as worker:
        told = measured(
            lambda: worker.train(inputs, targets, functional.mse_loss),
            worker.client,
            mini_batches,
            seconds,
        )
        worker.drain()
        stages = worker.stage_times()
    told["stages_s"] = [
        one.forward_s / one.forward + one.backward_s / one.backward for one in stages
    ]
    return told


def plain(
    shape: Shape, job: str, threads: int, mini_batches: int = 0, seconds: float = 0.0
) -> dict[str, Any]:
    """The same model in one learner, with so many threads of torch."""
    torch.set_num_threads(threads)
    inputs, targets = shape.sample()
    model = torch.nn.Sequential(*shape.towers())
    optimizer = LocalOptimizer(model, _sgd, job)

    def train() -> None:
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    try:
        return measured(train, optimizer.client, mini_batches, seconds)
    finally:
        optimizer.close()


def towers(shape: Shape, count: int, at: float, seconds: float) -> dict[str, Any]:
    """Forward and backward passes of `count` towers, a thread each, from the moment `at` on."""
    rates = [0.0] * count
    inputs = shape.sample()[0].requires_grad_()

    def compute(number: int) -> None:
        torch.set_num_threads(1)
        tower, own = shape.tower(number), inputs.detach().requires_grad_()
        passes, now = 0, 0.0
        while not passes or now < at + seconds:
            torch.autograd.backward(tower(own).sum())
            tower.zero_grad()
            own.grad = None
            now = time.monotonic()
            passes += now > at
        rates[number] = passes / (now - at)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"rate": sum(rates)}


def main() -> None:
    """Does what it is told, until its input ends."""
    torch.set_num_threads(1)
    ways = {"pipeline": pipeline, "plain": plain, "towers": towers}
    for order in orders():
        shape = Shape(**order.pop("shape"))
        way = next(iter(order.keys() & ways.keys()))
        what = order.pop(way)
        answer(ways[way](shape, what, **order))  # type: ignore[operator]


if __name__ == "__main__":
    main()
