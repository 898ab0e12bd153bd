"""Stages of a pipeline: parts of a model, each on a device of its own and with a thread.

After Park et al. 2020 (HetPipe), section 4. A stage computes forward passes and backward passes of
different mini-batches in turn, and prefers a waiting backward pass. Activations and gradients are
handed on without copies, unless two stages are on different devices.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.func import functional_call

from gadei_ps.errors import UsageError
from gadei_ps.learners.virtual.stage_devices import StageDevice

LossFunction = Callable[[Any, Any], torch.Tensor]
Weights = dict[str, torch.Tensor]
"""Weights of a stage, by their names in it."""
FORWARD, BACKWARD = 0, 1


@dataclass
class MiniBatch:
    """A mini-batch in flight. `done` is set when the first stage has ended with it."""

    targets: Any
    loss_function: LossFunction
    samples: int
    weights: list[Weights]
    """Weights of each stage, as leaves: this mini-batch's own until its backward pass has ended."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    loss: float = math.nan
    failure: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Layers(torch.nn.Sequential):
    """Layers of a model, from number `first`. Errors of a layer name it."""

    first = 0

    def forward(self, inputs: Any) -> Any:
        for number, layer in enumerate(self, self.first):
            try:
                inputs = layer(inputs)
            except Exception as error:
                error.add_note(f"in layer {number}, {type(layer).__name__}")
                raise
        return inputs


@dataclass(frozen=True)
class StageTimes:
    """Passes that a stage has computed since its start, and how long it was busy with them.

    Seconds of wall time on the host, and of the device's events on a GPU. Transfers from one device
    to another are not in them.
    """

    forward: int
    forward_s: float
    backward: int
    backward_s: float


