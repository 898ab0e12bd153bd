"""PyTorch: a drop-in optimizer whose step() pushes, and whose model reads the shared weights.

    optimizer = gadei_ps.learners.torch.Optimizer(model)    # instead of torch.optim.SGD(...)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()

The optimizer that moves the weights is the job's; its state lies in the server.

The model's parameters become views of the weights segment: a pull copies nothing, and other
learners' gradients show at once (Hogwild). That memory is read-only. Writing to a parameter (model
surgery, load_state_dict, an in-place clamp) ends the process with a segmentation fault and a
traceback; `view=False` gives the learner a copy of its own instead, pulled at every step.

Embeddings made with sparse=True push only the rows that a batch has touched; see Client.push for
what that means to optimizers with state.

Buffers of float32 (batch-norm statistics) belong to the job too: a step pushes by how much
they have changed here, the server adds that, and the learner goes on from the sum. So the job's
statistics have moved by every learner's batches. Others (num_batches_tracked) stay local.
"""

from __future__ import annotations

import faulthandler
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gadei_ps import _native, layout
from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.kernels import optimizers
from gadei_ps.learners.client import NONE, Batch, Client, rows_at


class Optimizer(torch.optim.Optimizer):
    """Pushes the model's gradients to a job.

    model: its parameters that require a gradient, on the CPU and float32, become the job's. job: a
    name or a socket's path; None takes it from the environment (`gadei-ps run`, `attach`). view:
    see the module's text. wire, error_feedback: see Client. Learning-rate schedulers of
    torch work: their rate travels with each gradient, relative to the job's.

    Raises UsageError, and what Client raises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        job: str | None = None,
        *,
        view: bool = True,
        wire: str = "float32",
        error_feedback: bool = False,
        name: str = "",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise UsageError("give Optimizer the model itself, not its parameters")
        self._parameters = _checked(model)
        self._buffers = {
            name: buffer
            for name, buffer in model.named_buffers()
            if buffer.dtype == torch.float32 and buffer.device.type == "cpu" and buffer.numel()
        }
        self.client = Client(
            job,
            tensors={name: _array(tensor) for name, tensor in self._parameters.items()},
            buffers={name: _array(tensor) for name, tensor in self._buffers.items()},
            wire=wire,
            error_feedback=error_feedback,
            name=name,
        )
        self._view = view
        self._flat = self.client.flat if view else self.client.pull()
        self._own_data = True
        self._loss = float("nan")
        self._samples = 0
        shared = self.client.model.views(self._flat)
        for name, parameter in self._parameters.items():
            parameter.data = _tensor(shared[name])
        if view and not faulthandler.is_enabled() and sys.stderr is not None:
            # So that a write to the shared weights says where it came from.
            faulthandler.enable()
        self._refresh_buffers()
        # In the order of the job's table, which the first learner has made.
        tensors = {**self._parameters, **self._buffers}
        self._ordered = [tensors[tensor.name] for tensor in self.client.model.tensors]
        self._kept: list[Any] = []  # what the addresses of a push are of, until the next one
        self._job_lr = float(self.client.hyper[optimizers.LR])
        self._made = False
        super().__init__(self._parameters.values(), {"lr": self._job_lr})
        self._made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's own constructor only: the job's model is fixed once it is made."""
        if getattr(self, "_made", False):
            raise UsageError("a job's model is fixed: parameters cannot be added to it")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients that backward() left; waits for a free slot, not for the server.

        With data of the learner's own it also waits for the turn that the synchronization model
        gives; batches() waits itself. Returns what the closure returns.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            if isinstance(result, torch.Tensor) and result.numel() == 1:
                self._loss = float(result.detach())
        client = self.client
        client.write_gradients(client.claim() + layout.PAYLOAD_AT, self._gradients())
        rate = self.param_groups[0]["lr"]
        client.publish(
            loss=self._loss,
            samples=self._samples,
            rate_scale=float(rate) / self._job_lr if rate != self._job_lr and self._job_lr else 1.0,
        )
        self._loss = float("nan")
        if self._own_data:
            client.wait_turn()
            self._pull()
        return result

    def _gradients(self) -> list[int]:
        """Where they lie, for Client.write_gradients.

        Between backward() and this the caches hold the model, not the interpreter: each call of
        torch or NumPy takes microseconds, as long as it takes to copy thousands of values.
        """
        where: list[int] = []
        self._kept.clear()
        for parameter in self._ordered:
            gradient = parameter.grad if isinstance(parameter, torch.nn.Parameter) else None
            if gradient is None:
                where += NONE
            elif gradient.dtype is not torch.float32:
                raise ModelMismatch(f"a gradient is {gradient.dtype}, not float32")
            elif not gradient.is_sparse:
                if not gradient.is_contiguous():
                    gradient = gradient.contiguous()
                    self._kept.append(gradient)
                where += (gradient.data_ptr(), 0, 0)
            elif gradient.sparse_dim() == 1:
                # As backward() left it: rows that a batch names twice are added up on their way.
                indices = gradient._indices().contiguous()
                values = gradient._values().contiguous()
                self._kept += (indices, values)
                where += rows_at(indices.data_ptr(), values.data_ptr(), indices.shape[1])
            else:
                gradient = gradient.to_dense()
                self._kept.append(gradient)
                where += (gradient.data_ptr(), 0, 0)
        if self._buffers:
            self._add_buffers(where)
        return where

    def _add_buffers(self, where: list[int]) -> None:
        """By how much each buffer has changed, in the places that _gradients() left for them."""
        for number, tensor in enumerate(self.client.model.tensors):
            if tensor.name in self._buffers:
                change = _change(_array(self._buffers[tensor.name]), self._bases[tensor.name])
                if change is not None:
                    change = np.ascontiguousarray(change, np.float32)
                    self._kept.append(change)
                    where[3 * number : 3 * number + 3] = (_native.address(change), 0, 0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that are set to None are neither cleared nor added to."""
        if not set_to_none:
            return super().zero_grad(set_to_none=False)
        for parameter in self._parameters.values():
            parameter.grad = None
        return None

    def report(
        self, *, loss: float | torch.Tensor | None = None, samples: int | None = None
    ) -> None:
        """What the next step's gradient says of itself, for status and metrics."""
        if loss is not None:
            self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if samples is not None:
            self._samples = samples

    def batches(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """Mini-batches that the server hands out; see Client.batches. One step() for each."""
        self._own_data = False
        try:
            for batch in self.client.batches(samples, batch_size, epochs, seed):
                self._samples = len(batch.indices)
                self._pull()
                yield batch
                if self.client.unanswered:
                    raise UsageError("a batch was left without a step(): call it once for each")
        finally:
            self._own_data = True
            self._pull()

    def _pull(self) -> None:
        if not self._view:
            self.client.pull(self._flat)
        if self._buffers:
            self._refresh_buffers()

    @torch.no_grad()
    def _refresh_buffers(self) -> None:
        """Goes on from the job's statistics; from them the next step's change is counted."""
        shared = self.client.weights
        self._bases = {name: shared[name].copy() for name in self._buffers}
        for name, buffer in self._buffers.items():
            buffer.copy_(torch.from_numpy(self._bases[name]))

    def close(self) -> None:
        """Leaves the job; the model keeps the weights as they are now, in memory of its own."""
        with torch.no_grad():
            for parameter in self._parameters.values():
                parameter.data = parameter.data.clone()
        self._refresh_buffers()
        self.client.detach()


def _checked(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters to train. Raises UsageError for those that the host cannot share."""
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    if not parameters:
        raise UsageError("the model has no parameters that require a gradient")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype} on {parameter.device}: "
                "the weights of a job are float32 in the host's memory (model.float().cpu())"
            )
    return parameters


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def _change(now: np.ndarray, base: np.ndarray) -> np.ndarray | None:
    """By how much a buffer has changed; None if not at all. A mask may hold infinities."""
    same = now == base
    if same.all():
        return None
    with np.errstate(invalid="ignore"):
        return np.where(same, np.float32(0), now - base)


def _tensor(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        # Torch warns that the memory is read-only; it is meant to be.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
