"""Stages of a pipeline: parts of a model, each on a device of its own and with a thread.

After Park et al. 2020 (HetPipe), section 4. A stage computes forward passes and backward passes of
different mini-batches in turn, and prefers a waiting backward pass. Activations and gradients are
handed on without copies, unless two stages are on different devices.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.func import functional_call

from gadei_ps.errors import UsageError
from gadei_ps.learners.stopwatch import BACKWARD, FORWARD, Stopwatch
from gadei_ps.learners.torch.model import Trained
from gadei_ps.machine import process
from gadei_ps.machine.gpus import VISIBLE
from gadei_ps.machine.launch import DEVICE_VARIABLE, DEVICES_VARIABLE

LossFunction = Callable[[Any, Any], torch.Tensor]
Weights = dict[str, torch.Tensor]
"""Of a stage, by their names in it."""


@dataclass(frozen=True)
class Place:
    """Where a stage computes."""

    device: torch.device
    cores: int
    """Threads of a computation on the host."""

    @property
    def has_own_memory(self) -> bool:
        """Whether weights have to be copied there."""
        return self.device.type != "cpu"

    @property
    def name(self) -> str:
        """As places() takes it, with the number of cores or of the GPU."""
        return str(self.device) if self.has_own_memory else f"host:{self.cores}"

    def use(self) -> None:
        """What the calling thread computes, it computes here from now on."""
        if self.device.type == "cpu":
            # A thread's first question takes over what any thread has set last; ask it before.
            torch.get_num_threads()
            torch.set_num_threads(self.cores)
        else:
            torch.cuda.set_device(self.device)


def given() -> list[str]:
    """The devices that `gadei-ps run` and `attach` have given this learner.

    GPUs if PyTorch sees as many; else, with --device auto, parts of the threads that PyTorch has
    here, which are the learner's share of the cores. Raises UsageError where there are none.
    """
    told = os.environ.get(DEVICES_VARIABLE, "")
    if not re.fullmatch(r"[1-9]\d{0,2}", told):
        raise UsageError(
            'devices: give one for each stage, as ["host", "host"], or start the script with '
            "gadei-ps run --devices-per-learner N"
        )
    count, device = int(told), os.environ.get(DEVICE_VARIABLE) or "auto"
    seen = torch.cuda.device_count() if device != "host" else 0
    if device == "cuda" or seen >= count:
        return [f"cuda:{number}" for number in range(count)]
    if device == "auto" and os.environ.get(VISIBLE):
        print(
            f"gadei-ps: this learner computes on the host: of its GPUs ({os.environ[VISIBLE]}) "
            f"PyTorch {torch.__version__} sees {seen}, and {count} are needed",
            file=sys.stderr,
        )
    return [f"host:{max(1, torch.get_num_threads() // count)}"] * count


def places(devices: Sequence[str | torch.device] | None) -> list[Place]:
    """Where the stages compute: "host", "host:CORES" or a CUDA device, one for each stage.

    Stages of "host" share the cores that others do not name. None: see given(). Raises UsageError
    for a device that is not there.
    """
    if devices is None:
        devices = given()
    if isinstance(devices, str) or not devices:
        raise UsageError('devices: give a list, one for each stage: ["host", "host"]')
    names = [str(one) for one in devices]
    told = [re.fullmatch(r"host(?::([1-9]\d*))?", name) for name in names]
    fixed = [int(one[1]) if one and one[1] else 0 for one in told]
    sharing = sum(one is not None and one[1] is None for one in told)
    share = max(1, (process.cores() - sum(fixed)) // max(1, sharing))
    return [
        Place(torch.device("cpu"), cores or share) if one else Place(_cuda(name), share)
        for name, one, cores in zip(names, told, fixed, strict=True)
    ]


def left(where: Sequence[Place]) -> int:
    """Threads for the learner's own computations: of the cores that stages leave, at least one.

    With more, it and the stages would wait for each other at the end of each computation.
    """
    taken = sum(one.cores for one in where if one.device.type == "cpu")
    return max(1, min(torch.get_num_threads(), process.cores() - taken))


def _cuda(name: str) -> torch.device:
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise UsageError(f"device {name!r}: give 'host', 'host:CORES', 'cuda' or 'cuda:NUMBER'")
    if not torch.cuda.is_available():
        raise UsageError(
            f"device {name!r}: PyTorch {torch.__version__} sees no GPU here; give 'host'"
        )
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise UsageError(f"device {name!r}: PyTorch sees {count} GPUs; the first is 'cuda:0'")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def even_cuts(sizes: Sequence[int], stages: int) -> list[int]:
    """Cuts a chain of layers so that the largest stage is as small as can be.

    sizes: of each layer; at least `stages` of them. Returns the first layer of each stage but the
    first. Of equal cuts it takes the later ones, so that a layer without parameters stays with the
    one before.
    """
    before = [0, *itertools.accumulate(sizes)]
    best: dict[int, tuple[int, list[int]]] = {  # of the first layers: the largest stage, the cuts
        end: (before[end], []) for end in range(1, len(sizes) + 1)
    }
    for stage in range(2, stages + 1):
        best = {
            end: min(
                (
                    (max(best[cut][0], before[end] - before[cut]), [*best[cut][1], cut])
                    for cut in range(end - 1, stage - 2, -1)  # min() takes the first of equal ones
                ),
                key=lambda one: one[0],
            )
            for end in range(stage, len(sizes) + 1)
        }
    return best[len(sizes)][1]


def check_model(model: Trained) -> None:
    """Raises UsageError for a model that cannot be a pipeline, however it is cut."""
    if model.device.type != "cpu":
        raise UsageError(
            f"the layers are on {model.device}: leave them on the CPU, and the worker moves "
            "each to its stage's device"
        )
    for name, layer in model.module.named_modules():
        if getattr(layer, "running_mean", None) is not None:
            raise UsageError(
                f"layer {name!r} ({type(layer).__name__}) keeps running statistics, which have no "
                "version of each mini-batch's own: give it track_running_stats=False, or take "
                "GroupNorm or LayerNorm"
            )


@dataclass
class MiniBatch:
    """One on its way. Its stages fill it in; `done` is set when the first one has ended with it."""

    targets: Any
    loss_function: LossFunction
    samples: int
    weights: list[Weights]
    """Of each stage, as leaves: this mini-batch's own until its backward pass has ended."""
    entered: list[torch.Tensor] = field(default_factory=list)
    left: list[torch.Tensor] = field(default_factory=list)
    loss: float = math.nan
    failure: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Stage(threading.Thread):
    """A part of the model, and the thread that computes it."""

    def __init__(self, number: int, module: torch.nn.Module, place: Place) -> None:
        super().__init__(name=f"gadei-stage-{number}", daemon=True)
        self.number = number
        self.module = module
        self.place = place
        self.parameters: dict[str, torch.nn.Parameter] = {
            inner: one for inner, one in module.named_parameters() if one.requires_grad
        }
        """Those that are trained, by their names in this stage."""
        self.before: Stage | None = None
        self.after: Stage | None = None
        self.watch = Stopwatch(place.device)
        self._ready = threading.Condition()
        self._forward: deque[tuple[MiniBatch, torch.Tensor]] = deque()
        self._backward: deque[tuple[MiniBatch, torch.Tensor | None]] = deque()
        self._ends = False

    def forward(self, one: MiniBatch, inputs: torch.Tensor) -> None:
        """Has the forward pass computed; from any thread."""
        with self._ready:
            self._forward.append((one, inputs))
            self._ready.notify()

    def backward(self, one: MiniBatch, gradient: torch.Tensor | None) -> None:
        """Has the backward pass computed. gradient: of what this stage has handed on."""
        with self._ready:
            self._backward.append((one, gradient))
            self._ready.notify()

    def end(self) -> None:
        """The thread ends with what it computes now; join() waits for that."""
        with self._ready:
            self._ends = True
            self._ready.notify()

    def run(self) -> None:
        self.place.use()
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._backward or self._forward or self._ends)
                if self._ends:
                    return
            self.compute()

    def compute(self) -> None:
        """Computes one pass that waits, in the calling thread: a backward pass if there is one."""
        if self._backward:
            one, given = self._backward.popleft()
            compute: Callable[..., None] = self._go_back
        else:
            one, given = self._forward.popleft()
            compute = self._go_on
        try:
            compute(one, given)
        except BaseException as error:
            one.failure = error
            one.done.set()

    def _go_on(self, one: MiniBatch, inputs: torch.Tensor) -> None:
        if self.before is not None:
            needed = inputs.requires_grad
            inputs = inputs.detach()
        inputs = inputs.to(self.place.device)
        if self.before is not None:
            inputs.requires_grad_(needed)
        begun = self.watch.start()
        outputs = functional_call(self.module, one.weights[self.number], (inputs,))
        one.entered.append(inputs)
        if self.after is None:
            targets = one.targets
            if isinstance(targets, torch.Tensor):
                targets = targets.to(self.place.device)
            loss = one.loss_function(outputs, targets)
            one.loss = float(loss.detach())
            self.watch.stop(FORWARD, begun)
            one.left.append(loss)
            self._go_back(one, None)
        elif isinstance(outputs, torch.Tensor):
            self.watch.stop(FORWARD, begun)
            one.left.append(outputs)
            self.after.forward(one, outputs)
        else:
            raise UsageError(
                f"stage {self.number} hands on {type(outputs).__name__}: between stages there is "
                "one tensor; move the cut (cuts=), or let the layer return one"
            )

    def _go_back(self, one: MiniBatch, gradient: torch.Tensor | None) -> None:
        left, entered = one.left.pop(), one.entered.pop()
        # Without a gradient nothing before it is trained, a frozen embedding, say.
        if self.after is None or gradient is not None:
            begun = self.watch.start()
            torch.autograd.backward(left, gradient)
            self.watch.stop(BACKWARD, begun)
        if self.before is None:
            one.done.set()
            return
        back = entered.grad
        # This stage brings it, and not the one before, which may go on with what it has.
        self.before.backward(one, back if back is None else back.to(self.before.place.device))


def end(stages: Sequence[Stage]) -> None:
    """Ends their threads, and waits for what they compute."""
    for stage in stages:
        stage.end()
    for stage in stages:
        if stage is not threading.current_thread():  # which may collect garbage
            stage.join()