class Stopwatch:
    """Adds up the passes of a stage, by the clock of its device. Started and stopped by the stage's
    thread, read by any."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._counts = [0, 0]
        self._seconds = [0.0, 0.0]
        self._lock = threading.Lock()
        # A GPU computes on while its thread continues: its events are read once they have come.
        self._pending: deque[tuple[int, Any, Any]] = deque()

    def start(self) -> Any:
        """Return the time before a pass, for stop()."""
        return self._event() if self._cuda else time.perf_counter()

    def stop(self, kind: int, begun: Any) -> None:
        """Record the end of a pass. kind: FORWARD or BACKWARD."""
        ended = self._event() if self._cuda else time.perf_counter()
        with self._lock:
            if not self._cuda:
                self._add(kind, ended - begun)
                return
            self._pending.append((kind, begun, ended))
            while self._pending and self._pending[0][2].query():
                self._settle()

    def times(self) -> StageTimes:
        """Return the times so far; waits for what a GPU still computes."""
        with self._lock:
            while self._pending:
                self._pending[0][2].synchronize()
                self._settle()
            forward, backward = zip(self._counts, self._seconds, strict=True)
            return StageTimes(*forward, *backward)

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _settle(self) -> None:
        kind, begun, ended = self._pending.popleft()
        self._add(kind, begun.elapsed_time(ended) / 1e3)  # of ms

    def _add(self, kind: int, seconds: float) -> None:
        self._counts[kind] += 1
        self._seconds[kind] += seconds


class Stage:
    """A part of the model: computes passes of it one after another, in a thread of its own once it
    has begun."""

    def __init__(self, number: int, module: torch.nn.Module, place: StageDevice) -> None:
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
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._unusable: BaseException | None = None

    def begin(self) -> None:
        """Start the thread. Raises what its place raises, as a GPU without memory."""
        name = f"gadei-stage-{self.number}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._thread = thread
        self._begun.wait()
        if self._unusable is not None:
            raise self._unusable

    def forward(self, one: MiniBatch, inputs: torch.Tensor) -> None:
        """Have the forward pass computed; from any thread."""
        with self._ready:
            self._forward.append((one, inputs))
            self._ready.notify()

    def backward(self, one: MiniBatch, gradient: torch.Tensor | None) -> None:
        """Have the backward pass computed. gradient: of what this stage has handed on."""
        with self._ready:
            self._backward.append((one, gradient))
            self._ready.notify()

    def stop(self) -> None:
        """End the thread with the pass that it computes now; join() waits for that."""
        with self._ready:
            self._ends = True
            self._ready.notify()

    def join(self) -> None:
        """Wait until the thread has ended, if there is one, and drop the passes that wait."""
        # This thread may be it, if it collects garbage.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._forward.clear()
            self._backward.clear()

    def copy_weights(self, copies: Weights | None = None) -> Weights:
        """Copy the parameters for a mini-batch, into these leaves or new ones."""
        if copies is None:
            copies = {
                name: torch.empty_like(one, requires_grad=True)
                for name, one in self.parameters.items()
            }
        with torch.no_grad():
            for name, one in self.parameters.items():
                copies[name].copy_(one)
        return copies

    def _run(self) -> None:
        try:
            self.place.use()
        except BaseException as error:
            self._unusable = error
            return
        finally:
            self._begun.set()
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._backward or self._forward or self._ends)
                if self._ends:
                    return
            self.compute()

    def compute(self) -> None:
        """Compute one pass that waits, in the calling thread: a backward pass if there is one."""
        if self._backward:
            one, given = self._backward.popleft()
            compute: Callable[..., None] = self._backward_pass
        else:
            one, given = self._forward.popleft()
            compute = self._forward_pass
        try:
            compute(one, given)
        except BaseException as error:
            error.add_note(f"in stage {self.number} of the virtual worker, on {self.place.name}")
            one.failure = error
            one.done.set()

    def _forward_pass(self, one: MiniBatch, inputs: torch.Tensor) -> None:
        if self.before is not None:
            needed = inputs.requires_grad
            inputs = inputs.detach()
        inputs = inputs.to(self.place.device)
        if self.before is not None:
            inputs.requires_grad_(needed)
        begun = self.watch.start()
        outputs = functional_call(self.module, one.weights[self.number], (inputs,))
        one.inputs.append(inputs)
        if self.after is None:
            targets = _moved(one.targets, self.place.device)
            try:
                loss = one.loss_function(outputs, targets)
            except Exception as error:
                error.add_note("in the loss function")
                raise
            check_loss("the loss function", loss)
            one.loss = float(loss.detach())
            self.watch.stop(FORWARD, begun)
            one.outputs.append(loss)
            self._backward_pass(one, None)
        elif isinstance(outputs, torch.Tensor):
            self.watch.stop(FORWARD, begun)
            one.outputs.append(outputs)
            self.after.forward(one, outputs)
        else:
            raise UsageError(
                f"stage {self.number} hands on {type(outputs).__name__}: between stages there is "
                "one tensor; move the cut (cuts=), or let the layer return one"
            )

    def _backward_pass(self, one: MiniBatch, gradient: torch.Tensor | None) -> None:
        outputs, inputs = one.outputs.pop(), one.inputs.pop()
        # Without a gradient nothing before it is trained, as a frozen embedding.
        if self.after is None or gradient is not None:
            begun = self.watch.start()
            torch.autograd.backward(outputs, gradient)
            self.watch.stop(BACKWARD, begun)
        if self.before is None:
            one.done.set()
            return
        back = inputs.grad
        # This stage sends it, and not the one before, which may continue with what it has.
        self.before.backward(one, back if back is None else back.to(self.before.place.device))


def check_loss(what: str, loss: object) -> None:
    """Raise UsageError if there is nothing to compute gradients of. what: returned it."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(
            f"{what}: it must return one number as a tensor, computed from what the last layer "
            "returns"
        )


def _moved(targets: Any, device: torch.device) -> Any:
    """Return the same on the device; tensors also in tuples, lists and dictionaries."""
    if isinstance(targets, torch.Tensor):
        return targets.to(device)
    if type(targets) in (tuple, list):
        return type(targets)(_moved(one, device) for one in targets)
    if type(targets) is dict:
        return {name: _moved(one, device) for name, one in targets.items()}
    return targets


def stop_stages(stages: Sequence[Stage], of: int = 0) -> None:
    """End their threads, and wait for what they compute. of: the process that has them; 0: this.

    A forked child has no such threads, and perhaps a lock that one of them held.
    """
    if of and of != os.getpid():
        return
    for stage in stages:
        stage.stop()
    for stage in stages:
        stage.join()
