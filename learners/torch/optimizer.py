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

A model on a GPU trains there: its parameters become views of a copy on the device, which newer
weights reach while it computes, and gradients leave while the next step computes (torch_cuda.py).

Buffers of float32 (batch-norm statistics) belong to the job too: a step pushes by how much
they have changed here, the server adds that, and the learner goes on from the sum. So the job's
statistics have moved by every learner's batches. Others (num_batches_tracked) stay local.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gadei_ps import _native
from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.kernels import optimizers
from gadei_ps.learners.client import NONE, Batch, Client, Where, product_at, rows_at, whole_at
from gadei_ps.learners.torch import gpu as torch_cuda
from gadei_ps.learners.torch.gpu import embedding as embedding
from gadei_ps.memory import layout

# Hooks on every optimizer's step; under these names in every torch since 2.0.
_MODULE = sys.modules[torch.optim.Optimizer.__module__]
_HOOKS_OF_ALL = tuple(
    getattr(_MODULE, f"_global_optimizer_{when}_hooks", {}) for when in ("pre", "post")
)


PRODUCTS = "_gadei_ps_products"
"""Attribute of a weight: factors and vectors of which its gradient is the sum of products, and the
vectors' version, which says whether they have been changed since."""
Products = list[tuple[torch.Tensor, torch.Tensor, int]]
SECOND = (
    "a second backward() before step() or zero_grad(): with free_gradients each gradient leaves as "
    "soon as it is computed, and cannot be added to"
)
FEW_VECTORS = 4  # for which a product is bound by memory, however it is computed
SPARSE = 8  # one in so many values differs from zero


class _NotWanted(Exception):
    """The synchronization model has gone on without the gradient that is being computed."""


