"""Virtual workers: a learner of several devices, through which mini-batches run in a pipeline.

After Park et al. 2020 (HetPipe): the pipeline of section 4, and WSP of section 5. A model is cut
into stages, one for each device. The pipeline is never flushed: s_local + 1 mini-batches are in
flight, as many as a wave has.

    train()     the oldest mini-batch has to end first, if as many are in flight as may be:
                its gradients step the optimizer, on the learner's own weights
                Waves.begin: waits for the grant and pulls, where a wave ends
                copies the weights (the copy is the mini-batch's until its backward pass)
                forward ─▶ stage 0 ─▶ stage 1 ─▶ ... ─▶ loss
                                ◀─ backward ◀─ backward ◀─┘

So mini-batch p is computed, forward and backward and in all stages, from the weights after p -
(s_local + 1) and what was pulled by then, whatever the threads do.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch

from gadei_ps.errors import JobStopped, UsageError
from gadei_ps.learners.client import REST_FIRST, Batch
from gadei_ps.learners.torch import assign
from gadei_ps.learners.torch.buffers import FIRST, Buffers
from gadei_ps.learners.torch.finite import FiniteGradients
from gadei_ps.learners.torch.model import Make, Trained
from gadei_ps.learners.virtual import cutting, stage_devices, stages
from gadei_ps.learners.virtual.plan import Plan
from gadei_ps.learners.virtual.stage_devices import StageDevice
from gadei_ps.learners.virtual.stages import LossFunction, MiniBatch, StageTimes, Weights
from gadei_ps.learners.waves import GradientWaves, WaveOrder, Waves
from gadei_ps.memory.weights import FloatArray

T = TypeVar("T")


class VirtualWorker:
    """A learner that is a pipeline of stages.

        worker = VirtualWorker(layers, ["cuda:0", "cuda:1"], lambda p: torch.optim.SGD(p, lr=0.01))
        with worker:
            for inputs, targets in loader:
                worker.train(inputs, targets, criterion)

    layers: modules on the CPU, at least as many as devices; each takes what the one before returns.
    Their parameters that require a gradient become the job's, named as in an nn.Sequential of them,
    so that learners with other cuts and plain ones may work in the same job.

    devices: one for each stage. "cuda:0" and the like, or "host": a thread that computes on the
    CPU with a share of this process's cores; "host:3" with three of them. A stage's layers are
    moved to its device. None: those that `gadei-ps run --devices-per-learner` has given.

    optimizer: given the parameters, makes an optimizer of torch's; its state never leaves this
    process. None: the job's server has the optimizer and gets the sum of each wave's gradients (see
    GradientWaves); the learner's weights are those that it pulls.

    cuts: the first layer of each stage but the first, ascending: [2, 5] makes stages of layers 0 to
    1, 2 to 4 and the others. Without it, the stage with the most parameters has as few as can be.
    plan: of `gadei-ps partition`, or its file; sets devices and cuts. job, wire, error_feedback,
    name: see Client.

    With an optimizer, that of the job is "add", which this class sets. s_local is that of the
    job's WSP; under another model one mini-batch is in flight at a time.

    Raises UsageError for a device that is not there, for cuts that do not fit, if stages share a
    parameter, for layers with running statistics (batch norm), and for an optimizer that is no
    function, all before the job is asked; for a function that makes none; where the job has another
    optimizer; and what Client raises.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        devices: Sequence[str | torch.device] | None = None,
        optimizer: Make | None = None,
        job: str | None = None,
        *,
        cuts: Sequence[int] | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        wire: str = "float32",
        error_feedback: bool = False,
        name: str = "",
    ) -> None:
        layers = cutting.modules(layers)
        made = None if plan is None else _checked_plan(plan, layers, devices, cuts)
        if made is not None:
            devices, cuts = made.devices, made.cuts
        where = _places(devices, planned=made is not None)
        self._threads = stage_devices.remaining_threads(where)
        self.model = torch.nn.Sequential(*layers)
        """All layers. Its modes train() and eval() are those of the stages. While mini-batches are
        in flight its parameters may be copies that one of them has: call drain() first."""
        self._trained = trained = Trained.of(self.model)
        self._stages = cutting.cut(trained, where, cuts)
        trained.check_free()
        how = {"wire": wire, "error_feedback": error_feedback, "name": name}
        if optimizer is None:
            self.client = trained.join(job, **how)
        else:
            self.client = trained.join_adding(job, optimizer, "optimizer", **how)
        self.local: torch.optim.Optimizer | None = None
        """The optimizer that was made; for a learning-rate scheduler, for example."""
        self._flying: deque[MiniBatch] = deque()
        self._free: list[list[Weights]] = []  # weights that no mini-batch needs any more
        self._detached = False
        self._buffers: Buffers | None = None
        self._failed = ""
        self._in_use = threading.RLock()  # a wait for batches of the server's drains
        # Even if a script ends without close(): torch must not compute while Python ends.
        self._process = os.getpid()
        self._end_stages = weakref.finalize(self, stages.stop_stages, self._stages, self._process)
        self._finite = FiniteGradients(self.client)
        try:
            if made is not None:
                made.check_in_flight(self.client.wave)
            # Neither refers to this object: one that is dropped leaves the job at once.
            self.waves, self._use_gradients = self._begin_waves(optimizer)
            if made is not None:
                self.waves.most = made.in_flight
            for stage in self._stages:
                stage.begin()
            trained.own(self)
            self._buffers = Buffers(self.client, trained, FIRST)
            self.client.set_owner(self)
        except BaseException:
            self._leave()
            raise

    def _begin_waves(self, optimizer: Make | None) -> tuple[WaveOrder, Callable[[], object]]:
        """Return the waves, and the function that uses the gradients of an ended mini-batch."""
        if optimizer is not None:
            waves = Waves(self.client)
            self._elsewhere = DeviceParameters(self._place_weights(waves))
            waves.before_reading = self._elsewhere.fetch
            self.local = local = self._trained.made(optimizer, "optimizer")
            return waves, lambda: local.step()  # which a scheduler may have replaced
        gradients = GradientWaves(self.client)
        self._elsewhere = DeviceParameters(self._place_weights(gradients))
        sums = Sums(gradients.gradients, self._trained.parameters, self._elsewhere.ids)
        gradients.before_reading = sums.gather
        return gradients, sums.add

    # -- training -------------------------------------------------------------------------------

    def train(
        self, inputs: torch.Tensor, targets: object, loss_function: LossFunction
    ) -> float | None:
        """Send a mini-batch into the pipeline; waits for the oldest one if it is full.

        inputs: of the first layer, samples along the first dimension; must not change until the
        mini-batch has ended. loss_function: given the last layer's output and targets, returns a
        scalar; is called in the last stage's thread. Returns the loss of a mini-batch that has
        ended meanwhile, if one has.

        Raises what a layer or loss_function has raised for any mini-batch in flight, and what
        Waves.begin and end raise. Whatever is raised, the worker has left the job then. Raises
        UsageError, and continues, for inputs that are not a tensor of samples.
        """
        _check_samples("inputs", inputs)
        _check_loss(loss_function)
        self._check_usable()
        if self.waves.has_part_of_a_batch:
            raise UsageError(REST_FIRST)
        with self._or_leave():
            ended = self._make_room()
            self._begin()
            self._enter(inputs, targets, loss_function)
        return ended

    def drain(self) -> float | None:
        """Wait until no mini-batch is in flight. Returns the mean of their losses, if any were.

        Raises what train() raises, and has left the job then.
        """
        with self._or_leave():
            return self._end_while(lambda: True)

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
        """Train on the mini-batches that the server hands out of a data set.

        inputs, targets: all samples, along the first dimension. batch_size: samples of a
        mini-batch. Yields each mini-batch that has entered the pipeline, with what train() returns.
        A wave is one batch of the server's, and is answered once an epoch. Nothing is trained until
        it is iterated. Raises what train() and Client.waves raise.
        """
        _check_samples("inputs", inputs)
        _check_samples("targets", targets)
        if len(inputs) != len(targets):
            raise UsageError(f"inputs has {len(inputs)} samples and targets {len(targets)}")
        _check_loss(loss_function)
        parts = self.waves.parts(len(inputs), batch_size, epochs, seed, before_wait=self.drain)
        return _WarnUnused(
            self._train_on(parts, inputs, targets, loss_function),
            "for batch, loss in worker.train_on(...): ...",
        )

    def _train_on(
        self,
        parts: Iterator[tuple[Batch, bool]],
        inputs: torch.Tensor,
        targets: torch.Tensor,
        loss_function: LossFunction,
    ) -> Iterator[tuple[Batch, float | None]]:
        with self._or_leave():
            if not self.waves.has_part_of_a_batch:
                self.drain()
                self.waves.flush()  # a wave of the learner's own data
        while True:
            with self._or_leave():
                part, last = next(parts, (None, False))
            if part is None:
                break
            with self._or_leave():
                ended = self._make_room(last)
                try:
                    self._begin(last, part.id)
                except JobStopped:
                    return
                at = torch.from_numpy(part.indices)
                self._enter(inputs[at], targets[at], loss_function)
            yield part, ended
        self.drain()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Drain the pipeline, and pause in a block that takes long; see Client.pause."""
        self.drain()
        with self.client.pause():
            yield

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer for inputs, on its device; for an evaluation.

        Drains the pipeline, and computes in this thread, stage after stage, with the learner's own
        weights. Call model.eval() before and model.train() after it, as with any model. After
        close(), call the model itself.
        """
        _check_samples("inputs", inputs)
        self.drain()
        for stage in self._stages:
            inputs = stage.module(inputs.to(stage.place.device))
        return inputs

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copy of the learner's own weights and of the layers' buffers, on the CPU, by name.

        Drains the pipeline first; raises what train() raises.
        """
        self.drain()
        return {
            name: one.detach().to("cpu", copy=True) for name, one in self.model.state_dict().items()
        }

    def assign(self, values: Mapping[str, Any], *, reset: bool = False) -> None:
        """Drain the pipeline, then assign as LocalOptimizer does. reset: see Client.assign."""
        self.drain()  # first: a stage that computes has copies in the place of its parameters
        given = assign.split(self._trained, self.client.model, values)
        self.waves.assign(given.job, reset=reset)
        self._elsewhere.send()
        given.write_local(self._trained)

    def stage_times(self) -> list[StageTimes]:
        """Return the times of each stage so far. Waits for what a GPU still computes."""
        return [stage.watch.times() for stage in self._stages]

    def _make_room(self, last: bool | None = None) -> float | None:
        """End what has to end before the next mini-batch may begin; return the mean of the losses.

        last: see Waves.begin.
        """
        self._raise_failure()
        return self._end_while(lambda: not self.waves.may_begin(last))

    def _end_while(self, holds: Callable[[], bool]) -> float | None:
        """End the mini-batches in flight while this holds; return the mean of their losses."""
        losses = []
        while self._flying and holds():
            losses.append(self._end_oldest())
        return statistics.fmean(losses) if losses else None

    def _begin(self, last: bool | None = None, batch: int | None = None) -> None:
        if self.waves.begin(last=last, batch=batch):
            self._elsewhere.send()

    def _enter(self, inputs: torch.Tensor, targets: object, loss_function: LossFunction) -> None:
        """Copy the weights for a mini-batch that has begun, and send it to the first stage."""
        free = self._free.pop() if self._free else [None] * len(self._stages)
        weights = [stage.copy_weights(one) for stage, one in zip(self._stages, free, strict=True)]
        one = MiniBatch(targets, loss_function, len(inputs), weights)
        self._flying.append(one)
        self._stages[0].forward(one, inputs)

    def _end_oldest(self) -> float:
        """Wait for the oldest mini-batch in flight, and use its gradients."""
        one = self._flying[0]
        one.done.wait()
        self._raise_failure()
        for stage, copies in zip(self._stages, one.weights, strict=True):
            for inner, parameter in stage.parameters.items():
                parameter.grad, copies[inner].grad = copies[inner].grad, None
        if self._finite.are_good(self._trained.parameters.values()):
            self._use_gradients()
        for stage in self._stages:
            for parameter in stage.parameters.values():
                parameter.grad = None  # its memory is for the next gradient
        pushed = self.waves.end(loss=one.loss, samples=one.samples)
        self._flying.popleft()
        if pushed:
            assert self._buffers is not None
            self._buffers.write_if_due()
        if len(self._free) + len(self._flying) < self.client.wave:  # it may be fewer by now
            self._free.append(one.weights)
        return one.loss

    def _raise_failure(self) -> None:
        for one in self._flying:
            if one.failure is not None:
                raise one.failure

    # -- weights --------------------------------------------------------------------------------

    def _place_weights(self, waves: WaveOrder) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
        """Make parameters of the host views of the learner's own weights. Returns the others, each
        after the view that it follows."""
        own = {name: torch.from_numpy(one) for name, one in waves.weights.items()}
        for stage in self._stages:
            stage.module.to(stage.place.device)
        far = {
            id(one)
            for stage in self._stages
            if stage.place.has_own_memory
            for one in stage.parameters.values()
        }
        elsewhere = []
        with torch.no_grad():
            for name, parameter in self._trained.parameters.items():
                if id(parameter) in far:
                    parameter.copy_(own[name])
                    elsewhere.append((own[name], parameter))
                else:
                    parameter.data = own[name]
        return elsewhere

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """End the mini-batches in flight, push an unfinished wave, and leave the job.

        With batches of the server's that are not done, it leaves at once: they go to other
        learners, whole. The layers keep the weights, on the CPU, in memory of their own. Raises
        what train() raises. Does nothing if the worker has left the job.
        """
        if self._detached:
            return
        with self._or_leave():
            self._raise_failure()
            if not self.client.unanswered:
                self.drain()
                self.waves.flush()
        assert self._buffers is not None
        self._buffers.close()
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception leave at once, and drop what is not pushed."""
        if kind is None:
            self.close()
        else:
            self._leave()

    def _check_usable(self) -> None:
        self.client.check_process()  # a forked child has none of the threads
        if self._detached:  # not every call asks the client, and the threads have ended
            why = f", for it failed ({self._failed})" if self._failed else ""
            raise UsageError(f"this virtual worker has left its job{why}: make a new VirtualWorker")

    @contextlib.contextmanager
    def _or_leave(self) -> Iterator[None]:
        self._check_usable()
        if not self._in_use.acquire(blocking=False):
            raise UsageError("another thread uses this virtual worker: one at a time")
        before = torch.get_num_threads()
        torch.set_num_threads(min(before, self._threads))
        try:
            yield
        except BaseException as error:
            self._failed = type(error).__name__
            self._leave()
            raise
        finally:
            torch.set_num_threads(before)
            self._in_use.release()

    def _leave(self) -> None:
        if self._detached or self._process != os.getpid():  # a forked child has no threads
            return
        self._detached = True
        for stage in self._stages:
            stage.stop()
        try:
            if self._buffers is not None:
                self._buffers.close(write=False)
            self.client.detach()
        finally:
            self._end_stages()
            self._flying.clear()
            self._free.clear()
            self._trained.disown(self)
            for parameter in self._trained.parameters.values():
                parameter.data = parameter.data.to("cpu", copy=True)
                parameter.grad = None
            self.model.to("cpu")


