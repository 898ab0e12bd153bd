"""Cost of each layer of a model: time on each kind of device, and memory.

Times are those of the stages' own code: each layer is a stage for itself, computes as in a
pipeline, with copies of its weights, and is timed by its stopwatch. What a stage without layers
takes is subtracted, and counted once for each stage of a plan. On the host all layers run in their
order, so that caches hold what they hold in training; on a GPU one after another, since it need not
hold the whole model.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch.model import Make, Trained, own_optimizer
from gadei_ps.learners.virtual.activations import label, problem
from gadei_ps.learners.virtual.partition import Chain, Link, Piece, Times
from gadei_ps.learners.virtual.stage_devices import StageDevice
from gadei_ps.learners.virtual.stages import LossFunction, MiniBatch, Stage, Weights

WARM_UP = 3  # passes that do not count
LEAST, MOST_S = 3, 20.0  # after this time no more passes than these
MOST_COPIES = 4  # of the weights, by turns, as mini-batches in flight have them
SIZES = 4 << 10, 16 << 20  # bytes, of copies between devices
STEPS = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """A mini-batch, as VirtualWorker.train takes it."""

    inputs: torch.Tensor
    targets: Any
    loss_function: LossFunction


@dataclass(frozen=True)
class LearnerTimes:
    """Times of the learner's own thread for each mini-batch, if all layers are on the host; ns."""

    copy: int
    """Copies the weights."""
    step: int
    """Steps the optimizer, or adds gradients up for the server's."""
    state: Mapping[str, int]
    """Bytes that it keeps for each parameter: the optimizer's state, or the sum."""
    on_host: int
    """Arrays as large as all weights that the learner has on the host."""
    in_stages: int
    """Part of these that a stage on the host has for its memory, weights and sums."""


def times(
    layers: Sequence[torch.nn.Module],
    chain: Chain,
    sample: Sample,
    place: StageDevice,
    in_flight: int,
    repeats: int,
) -> Times:
    """Measure each piece at a place, with mini-batches in flight; return medians.

    Raises UsageError for what a layer raises there.
    """
    modules = [torch.nn.Sequential(*layers[one.first : one.end]) for one in chain.pieces]

    def measured(stop: threading.Event) -> Times:
        empty = _Group([torch.nn.Sequential()], chain.pieces[:1], place, stop)
        small = torch.zeros(1, device=place.device, requires_grad=True)
        (more,), _ = empty.medians(sample, small, 1, 10 * repeats)
        found: list[tuple[int, int]] = []
        inputs: Any = sample.inputs
        ends = len(modules)
        width = 1 if place.has_own_memory else ends
        for a in range(0, ends, width):
            group = _Group(
                modules[a : a + width],
                chain.pieces[a:],
                place,
                stop,
                before=a > 0,
                after=a + width < ends,
            )
            some, inputs = group.medians(sample, inputs, min(in_flight, MOST_COPIES), repeats)
            found += some
        forward, backward = (
            tuple(max(0, one[which] - more[which]) for one in found) for which in (0, 1)
        )
        return Times(forward, backward, *more)

    return _at(place, measured)


class _Edge(Stage):
    """Beside a part of a model: takes what the part hands on."""

    outputs: torch.Tensor

    def forward(self, one: MiniBatch, inputs: torch.Tensor) -> None:
        self.outputs = inputs

    def backward(self, one: MiniBatch, gradient: torch.Tensor | None) -> None:
        pass


