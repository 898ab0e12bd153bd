"""One of torch's own optimizers, in the learner: the job adds the updates that it makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.client import DRAIN_TIMEOUT_S, Batch
from gadei_ps.learners.torch import assign, gpu_backend
from gadei_ps.learners.torch.backend import own_copy
from gadei_ps.learners.torch.buffers import OWN, Buffers, check
from gadei_ps.learners.torch.finite import FiniteGradients
from gadei_ps.learners.torch.hooks import weakly
from gadei_ps.learners.torch.model import Make, Trained
from gadei_ps.learners.torch.optimizer import JobOptimizer
from gadei_ps.learners.waves import Waves


class LocalOptimizer(JobOptimizer):
    """Steps an optimizer of torch's on this learner's own weights, and pushes what it changes.

        optimizer = LocalOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
        optimizer.close()

    model: on the CPU; its parameters that require a gradient become the job's, and become views of
    this learner's own weights. make: given the parameters, makes the optimizer; its state never
    leaves this process. job, wire, error_feedback, name: see Client. buffers: see Optimizer.

    Each step changes the weights at once. The job gets the sum of the changes after each wave of
    mini-batches under WSP, after each step under another model (see gadei_ps.learners.waves). The
    model's forward pass waits for the turn, and pulls the job's weights, where a wave needs them.
    For torch's learning-rate schedulers and GradScaler it is an optimizer of torch itself: its
    param_groups and its state are those of the optimizer that was made.
    The optimizer of the job is "add", which this class sets. Raises UsageError if the job has
    another one, and what Client raises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        make: Make | None = None,
        job: str | None = None,
        *,
        wire: str = "float32",
        error_feedback: bool = False,
        buffers: str = "first",
        name: str = "",
        **others: Any,
    ) -> None:
        if make is None or others:
            given = "".join(f"{one}={value!r}: " for one, value in others.items())
            raise UsageError(
                f"{given}LocalOptimizer takes a function that makes the optimizer with its "
                "settings: LocalOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))"
            )
        check(buffers)
        self._trained = trained = Trained.of(model, buffers=buffers != OWN)
        if gpu_backend.is_on_gpu(next(iter(trained.parameters.values()))):
            raise UsageError("LocalOptimizer is for models on the CPU: use Optimizer on a GPU")
        trained.end_earlier(LocalOptimizer)
        trained.check_free()
        self.client = trained.join_adding(
            job, make, "make", wire=wire, error_feedback=error_feedback, name=name
        )
        try:
            trained.own(self)
            self.waves = Waves(self.client)
            for at, parameter in trained.parameters.items():
                parameter.data = torch.from_numpy(self.waves.weights[at])
            self._buffers = Buffers(self.client, trained, buffers)
            self.local = trained.made(make, "make")
            """The optimizer that was made."""
            super().__init__(self.local.param_groups, self.local.defaults)
            self._show()
            self._made = True
            self._finite = FiniteGradients(self.client)
            self.client.set_owner(self)
        except BaseException:
            trained.disown(self)
            self.client.detach()
            raise
        self._hook = model.register_forward_pre_hook(weakly(self._before_forward))
        self._loss = math.nan
        self._samples = 0

    def _show(self) -> None:
        """Make the attributes of this optimizer those of the one that was made."""
        self.param_groups, self.state = self.local.param_groups, self.local.state

    def _before_forward(self, *_: object) -> None:
        if self._trained.module.training and torch.is_grad_enabled():
            self._begin()

    def _begin(self) -> None:
        """Wait until the mini-batch may begin that is computed now, unless it has begun."""
        if not self.waves.in_flight:
            self.waves.begin()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer; pushes after the last mini-batch of a wave.

        Returns what the closure returns. Raises what Client.push raises.
        """
        self._begin()
        result = None
        if closure is not None:
            result = self.local.step(closure)
        elif self._finite.are_good(
            one for group in self.local.param_groups for one in group["params"]
        ):
            self.local.step()
        pushed = self.waves.end(loss=self._loss, samples=self._samples)
        self._loss, self._samples = math.nan, 0
        if pushed:
            self._buffers.write_if_due()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer that was made."""
        return self.local.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the optimizer that was made; the job keeps its weights."""
        self.local.load_state_dict(state_dict)
        self._show()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch's."""
        self.local.zero_grad(set_to_none)

    def report(
        self, *, loss: float | torch.Tensor | None = None, samples: int | None = None, **values: Any
    ) -> None:
        """Report loss and samples of the next mini-batch for status and metrics; a wave reports the
        mean loss. values: others by name; see Client.report."""
        if values:
            self.client.report(**values)
        if loss is not None:
            self._loss = float(loss)
        if samples is not None:
            self._samples = samples

    def batches(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """Take mini-batches from the server; see Waves.batches. One step() for each."""
        for batch in self.waves.batches(samples, batch_size, epochs, seed):
            self._samples = len(batch.indices)
            yield batch

    def assign(self, values: Mapping[str, Any]) -> None:
        """Replace weights of the job, exactly once; this learner continues from them.

        values: tensors by the names of model.state_dict(), some of them or all. The optimizer that
        was made keeps its state. Other learners have them once they pull. Raises UsageError in the
        middle of a mini-batch, and what Client.assign raises.
        """
        given = assign.split(self._trained, self.client.model, values)
        self.waves.assign(given.job)
        given.write_local(self._trained)

    def stop_job(self, reason: str = "", timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Stop the job for all its learners (early stopping); see Client.stop_job."""
        self.client.stop_job(reason, timeout_s)

    def close(self) -> None:
        """Push what an unfinished wave has changed, unless its batch goes to another learner, and
        leaves the job. The model keeps its weights, in memory of its own."""
        self._hook.remove()
        try:
            if self.waves.answers is None and not self.waves.in_flight:
                self.waves.flush()
        finally:
            self._buffers.close()
            for parameter in self._trained.parameters.values():
                parameter.data = own_copy(parameter)
            self._trained.disown(self)
            self.client.detach()