# -- weights on devices of the learner ------------------------------------------------------------


class DeviceParameters:
    """Parameters on devices with their own memory, and the host arrays that they follow."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
        """Follow parameters. pairs: of each its array on the host, and itself."""
        self._pairs = pairs
        self.ids = {id(parameter) for _, parameter in pairs}

    @torch.no_grad()
    def fetch(self) -> None:
        """Copy from the devices to the host."""
        for own, parameter in self._pairs:
            own.copy_(parameter)

    @torch.no_grad()
    def send(self) -> None:
        """Copy from the host to the devices."""
        for own, parameter in self._pairs:
            parameter.copy_(own)


class Sums:
    """The sums of a wave's gradients. Those of `elsewhere` (ids) stay on their device until
    gather() adds them to `gradients`, by name on the host."""

    def __init__(
        self,
        gradients: Mapping[str, FloatArray],
        parameters: Mapping[str, torch.nn.Parameter],
        elsewhere: Collection[int],
    ) -> None:
        self._sums: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._far: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, parameter in parameters.items():
            total = torch.from_numpy(gradients[name])
            if id(parameter) in elsewhere:
                wanted, total = total, torch.zeros_like(parameter, requires_grad=False)
                self._far.append((wanted, total))
            self._sums.append((parameter, total))

    def add(self) -> None:
        """Add the gradients that the parameters have now."""
        for parameter, total in self._sums:
            if parameter.grad is not None:
                total += parameter.grad

    def gather(self) -> None:
        """Move sums from devices to the host."""
        for wanted, total in self._far:
            wanted += total.to(wanted.device)
            total.zero_()


# -- arguments ------------------------------------------------------------------------------------


def _checked_plan(
    plan: Plan | str | os.PathLike[str],
    layers: Sequence[torch.nn.Module],
    devices: object,
    cuts: object,
) -> Plan:
    """Return the plan. Raises UsageError if it is for other layers, or not given alone."""
    if devices is not None or cuts is not None:
        raise UsageError("plan sets the devices and the cuts: leave out devices and cuts, or plan")
    if not isinstance(plan, Plan | str | os.PathLike):
        raise UsageError(f"plan is a {type(plan).__name__}: give a plan, or the path of its file")
    made = plan if isinstance(plan, Plan) else Plan.load(plan)
    made.check(layers)
    return made


def _places(given: Sequence[str | torch.device] | None, *, planned: bool) -> list[StageDevice]:
    """Return where the stages compute. planned: by a plan. Raises UsageError."""
    try:
        return stage_devices.parse(given)
    except UsageError as error:
        if not planned:
            raise
        raise UsageError(f"the plan's {error}; plan for this machine: gadei-ps partition") from None


def _check_samples(what: str, given: object) -> None:
    if not isinstance(given, torch.Tensor) or not given.dim():
        raise UsageError(f"{what} must be a tensor with the samples along its first axis")
    if not len(given):
        raise UsageError(f"{what} has no samples: leave out mini-batches that are empty")


def _check_loss(function: object) -> None:
    if not callable(function):
        raise UsageError(f"loss_function is a {type(function).__name__}: give a function")


class _WarnUnused(Iterator[T]):
    """An iterator that warns if it is dropped before anything was taken from it."""

    def __init__(self, inner: Iterator[T], how: str) -> None:
        """Wrap an iterator. how: the right use, for the warning."""
        self._inner, self._how, self._begun = inner, how, False

    def __next__(self) -> T:
        self._begun = True
        return next(self._inner)

    def __del__(self) -> None:
        if not self._begun:
            warnings.warn(f"nothing was trained: write {self._how}", stacklevel=2)
