"""Virtual workers: a learner made of stages, through which mini-batches run in a pipeline.

After Park et al. 2020 (HetPipe). A model is cut into stages. Each has a thread, which computes
forward passes and backward passes of different mini-batches in turn. The pipeline is never flushed:
s_local + 1 mini-batches are in flight, those of a wave under WSP.

    train()     the oldest mini-batch has to end first, if as many are in flight as may be:
                its gradients step the optimizer, on the learner's own weights
                Waves.begin: waits for the grant and pulls, where a wave ends
                copies the weights (the copy is the mini-batch's until its backward pass)
                forward ─▶ stage 0 ─▶ stage 1 ─▶ ... ─▶ loss
                                ◀─ backward ◀─ backward ◀─┘

So mini-batch p is computed, forward and backward and in all stages, from the weights after p -
(s_local + 1) and what was pulled by then, whatever the threads do. A stage prefers a waiting
backward pass. Activations and gradients are handed over without copies.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from gadei_ps.errors import JobStopped, UsageError
from gadei_ps.learners.client import Batch, Client
from gadei_ps.learners.torch.model import Trained, initial
from gadei_ps.learners.waves import Waves
from gadei_ps.machine import process
from gadei_ps.memory.weights import FloatArray

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
LossFunction = Callable[[Any, Any], torch.Tensor]
Names = dict[str, str]
"""Parameters of a stage: their names in it, and in the whole model."""


@dataclass
class _MiniBatch:
    """One on its way. Its stages fill it in; `done` is set when the first one has ended with it."""

    targets: Any
    loss_function: LossFunction
    weights: FloatArray
    parameters: list[dict[str, torch.Tensor]]
    """Of each stage, as leaves: views of `weights`."""
    samples: int
    entered: list[Any] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)
    loss: float = math.nan
    failure: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class _Stage(threading.Thread):
    """A part of the model, and the thread that computes it."""

    def __init__(self, module: torch.nn.Module, number: int, threads: int) -> None:
        super().__init__(name=f"stage-{number}", daemon=True)
        self._module = module
        self._number = number
        self._threads = threads
        self.before: _Stage | None = None
        self.after: _Stage | None = None
        self._ready = threading.Condition()
        self._forward: deque[tuple[_MiniBatch, Any]] = deque()
        self._backward: deque[tuple[_MiniBatch, Any]] = deque()
        self._ends = False

    def forward(self, one: _MiniBatch, inputs: Any) -> None:
        """Has it computed; from any thread."""
        with self._ready:
            self._forward.append((one, inputs))
            self._ready.notify()

    def backward(self, one: _MiniBatch, gradient: Any) -> None:
        with self._ready:
            self._backward.append((one, gradient))
            self._ready.notify()

    def end(self) -> None:
        with self._ready:
            self._ends = True
            self._ready.notify()

    def run(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._backward or self._forward or self._ends)
                if self._ends:
                    return
                back = bool(self._backward)
                one, given = (self._backward if back else self._forward).popleft()
            try:
                self._go_back(one, given) if back else self._go_on(one, given)
            except BaseException as error:
                one.failure = error
                one.done.set()

    def _go_on(self, one: _MiniBatch, inputs: Any) -> None:
        if self.before is not None:
            inputs = inputs.detach().requires_grad_()
        outputs = functional_call(self._module, one.parameters[self._number], (inputs,))
        one.entered.append(inputs)
        if self.after is not None:
            one.left.append(outputs)
            self.after.forward(one, outputs.detach())
            return
        loss = one.loss_function(outputs, one.targets)
        one.loss = float(loss.detach())
        one.left.append(loss)
        self._go_back(one, None)

    def _go_back(self, one: _MiniBatch, gradient: Any) -> None:
        torch.autograd.backward(one.left.pop(), gradient)
        inputs = one.entered.pop()
        if self.before is not None:
            self.before.backward(one, inputs.grad)
        else:
            one.done.set()


class VirtualWorker:
    """A learner that is a pipeline of stages on the host.

        worker = VirtualWorker([first, second], lambda p: torch.optim.SGD(p, lr=0.01))
        for inputs, targets in loader:
            worker.train(inputs, targets, criterion)
        worker.close()

    stages: modules on the CPU; each takes one tensor, the output of the one before. Their
    parameters that require a gradient become the job's, named as in nn.ModuleList(stages). make:
    given these, makes the optimizer; its state stays in this process. threads: of each stage's
    computation; by default the cores of this process in equal shares. job, wire, error_feedback,
    name: see Client. The job adds updates (`--optimizer add`); under another model than WSP one
    mini-batch is in flight at a time.

    Raises UsageError for stages that share a parameter, and for buffers that are trained, such as
    batch norm's statistics: stages would see them in different versions.
    """

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        make: Make,
        job: str | None = None,
        *,
        threads: Sequence[int] | None = None,
        wire: str = "float32",
        error_feedback: bool = False,
        name: str = "",
    ) -> None:
        self.stages = list(stages)
        self._trained = trained = _checked(torch.nn.ModuleList(stages))
        cores = [max(1, process.cores() // len(stages))] * len(stages)
        shares = cores if threads is None else list(threads)
        if len(shares) != len(stages) or min(shares) < 1:
            raise UsageError(f"threads: give a number above 0 for each of {len(stages)} stages")
        self.client = Client(
            job,
            tensors=initial(trained.parameters),
            wire=wire,
            error_feedback=error_feedback,
            name=name,
        )
        try:
            self.waves = Waves(self.client)
            for at, parameter in trained.parameters.items():
                parameter.data = torch.from_numpy(self.waves.weights[at])
            self.local = make(list(trained.parameters.values()))
            """The optimizer that was made; for a learning-rate scheduler, say."""
        except BaseException:
            self.client.detach()
            raise
        self._names: list[Names] = [
            {
                inner: f"{number}.{inner}"
                for inner, _ in stage.named_parameters()
                if f"{number}.{inner}" in trained.parameters
            }
            for number, stage in enumerate(stages)
        ]
        self._flying: deque[_MiniBatch] = deque()
        self._room: list[FloatArray] = []  # copies of the weights that no mini-batch needs
        self._own_data = True
        self._stages = [_Stage(one, at, shares[at]) for at, one in enumerate(stages)]
        for before, after in itertools.pairwise(self._stages):
            before.after, after.before = after, before
        for stage in self._stages:
            stage.start()

    # -- training -------------------------------------------------------------------------------

    def train(
        self, inputs: torch.Tensor, targets: Any, loss_function: LossFunction
    ) -> float | None:
        """Sends a mini-batch into the pipeline; waits for the oldest one if it is full.

        Returns the loss of a mini-batch that has ended meanwhile, if one has. Raises what a stage
        or loss_function raises, and what Waves.begin and end raise.
        """
        ended = self._make_room(None)
        self.waves.begin()
        self._enter(inputs, targets, loss_function)
        return ended

    def drain(self) -> float | None:
        """Waits until no mini-batch is in flight. Returns the mean of their losses, if any were."""
        losses = []
        while self._flying:
            losses.append(self._end_oldest())
        return sum(losses) / len(losses) if losses else None

    def train_on(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        loss_function: LossFunction,
        *,
        batch_size: int,
        epochs: int,
        seed: int = 0,
    ) -> Iterator[tuple[Batch, float | None]]:
        """Trains on the mini-batches that the server hands out of a data set.

        inputs, targets: all samples, along the first dimension. Yields each mini-batch that has
        entered the pipeline, with what train() returns. Each is answered once an epoch.
        """
        self._own_data = False
        for parts in self.client.waves(
            len(inputs), batch_size, epochs, seed, before_wait=self.drain
        ):
            for number, part in enumerate(parts, 1):
                last = number == len(parts)
                ended = self._make_room(last)
                try:
                    self.waves.begin(last=last)
                except JobStopped:
                    return
                at = torch.from_numpy(part.indices)
                self._enter(inputs[at], targets[at], loss_function)
                yield part, ended
        self.drain()

    def _make_room(self, last: bool | None) -> float | None:
        ended = None
        while self._flying and not self.waves.may_begin(last):
            ended = self._end_oldest()
        return ended

    def _enter(self, inputs: torch.Tensor, targets: Any, loss_function: LossFunction) -> None:
        """The mini-batch has begun: copies the weights for it, and sends it on its way."""
        copy = self._room.pop() if self._room else np.empty_like(self.waves.flat)
        np.copyto(copy, self.waves.flat)
        views = self.client.model.views(copy)
        parameters = [
            {inner: torch.from_numpy(views[at]).requires_grad_() for inner, at in names.items()}
            for names in self._names
        ]
        one = _MiniBatch(targets, loss_function, copy, parameters, len(inputs))
        self._flying.append(one)
        self._stages[0].forward(one, inputs)

    def _end_oldest(self) -> float:
        """Waits for the oldest mini-batch in flight; its gradients step the optimizer."""
        one = self._flying[0]
        one.done.wait()
        if one.failure is not None:
            raise one.failure
        for names, leaves in zip(self._names, one.parameters, strict=True):
            for inner, at in names.items():
                self._trained.parameters[at].grad = leaves[inner].grad
        self.local.step()
        self.waves.end(loss=one.loss, samples=one.samples)
        self._flying.popleft()
        self._room.append(one.weights)
        return one.loss

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the mini-batches in flight, pushes an unfinished wave and leaves the job.

        Batches of the server's that are not done go to other learners. The stages keep the weights,
        in memory of their own.
        """
        try:
            if self._own_data and all(one.failure is None for one in self._flying):
                self.drain()
                self.waves.flush()
        finally:
            for stage in self._stages:
                stage.end()
            for stage in self._stages:
                stage.join()
            for parameter in self._trained.parameters.values():
                parameter.data = parameter.data.clone()
                parameter.grad = None
            self.client.detach()


def _checked(module: torch.nn.ModuleList) -> Trained:
    """Raises UsageError for stages that cannot be a pipeline on the host."""
    if not len(module):
        raise UsageError("a virtual worker needs at least one stage")
    found: dict[int, int] = {}
    for number, stage in enumerate(module):
        for inner, parameter in stage.named_parameters():
            if found.setdefault(id(parameter), number) != number:
                raise UsageError(
                    f"stages {found[id(parameter)]} and {number} share the parameter {inner!r}: "
                    "put both layers into one stage"
                )
    trained = Trained.of(module)
    if trained.device.type != "cpu":
        raise UsageError(f"the stages are on {trained.device}: a virtual worker is on the CPU")
    if trained.buffers:
        raise UsageError(
            f"stage {next(iter(trained.buffers))!r} is a buffer that training changes: a pipeline "
            "cannot keep its versions apart; use layers without running statistics"
        )
    return trained