class Optimizer(torch.optim.Optimizer):
    """Pushes the model's gradients to a job.

    model: its parameters that require a gradient, float32 and all in one place, become the job's;
    bring it to its GPU before. job: a name or a socket's path; None takes it from the environment
    (`gadei-ps run`, `attach`). view: see the module's text; not on a GPU. wire, error_feedback: see
    Client. free_gradients: backward() copies each
    gradient into the ring while it is in the cache, and frees it; those of torch.nn.Linear are
    worked out in the ring (see linear()). Faster for models larger than the cache, and they need no
    memory for gradients; but `parameter.grad` is None after backward(), so there is nothing to clip
    (use the job's clip_norm) or to accumulate. Learning-rate schedulers of
    torch work: their rate travels with each gradient, relative to the job's.

    Raises UsageError, DeviceError, and what Client raises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        job: str | None = None,
        *,
        view: bool = True,
        wire: str = "float32",
        error_feedback: bool = False,
        free_gradients: bool = False,
        name: str = "",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise UsageError("give Optimizer the model itself, not its parameters")
        self._parameters = _checked(model)
        device = torch_cuda.device_of(self._parameters)
        on_gpu = torch_cuda.is_on_gpu(next(iter(self._parameters.values())))
        if view and not on_gpu and any(getattr(one, "max_norm", None) for one in model.modules()):
            raise UsageError(
                "an embedding with max_norm writes to its weight, which learners only read: use "
                "view=False"
            )
        if on_gpu and free_gradients:
            raise UsageError("free_gradients is for models on the CPU; on a GPU nothing waits")
        self._buffers = {
            name: buffer
            for name, buffer in model.named_buffers()
            if buffer.dtype == torch.float32 and buffer.device == device and buffer.numel()
        }
        self.client = Client(
            job,
            tensors={
                name: _array(tensor)
                for name, tensor in torch_cuda.ordered(model, self._parameters).items()
            },
            buffers={name: _array(tensor) for name, tensor in self._buffers.items()},
            wire=wire,
            error_feedback=error_feedback,
            name=name,
        )
        self._gpu: torch_cuda.Shared | None = None
        self._view = view and not on_gpu
        self._flat = self.client.flat
        self._own_data = True
        self._loss: float | torch.Tensor = float("nan")
        self._samples = 0
        self._undo: list[Callable[[], None]] = []
        if on_gpu:
            self._gpu = self._share(model, device)
            together = torch_cuda.recurrent(model, self._parameters)
            self._shared = self._gpu.tensors(together)
        else:
            self._flat = self.client.flat if view else self.client.pull()
            views = self.client.model.views(self._flat)
            self._shared = {name: _tensor(view) for name, view in views.items()}
        for name, parameter in self._parameters.items():
            parameter.data = self._shared[name]
        if self._view and not faulthandler.is_enabled() and sys.stderr is not None:
            # So that a write to the shared weights says where it came from.
            faulthandler.enable()
        self._refresh_buffers()
        # In the order of the job's table, which the first learner has made.
        tensors = {**self._parameters, **self._buffers}
        self._ordered: list[torch.Tensor] = [
            tensors[tensor.name] for tensor in self.client.model.tensors
        ]
        self._products: list[Products] = [[] for _ in self._ordered]
        for tensor, products in zip(self._ordered, self._products, strict=True):
            if not on_gpu:
                setattr(tensor, PRODUCTS, products)
        self._payload = 0  # of the slot that gradients are being copied into, as they are computed
        self._taken: set[int] = set()
        if free_gradients:
            self._free_gradients(model)
        self._job_lr = float(self.client.hyper[optimizers.LR])
        self._steps = 0  # of the wave in hand
        self._wave = 1  # mini-batches in it
        self._may_drop = False  # inside iteration(), and the job may go on without this learner
        self._watched = False
        self._model = model
        self._free = free_gradients
        self._made = False
        super().__init__(self._parameters.values(), {"lr": self._job_lr})
        self._made = True

    def _share(self, model: torch.nn.Module, device: torch.device) -> torch_cuda.Shared:
        try:
            shared = torch_cuda.Shared(self.client, device)
        except BaseException:
            self.client.detach()
            raise
        self._undo += torch_cuda.adapt(model, shared, self._parameters)
        return shared

    def _free_gradients(self, model: torch.nn.Module) -> None:
        """From now on backward() gives them away."""
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]
                self._undo.append(functools.partial(delattr, module, "forward"))
        for number, tensor in enumerate(self._ordered):
            if isinstance(tensor, torch.nn.Parameter):
                hook = tensor.register_post_accumulate_grad_hook(self._take(number))  # type: ignore[no-untyped-call]
                self._undo.append(hook.remove)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's own constructor only: the job's model is fixed once it is made."""
        if getattr(self, "_made", False):
            raise UsageError("a job's model is fixed: parameters cannot be added to it")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients that backward() left; waits for a free slot, not for the server.

        With data of the learner's own it also waits for the turn that the synchronization model
        gives; batches() waits itself. Returns what the closure returns. Under WSP only the last
        step of a wave pushes, the sum of the wave's gradients; until then zero_grad() keeps them.
        """
        return self._hooked_step(closure) if self._is_watched() else self._push(closure)

    # Torch would wrap step() in its profiler's and its hooks' code, which takes some 80 us between
    # backward() and the push, when it is not in the cache: as long as all the rest of a step.
    step.hooked = True  # type: ignore[attr-defined]

    def _is_watched(self) -> bool:
        """Whether somebody wants to know of steps: hooks, or torch's profiler."""
        hooks = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, *_HOOKS_OF_ALL
        return any(hooks) or bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]

    def _push(self, closure: Callable[[], Any] | None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            if isinstance(result, torch.Tensor) and result.numel() == 1:
                self.report(loss=result)
        client = self.client
        if self._goes_on_with_wave():
            return result
        rate = self.param_groups[0]["lr"]
        scale = float(rate) / self._job_lr if rate != self._job_lr and self._job_lr else 1.0
        kept: list[Any] = []  # what the addresses are of
        where = self._addresses(kept)
        if self._gpu is not None:
            self._gpu.push(where, kept, self._loss, samples=self._samples, rate_scale=scale)
            if client.waits_for_others:
                self._gpu.flush()
        elif self._payload:
            for number in range(len(self._ordered)):
                one = where[4 * number : 4 * number + 4]
                if any(one):
                    if number in self._taken:
                        raise UsageError(SECOND)
                    client.append(self._payload, number, (one[0], one[1], one[2], one[3]))
            client.publish(loss=float(self._loss), samples=self._samples, rate_scale=scale)
        else:
            loss = float(self._loss)
            client.push_from(where, loss=loss, samples=self._samples, rate_scale=scale)
        self._end_iteration()
        return result

    def _goes_on_with_wave(self) -> bool:
        """Counts a mini-batch of a wave; whether more of them are to come."""
        if self._own_data and not self._steps:
            self._wave = self.client.wave
        self._steps += 1
        if self._steps == self._wave:
            return False
        if self._free:
            raise UsageError(
                "free_gradients gives each gradient away at once; WSP adds up those of a wave: "
                "use the one or the other"
            )
        return True

    def _end_iteration(self) -> None:
        for products in self._products:
            products.clear()
        self._payload = 0
        self._steps = 0
        self._loss = float("nan")
        if self._own_data:
            self.client.wait_turn()
            self._pull()

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """Around zero_grad() to step(): ends early once the gradient is not wanted any more.

            with optimizer.iteration():
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()

        Cutoff goes on without stragglers. One is then stopped at the next module or gradient,
        inside the block, and goes on after it; its batch is handed out again. Without this block a
        straggler computes to the end, and its gradient is dropped.
        """
        if not self._watched:
            self._watched = True
            for module in self._model.modules():
                if not any(True for _ in module.children()):
                    hook = module.register_forward_pre_hook(lambda *_: self._check_wanted())
                    self._undo.append(hook.remove)
            for parameter in self._parameters.values():
                made = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _: self._check_wanted()
                )
                self._undo.append(made.remove)
        self._may_drop = self.client.drops
        try:
            yield
        except _NotWanted:
            self._may_drop = False
            self.client.give_up()
            self._end_iteration()
            self.zero_grad()
        finally:
            self._may_drop = False

    def _check_wanted(self) -> None:
        if self._may_drop and not self.client.wanted:
            raise _NotWanted

    _hooked_step = torch.optim.Optimizer.profile_hook_step(_push)

    def _addresses(self, kept: list[Any]) -> list[int]:
        """For Client.push_from. kept: takes copies that it had to make.

        Between backward() and this the caches hold the model, not the interpreter: each call of
        torch or NumPy takes microseconds, as long as it takes to copy thousands of values.
        """
        where: list[int] = []
        changes = self._changes() if self._buffers and self._gpu is None else {}
        for number, parameter in enumerate(self._ordered):
            if self._gpu is not None and not isinstance(parameter, torch.nn.Parameter):
                kept.append(parameter.contiguous())  # a buffer; the device counts its change
                where += whole_at(kept[-1].data_ptr())
            elif number in changes:
                kept.append(changes[number])
                where += whole_at(_native.address(changes[number]))
            elif not parameter.requires_grad:
                where += NONE
            elif products := self._products[number]:
                where += _product(parameter, products, kept)
            elif parameter.grad is not None:
                where += _where(parameter.grad, kept)
            else:
                where += NONE
        return where

    def _take(self, number: int) -> Callable[[torch.Tensor], None]:
        """What a parameter does with its gradient as soon as it is there."""

        def take(parameter: torch.Tensor) -> None:
            if parameter.grad is None or self._products[number]:
                return  # products are complete by now; step() adds the two
            if not self._payload:
                self._payload = self.client.claim() + layout.PAYLOAD_AT
                self._taken.clear()
            if number in self._taken:
                raise UsageError(SECOND)
            self._taken.add(number)
            kept: list[Any] = []
            self.client.append(self._payload, number, _where(parameter.grad, kept))
            parameter.grad = None

        return take

    def _changes(self) -> dict[int, np.ndarray]:
        """By how much buffers have changed, those that have, by number in the model."""
        found = {}
        for number, tensor in enumerate(self.client.model.tensors):
            if tensor.name in self._buffers:
                change = _change(_array(self._buffers[tensor.name]), self._bases[tensor.name])
                if change is not None:
                    found[number] = np.ascontiguousarray(change, np.float32)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that are set to None are neither cleared nor added to.

        In the middle of a wave it does nothing.
        """
        if self._steps:
            return None
        self._payload = 0
        for products in self._products:
            products.clear()
        if not set_to_none:
            return super().zero_grad(set_to_none=False)
        for parameter in self._parameters.values():
            parameter.grad = None
        return None

    def report(
        self, *, loss: float | torch.Tensor | None = None, samples: int | None = None
    ) -> None:
        """What the next step's gradient says of itself, for status and metrics."""
        if isinstance(loss, torch.Tensor) and self._is_there(loss):
            self._loss = loss.detach()  # not looked at, which would wait for the GPU
        elif loss is not None:
            self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if samples is not None:
            self._samples = samples

    def _is_there(self, loss: torch.Tensor) -> bool:
        return self._gpu is not None and torch_cuda.is_on_gpu(loss) and loss.numel() == 1

    def batches(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """Mini-batches that the server hands out; see Client.batches. One step() for each."""
        self._own_data = False
        try:
            for batch in self.client.batches(samples, batch_size, epochs, seed):
                self._pull()
                count = len(batch.indices)
                self._wave = -(-count // batch_size)
                for begin in range(0, count, batch_size):
                    self._samples = min(begin + batch_size, count)
                    steps = self._steps
                    yield batch._replace(indices=batch.indices[begin : begin + batch_size])
                    last = begin + batch_size >= count
                    if self.client.unanswered if last else self._steps != steps + 1:
                        raise UsageError("a batch was left without a step(): call it once for each")
        finally:
            self._own_data = True
            self._pull()

    def _pull(self) -> None:
        if self._gpu is not None:
            self._gpu.refresh()
        elif not self._view:
            self.client.pull(self._flat)
        if self._buffers:
            self._refresh_buffers()

    @torch.no_grad()
    def _refresh_buffers(self) -> None:
        """Goes on from the job's statistics; from them the next step's change is counted."""
        if self._gpu is not None:
            if self._buffers:  # one kernel for all
                theirs = [self._shared[name] for name in self._buffers]
                torch._foreach_copy_(list(self._buffers.values()), theirs)
            return
        shared = self.client.weights
        self._bases = {name: shared[name].copy() for name in self._buffers}
        for name, buffer in self._buffers.items():
            buffer.copy_(torch.from_numpy(self._bases[name]))

    def close(self) -> None:
        """Leaves the job; the model keeps the weights as they are now, in memory of its own."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        try:
            if self._gpu is not None:
                self._gpu.close()
            with torch.no_grad():
                for parameter in self._parameters.values():
                    parameter.data = parameter.data.clone()
                for tensor in self._ordered:
                    vars(tensor).pop(PRODUCTS, None)
            if self._gpu is not None:
                torch_cuda.flatten(self._model)
            self._refresh_buffers()
        finally:
            self._shared.clear()
            self.client.detach()


def _checked(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters to train. Raises UsageError for those that cannot be shared."""
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    if not parameters:
        raise UsageError("the model has no parameters that require a gradient")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32 or parameter.device.type not in ("cpu", "cuda"):
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype} on {parameter.device}: the weights of a "
                "job are float32, on the CPU or a CUDA device"
            )
    return parameters


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _change(now: np.ndarray, base: np.ndarray) -> np.ndarray | None:
    """By how much a buffer has changed; None if not at all. A mask may hold infinities."""
    same = now == base
    if same.all():
        return None
    with np.errstate(invalid="ignore"):
        return np.where(same, np.float32(0), now - base)


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As torch.nn.functional.linear, for a weight that an Optimizer pushes the gradient of.

    That gradient is a product, of the outputs' gradients and the inputs. For a small mini-batch, or
    where most outputs have none (after a maximum over positions), backward() leaves the product
    undone, `weight.grad` stays None, and step() works it out in the ring, row by row, where it is
    converted and checked too. So the gradient is written once and read by the server only.
    Poseidon (Zhang et al. 2017) and others send such factors for the same reason. So the inputs
    must not be changed before step(), and only the optimizer's zero_grad() forgets a backward().
    Under autocast, and for a weight of no Optimizer, it is torch's own. Once differentiable.
    """
    plain = inputs.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    if not plain or not torch.is_grad_enabled() or not hasattr(weight, PRODUCTS):
        return torch.nn.functional.linear(inputs, weight, bias)
    outputs: torch.Tensor = _Linear.apply(inputs, weight)  # type: ignore[no-untyped-call]
    return outputs if bias is None else outputs + bias


def _forward(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return linear(inputs, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(inputs)
        context.weight = weight  # a leaf: it outlives the graph
        return torch.nn.functional.linear(inputs, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        context: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (inputs,), weight = context.saved_tensors, context.weight
        factors = gradient.reshape(-1, weight.shape[0]).contiguous()
        vectors = inputs.reshape(-1, weight.shape[1])
        back = None
        sparse = _is_sparse(factors) and weight.is_contiguous()
        if context.needs_input_grad[0]:
            back = _times(factors, weight) if sparse else factors @ weight
            back = back.view(inputs.shape)
        if not context.needs_input_grad[1]:
            return back, None
        if hasattr(weight, PRODUCTS) and (sparse or len(factors) <= FEW_VECTORS):
            vectors = vectors.contiguous()
            getattr(weight, PRODUCTS).append((factors, vectors, vectors._version))
            return back, None
        return back, factors.t() @ vectors


def _is_sparse(factors: torch.Tensor) -> bool:
    """Whether most are zero: then row by row is faster than a product of matrices."""
    return _native.nonzeros(factors.data_ptr(), factors.numel()) * SPARSE <= factors.numel()


def _times(factors: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(factors), weight.shape[1])
    _native.sparse_product(
        out.data_ptr(), factors.data_ptr(), weight.data_ptr(), len(factors), *weight.shape
    )
    return out


def _product(weight: torch.Tensor, products: Products, kept: list[Any]) -> Where:
    """Where the factors of its gradient lie."""
    if any(vectors._version != version for _, vectors, version in products):
        raise UsageError(
            "the inputs of a linear layer were changed between backward() and step(), which needs "
            "them still: change a copy"
        )
    if weight.grad is not None:  # it has been used in another way, too
        whole = sum((one.t() @ two for one, two, _ in products), start=weight.grad)
        kept.append(whole)
        return _where(whole, kept)
    factors, vectors, _ = products[0]
    if len(products) > 1:
        factors = torch.cat([one for one, _, _ in products])
        vectors = torch.cat([two for _, two, _ in products])
        kept += (factors, vectors)
    return product_at(factors.data_ptr(), vectors.data_ptr(), len(factors))


def _where(gradient: torch.Tensor, kept: list[Any]) -> Where:
    """Where it lies, for Client.push_from, as long as it and `kept` live."""
    if gradient.dtype is not torch.float32:
        raise ModelMismatch(f"a gradient is {gradient.dtype}, not float32")
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        # As backward() left it: rows that a batch names twice are added up on their way.
        indices, values = gradient._indices().contiguous(), gradient._values().contiguous()
        kept += (indices, values)
        return rows_at(indices.data_ptr(), values.data_ptr(), indices.shape[1])
    if gradient.is_sparse:
        gradient = gradient.to_dense()
        kept.append(gradient)
    elif not gradient.is_contiguous():
        gradient = gradient.contiguous()
        kept.append(gradient)
    return whole_at(gradient.data_ptr())


def _tensor(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        # Torch warns that the memory is read-only; it is meant to be.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
