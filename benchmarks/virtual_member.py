"""A process of the benchmark of virtual workers, which trains in one of several ways.

    python -m gadei_ps.benchmarks.virtual_member

Orders, each with a shape (gadei_ps.benchmarks.virtual_shape.Shape):

    {"pipeline": JOB, "mini_batches" or "seconds"}     a VirtualWorker, a thread for each stage
    {"plain": JOB, "threads", "seconds"}               a LocalOptimizer, with threads of torch
    {"towers": COUNT, "at", "seconds"}                 passes alone, COUNT stages in threads
    {"planned": JOB, "devices", "in_flight"}           a pipeline of the planner's
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gadei_ps.benchmarks import virtual_layers as layers
from gadei_ps.benchmarks.peers import answer, orders
from gadei_ps.benchmarks.virtual_memory import Meters
from gadei_ps.benchmarks.virtual_shape import Shape
from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import LocalOptimizer
from gadei_ps.learners.virtual import VirtualWorker, plan
from gadei_ps.learners.virtual.plan import Plan
from gadei_ps.learners.virtual.profiler import Sample
from gadei_ps.learners.virtual.stages import StageTimes

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
    return torch.optim.SGD(parameters, layers.LR)


def measured(
    train: Callable[[], object],
    client: Client,
    mini_batches: int,
    seconds: float,
    when_full: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Train whole waves, at least so many mini-batches and so long. The pipeline is full before.

    Returns mini-batches, the seconds that they took, and the bytes and frames that were pushed.
    """
    wave = client.wave
    for _ in range(2 * wave):
        train()
    when_full()
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
    shape: Shape, job: str, mini_batches: int = 0, seconds: float = 0.0, made: Plan | None = None
) -> dict[str, Any]:
    """A virtual worker with a stage for each tower, or as planned.

    Also returns the mean seconds of a mini-batch in each stage.
    """
    inputs, targets = layers.sample(shape)
    devices = None if made else ["host:1"] * shape.stages
    before: list[StageTimes] = []
    with VirtualWorker(layers.towers(shape), devices, _sgd, job, plan=made) as worker:
        told = measured(
            lambda: worker.train(inputs, targets, functional.mse_loss),
            worker.client,
            mini_batches,
            seconds,
            lambda: before.extend(worker.stage_times()),
        )
        after = worker.stage_times()
    told["stages_s"] = [
        (b.forward_s - a.forward_s) / (b.forward - a.forward)
        + (b.backward_s - a.backward_s) / (b.backward - a.backward)
        for a, b in zip(before, after, strict=True)
    ]
    return told


def planned(
    shape: Shape,
    job: str,
    devices: list[str],
    in_flight: int,
    limits: list[int] | None = None,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """Plan the stages, train, and count the memory of each stage if there are limits.

    limits: bytes for each device. Returns {"refused": why} if no plan fits.
    """
    inputs, targets = layers.sample(shape)
    sample = Sample(inputs, targets, functional.mse_loss)
    try:
        made = plan.make(
            layers.towers(shape),
            sample,
            devices,
            in_flight=in_flight,
            limits=limits,
            optimizer=_sgd,
        )
    except UsageError as error:
        return {"refused": str(error)}
    told = pipeline(shape, job, seconds=seconds, made=made)
    told["predicted_s"] = [one.total_s for one in made.stages]
    told["predicted_rate"] = made.mini_batches_per_s
    told["cuts"] = made.cuts
    told["predicted_bytes"] = [one.memory_bytes for one in made.stages]
    if limits:
        told["peak_bytes"] = _peaks(shape, job, made)
    return told


def _peaks(shape: Shape, job: str, made: Plan) -> list[int]:
    """The most that each stage holds at a time, with its weights."""
    meters = Meters()
    inputs, targets = layers.sample(shape)
    stack = layers.towers(shape)
    meters.watch(stack)
    bounds = [0, *made.cuts, len(stack)]
    with VirtualWorker(stack, made.devices, _sgd, job, cuts=made.cuts) as worker:
        for _ in range(2 * LEAST * worker.client.wave):
            worker.train(inputs, targets, functional.mse_loss)
        worker.drain()
    weights = [
        sum(one.nbytes for layer in stack[first:end] for one in layer.parameters())
        for first, end in itertools.pairwise(bounds)
    ]
    return [meters.of[number].peak + size for number, size in enumerate(weights)]


def plain(
    shape: Shape, job: str, threads: int, mini_batches: int = 0, seconds: float = 0.0
) -> dict[str, Any]:
    """The same model in one learner, with so many threads of torch."""
    torch.set_num_threads(threads)
    inputs, targets = layers.sample(shape)
    model = torch.nn.Sequential(*layers.towers(shape))
    optimizer = LocalOptimizer(model, _sgd, job)

    def train() -> None:
        optimizer.zero_grad()
        torch.autograd.backward([functional.mse_loss(model(inputs), targets)])
        optimizer.step()

    try:
        return measured(train, optimizer.client, mini_batches, seconds)
    finally:
        optimizer.close()


def towers(shape: Shape, count: int, at: float, seconds: float) -> dict[str, Any]:
    """Forward and backward passes of `count` towers, a thread each, from the moment `at` on."""
    rates = [0.0] * count
    inputs = layers.sample(shape)[0].requires_grad_()

    def compute(number: int) -> None:
        torch.set_num_threads(1)
        tower, own = layers.tower(shape, number), inputs.detach().requires_grad_()
        passes, now = 0, 0.0
        while not passes or now < at + seconds:
            torch.autograd.backward([tower(own).sum()])
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
    """Execute requests until the input ends."""
    torch.set_num_threads(1)
    ways = {"pipeline": pipeline, "plain": plain, "towers": towers, "planned": planned}
    for order in orders():
        shape = Shape(**order.pop("shape"))
        way = next(iter(order.keys() & ways.keys()))
        what = order.pop(way)
        answer(ways[way](shape, what, **order))  # type: ignore[operator]


if __name__ == "__main__":
    main()