class _Group:
    """Stages in a row that are computed by one thread."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Sequential],
        pieces: Sequence[Piece],
        place: StageDevice,
        stop: threading.Event,
        *,
        before: bool = True,
        after: bool = True,
    ) -> None:
        """before, after: whether the model has layers there."""
        self._modules, self._pieces, self._place, self._stop = modules, pieces, place, stop
        self._stages = [Stage(number, one, place) for number, one in enumerate(modules)]
        for one, following in itertools.pairwise(self._stages):
            one.after, following.before = following, one
        self._edge = _Edge(-1, torch.nn.Sequential(), place)
        self._stages[0].before = self._edge if before else None
        self._stages[-1].after = self._edge if after else None

    def medians(
        self, sample: Sample, inputs: torch.Tensor, copies: int, repeats: int
    ) -> tuple[list[tuple[int, int]], torch.Tensor | None]:
        """Return the passes of each stage (ns), and what the group hands on, on the CPU."""
        for one in self._modules:
            one.to(self._place.device)
        try:
            weights = [[one.copy_weights() for one in self._stages] for _ in range(copies)]
            found: list[list[tuple[float, float]]] = []
            began = time.monotonic()
            for number in range(-WARM_UP, repeats):
                if number >= LEAST and time.monotonic() - began > MOST_S:
                    break
                some = self._round(sample, inputs, weights[number % copies])
                if number >= 0:
                    found.append(some)
        except torch.OutOfMemoryError as error:
            piece = self._pieces[0]
            raise UsageError(
                f"{label(self._modules[0], piece.first, piece.end)} on {self._place.name}: "
                f"{problem(error)}"
            ) from None
        finally:
            for one in self._modules:
                one.to("cpu")
        middle = []
        for passes in zip(*found, strict=True):
            forward, backward = zip(*passes, strict=True)
            middle.append((_ns(statistics.median(forward)), _ns(statistics.median(backward))))
        if self._stages[-1].after is None:
            return middle, None
        left = self._edge.outputs
        return middle, left.detach().cpu().requires_grad_(left.requires_grad)

    def _round(
        self, sample: Sample, inputs: torch.Tensor, weights: list[Weights]
    ) -> list[tuple[float, float]]:
        """Return seconds of a forward and a backward pass, of each stage."""
        for stage_weights in weights:  # a gradient stays until its copy is used again
            for copy in stage_weights.values():
                copy.grad = None
        one = MiniBatch(sample.targets, sample.loss_function, len(inputs), weights)
        before = [stage.watch.times() for stage in self._stages]
        *others, last = self._stages
        self._stages[0].forward(one, inputs)
        for stage in self._stages:
            self._compute(stage, one)
        if last.after is not None:
            left = self._edge.outputs
            last.backward(one, torch.ones_like(left) if left.requires_grad else None)
            self._compute(last, one)
        for stage in reversed(others):
            self._compute(stage, one)
        return [
            (after.forward_s - was.forward_s, after.backward_s - was.backward_s)
            for was, after in zip(before, (one.watch.times() for one in self._stages), strict=True)
        ]

    def _compute(self, stage: Stage, one: MiniBatch) -> None:
        if self._stop.is_set():
            raise InterruptedError
        stage.compute()
        if one.failure is not None:
            piece = self._pieces[stage.number]
            what = label(stage.module, piece.first, piece.end)
            raise UsageError(f"{what} on {self._place.name}: {problem(one.failure)}")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def learner(trained: Trained, make: Make | None, threads: int) -> LearnerTimes:
    """Measure what the learner's thread does for each mini-batch, on copies of the weights.

    make: None if the server has the optimizer; the thread adds gradients up then. Raises UsageError
    if `make` fails, or does not return an optimizer.
    """
    weights = [one.detach() for one in trained.parameters.values()]

    @torch.no_grad()
    def measured(_: threading.Event) -> LearnerTimes:
        copies = [torch.nn.Parameter(one.clone()) for one in weights]
        sums = [torch.zeros_like(one) for one in weights]

        def copy() -> None:
            for one, weight in zip(copies, weights, strict=True):
                one.copy_(weight)

        def add() -> None:
            for total, one in zip(sums, copies, strict=True):
                total.add_(one)

        copying = _median_ns(copy)
        if make is None:
            stepping, state = _median_ns(add), [one.nbytes for one in copies]
        else:
            for one, gradient in zip(copies, sums, strict=True):
                one.grad = gradient
            stepping, state = _stepping(copies, make)
        return LearnerTimes(
            copying,
            stepping,
            dict(zip(trained.parameters, state, strict=True)),
            2 if make is None else 3,
            2 if make is None else 1,
        )

    return _at(StageDevice(torch.device("cpu"), threads), measured)


def _stepping(copies: list[torch.nn.Parameter], make: Make) -> tuple[int, list[int]]:
    """Return the time of a step of the learner's optimizer (ns), and bytes of its state for each
    parameter."""
    try:
        optimizer = own_optimizer(make, copies, "the optimizer")
        if isinstance(optimizer, torch.optim.SparseAdam):  # of embeddings, whose gradients are so
            for one in copies:
                one.grad = torch.zeros_like(one).to_sparse(1)
        step = _median_ns(optimizer.step)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"the optimizer: {problem(error)}") from None
    kept = [optimizer.state[one].values() for one in copies]
    return step, [sum(one.nbytes for one in values if torch.is_tensor(one)) for values in kept]


def links(places: Sequence[StageDevice]) -> dict[tuple[str, str], Link]:
    """Measure the transfer rate from each memory to each other one."""
    devices = {one.memory: one.device for one in places}
    found = {}
    for one, other in itertools.permutations(devices, 2):
        small, large = (_copying_ns(size, devices[one], devices[other]) for size in SIZES)
        found[one, other] = Link(small, max(0.0, (large - small) / (SIZES[1] - SIZES[0])))
    return found


def _copying_ns(size: int, one: torch.device, other: torch.device) -> int:
    tensor = torch.zeros(size, dtype=torch.uint8, device=one)

    def copy() -> None:
        tensor.to(other)
        for device in (one, other):
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    return _median_ns(copy)


def _median_ns(act: Callable[[], object]) -> int:
    """Return the median time of STEPS calls, after one that does not count: it may make state."""
    act()
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return _ns(statistics.median(seconds))


def _at(place: StageDevice, act: Callable[[threading.Event], T]) -> T:
    """Compute in a thread of its own at that place. The event is set on Control-C."""
    stop = threading.Event()

    def run() -> T:
        place.use()
        return act(stop)

    with ThreadPoolExecutor(1, "gadei-measure") as thread:
        made = thread.submit(run)
        try:
            return made.result()
        except BaseException:
            stop.set()
            raise
