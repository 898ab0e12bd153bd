"""PyTorch on a GPU: where an Optimizer's model has its weights, and how they come and go.

The parameters are views of one buffer, made by CuPy and shared through DLPack. They stay where they
are: CUDA graphs and compiled code keep addresses. So one of the two buffers is always theirs; what
has arrived in the other one is copied over between two steps, on the device, where that takes a few
hundredths of the time of its way over the bus.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gadei_ps.errors import DeviceError, UsageError
from gadei_ps.learners.client import Client
from gadei_ps.machine.cuda import missing as cuda_missing

GATHERED = "_gadei_ps_gathered"
"""Attribute of a weight of which rows are read from the segment: what reads them."""

Gather = Callable[[torch.Tensor], torch.Tensor]


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


class Shared:
    """A model's weights on the GPU that it computes on."""

    def __init__(self, client: Client, device: torch.device) -> None:
        if why := cuda_missing():
            raise DeviceError(f"the model is on {device}: {why}")
        from gadei_ps.learners.cuda import Cuda

        self._client = client
        stream = functools.partial(_current_stream, device)
        self._link = Cuda(device.index).link(client, stream)
        self._front, self._back = self._link.buffer(), self._link.buffer()
        self._views = self._link.views(self._front)
        self._gathered: set[str] = set()
        self._whole: set[str] = set()  # tensors that are looked up in and used in another way, too
        self._link.count_buffers_from(self._front)
        self._link.fill(self._front)
        self._version = self._link.version

    def tensors(self, together: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
        """Each tensor of the model, on the device: always the same memory.

        together: names of tensors that shall be views of one storage, which begins with the first.
        """
        found = {name: torch.utils.dlpack.from_dlpack(view) for name, view in self._views.items()}
        places = {tensor.name: tensor for tensor in self._client.model.tensors}
        for names in together:
            members = [places[name] for name in names]
            begin = end = members[0].start
            for tensor in members:
                end = tensor.start + tensor.count if tensor.start == end else -1
            if end < 0:
                continue  # gaps, or the learner that made the model had them in another order
            part = self._front[begin:end]
            storage = torch.utils.dlpack.from_dlpack(part)
            for tensor in members:
                at = tensor.start - begin
                found[tensor.name] = storage[at : at + tensor.count].view(tensor.shape)
        return found

    def push(
        self, where: Sequence[int], kept: list[Any], loss: float | torch.Tensor, **facts: Any
    ) -> None:
        """where: as Client.push_from takes it, addresses on the device.

        loss: read behind the gradient, so that nobody waits for it.
        """
        if isinstance(loss, torch.Tensor):
            value = loss.detach().to(torch.float32)
            kept.append(value)
            facts["loss_at"] = value.data_ptr()
        else:
            facts["loss"] = loss
        if self._gathered:
            self._bring_back(where)
        self._link.push_from(where, version=self._version, kept=kept, **facts)

    def _bring_back(self, where: Sequence[int]) -> None:
        """Who gets a gradient that is none of rows has been used as a whole: a tied weight."""
        for number, tensor in enumerate(self._client.model.tensors):
            values, indices = where[4 * number : 4 * number + 2]
            if values and not indices and tensor.name in self._gathered:
                self._gathered.remove(tensor.name)
                self._whole.add(tensor.name)
                self._link.leave_out(self._gathered)

    def flush(self) -> None:
        self._link.flush()

    def refresh(self) -> None:
        """New weights for the next step: those that have arrived, or, where learners wait for one
        another, those of now."""
        if self._client.waits_for_others:
            self._link.fill(self._front)
            self._version = self._link.version
            return
        if self._link.pulled():
            self._link.copy(self._back, self._front)
            self._version = self._link.version
        self._link.pull(self._back)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor as they are in the job now, shape (n, width); indices: int64, flat.

        From now on pulls leave the tensor out, unless it is found to be used as a whole, too.
        """
        if name not in self._gathered and name not in self._whole:
            self._gathered.add(name)
            self._link.leave_out(self._gathered)
        whole = self._views[name]
        rows = torch.empty(
            len(indices), whole.size // len(whole), dtype=torch.float32, device=indices.device
        )
        self._link.gather(name, indices.data_ptr(), len(indices), rows.data_ptr())
        return rows

    def close(self) -> None:
        """Brings all weights, those of gathered tensors too, as they are now."""
        self._link.flush()
        self._link.leave_out(())
        self._link.fill(self._front)
        self._link.close()


def _current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    *,
    sparse: bool = True,
) -> torch.Tensor:
    """As torch.nn.functional.embedding, for a weight that an Optimizer pushes the gradient of.

    On a GPU with sparse=True, rows are read straight from the job's memory, and pulls leave the
    tensor out: a mini-batch needs a few of a vocabulary's rows. The weight itself is not kept
    current on the device then; use it in no other way.
    """
    gather: Gather | None = getattr(weight, GATHERED, None)
    if gather is not None and indices.device != weight.device:
        raise UsageError(f"indices on {indices.device} into an embedding on {weight.device}")
    if gather is None or not sparse:
        return torch.nn.functional.embedding(indices, weight, padding_idx, sparse=sparse)
    rows: torch.Tensor = _Gathered.apply(indices, weight, padding_idx, gather)  # type: ignore[no-untyped-call]
    return rows


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        indices: torch.Tensor,
        weight: torch.Tensor,
        padding_idx: int | None,
        gather: Gather,
    ) -> torch.Tensor:
        flat = indices.reshape(-1).to(torch.int64).contiguous()
        context.save_for_backward(flat)
        context.shape = weight.shape
        context.padding_idx = padding_idx
        return gather(flat).view(*indices.shape, *weight.shape[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        context: Any, gradient: torch.Tensor
    ) -> tuple[None, torch.Tensor | None, None, None]:
        (flat,) = context.saved_tensors
        values = gradient.reshape(len(flat), *context.shape[1:])
        if context.padding_idx is not None:
            padding = flat == context.padding_idx % context.shape[0]
            values = values.masked_fill(padding.view(-1, *[1] * (values.dim() - 1)), 0)
        # Its numbers are checked where it is pushed; looking at them here would wait for the GPU.
        return (
            None,
            torch.sparse_coo_tensor(flat[None], values, context.shape, check_invariants=False),
            None,
            None,
        )


def recurrent(
    model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]
) -> list[list[str]]:
    """Names of the parameters of each recurrent layer as cuDNN wants them, one after the other:
    all matrices, then all biases. Elsewhere it copies them in every call."""
    found = []
    for prefix, module in model.named_modules():
        if isinstance(module, torch.nn.RNNBase):
            names = [
                f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()
            ]
            known = [name for name in names if name in parameters]
            found.append(sorted(known, key=lambda name: parameters[name].dim() < 2))
    return [names for names in found if names]


def ordered(
    model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.nn.Parameter]:
    """The parameters as they are to lie in memory."""
    group_of = {name: names for names in recurrent(model, parameters) for name in names}
    order: dict[str, torch.nn.Parameter] = {}
    for name in parameters:
        for member in group_of.get(name, [name]):
            order.setdefault(member, parameters[member])
    return order


def adapt(
    model: torch.nn.Module, shared: Shared, parameters: Mapping[str, torch.nn.Parameter]
) -> Iterator[Callable[[], None]]:
    """Makes layers fit for shared weights; yields what undoes it.

    embedding() and layers made with sparse=True read rows. Recurrent layers leave their weights
    where they are: flatten_parameters() would move them into memory of their own.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters = _leave  # type: ignore[method-assign]
            yield functools.partial(delattr, module, "flatten_parameters")
    for name, parameter in parameters.items():
        if parameter.dim() > 1:
            setattr(parameter, GATHERED, functools.partial(shared.gather, name))
            yield functools.partial(delattr, parameter, GATHERED)
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for module in model.modules():
        if type(module) is not torch.nn.Embedding or not module.sparse:
            continue
        alone = users[id(module.weight)] == 1 and module.max_norm is None
        if alone and hasattr(module.weight, GATHERED):
            module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]
            yield functools.partial(delattr, module, "forward")


def flatten(model: torch.nn.Module) -> None:
    """Puts the weights of recurrent layers, which are their own again, into one piece."""
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()


def _leave() -> None:
    pass


def _forward(layer: torch.nn.Embedding, indices: torch.Tensor) -> torch.Tensor:
    return embedding(indices, layer.weight, layer.padding_idx)


def device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """Where a model computes. Raises UsageError if it is in several places."""
    found = {tensor.device for tensor in tensors.values()}
    if len(found) > 1:
        places = " and ".join(sorted(map(str, found)))
        raise UsageError(f"the model's parameters are on {places}: bring all to one (model.to)")
    return found.pop()
