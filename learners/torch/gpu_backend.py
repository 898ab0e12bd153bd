"""A model on a GPU: its parameters are views of one buffer on the device.

CuPy makes the buffer; torch shares it through DLPack. The parameters keep their addresses, because
CUDA graphs and compiled code do. So the model always uses the front one of two buffers. A pull
fills the back one, which is copied to the front in step() or before the next batch, on the device,
in a few hundredths of the time that the pull takes on the bus. Parameters of other types than
float32 keep their memory on the device, into which the front buffer is cast.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from gadei_ps import _native
from gadei_ps.errors import DeviceError, UsageError
from gadei_ps.learners.client import Client, Where
from gadei_ps.learners.torch import casts, lookup
from gadei_ps.learners.torch.backend import (
    Backend,
    Places,
    own_copy,
    wait_for_last,
    wait_for_own,
)
from gadei_ps.learners.torch.model import Trained, recurrent
from gadei_ps.machine.cuda import missing as cuda_missing


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def current_stream(index: int) -> int:
    """Return CUDA's handle of the stream on which torch computes. index: of the device."""
    return int(torch.cuda.current_stream(index).cuda_stream)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on torch's current stream."""
    return torch.version.cuda is not None and torch.cuda.is_current_stream_capturing()


class GpuBackend(Backend):
    """See Backend. Raises DeviceError if the GPU cannot be used."""

    def __init__(
        self, client: Client, trained: Trained, *, wait: bool = False, skip_unused: bool = True
    ) -> None:
        if why := cuda_missing():
            raise DeviceError(f"the model is on {trained.device}: {why}")
        from gadei_ps.learners.cuda import Cuda

        super().__init__(client, trained, wait=wait, skip_unused=skip_unused)
        stream = functools.partial(current_stream, trained.device.index)
        self._link = Cuda(trained.device.index).link(client, stream)
        self._front, self._back = self._link.buffer(), self._link.buffer()
        self._views = client.model.gradients(self._front)
        self._gathered: set[str] = set()
        """Tensors that pulls leave out, because only their rows are read."""
        self._whole: set[str] = set()
        """Tensors whose rows are read and which are also used as a whole."""
        self._link.fill(self._front)
        self._is_own = False
        """Whether the script may write to the parameters."""
        self._tensors = self._torch_views()
        self._undo = contextlib.ExitStack()
        for layer in trained.module.modules():
            if isinstance(layer, torch.nn.RNNBase) and not casts.all_differ(layer):
                # Torch's own would move the weights to memory that no pull reaches.
                layer.flatten_parameters = _do_nothing  # type: ignore[method-assign]
                self._undo.callback(delattr, layer, "flatten_parameters")
        asides = zip(self._ordered, self._aside, strict=True)
        given = {tensor: aside for tensor, aside in asides if tensor is not None}
        lookup.adapt(trained, self._read_rows, given, self._undo)
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, parameter in trained.parameters.items():
            if casts.differs(parameter):
                self._casts.append((parameter, self._tensors[name]))
            else:
                parameter.data = self._tensors[name]
        casts.copy_to_parameters(self._casts)
        self._places = Places(trained)

    @property
    def version(self) -> int:
        """Version of the weights that the model computes with."""
        return self._link.current

    def _torch_views(self) -> dict[str, torch.Tensor]:
        """Return each tensor of the model in the front buffer.

        Those of a recurrent layer are views of one storage, which begins with the first of them.
        """
        found = {name: torch.utils.dlpack.from_dlpack(view) for name, view in self._views.items()}
        tensors = {tensor.name: tensor for tensor in self._client.model.tensors}
        for names in recurrent(self._trained.module, self._trained.parameters):
            members = [tensors[name] for name in names]
            begin = end = members[0].start
            for tensor in members:
                end = tensor.start + tensor.count if tensor.start == end else -1
            if end < 0:
                continue  # gaps, or the learner that made the model has another order
            storage = torch.utils.dlpack.from_dlpack(self._front[begin:end])
            for tensor in members:
                at = tensor.start - begin
                found[tensor.name] = storage[at : at + tensor.count].view(tensor.shape)
        return found

    # -- push -----------------------------------------------------------------------------------

    def _address_aside(self, tensor: torch.Tensor, aside: list[Any], kept: list[Any]) -> Where:
        return lookup.rows_of(tensor, aside, kept)

    def loss(self, loss: torch.Tensor) -> float | torch.Tensor:
        if loss.device == self._trained.device and loss.numel() == 1:
            return loss.detach()
        return float(loss.detach())

    def push(self, loss: float | torch.Tensor, *, samples: int, rate_scale: _native.Scales) -> None:
        if is_capturing():
            raise UsageError("a CUDA graph cannot contain step(): capture forward and backward")
        kept: list[Any] = []
        where = self._addresses(kept)
        facts: dict[str, Any] = {"samples": samples, "rate_scale": rate_scale}
        if isinstance(loss, torch.Tensor):
            # Read behind the gradient, in the order of the stream: nothing waits for it.
            value = loss if loss.dtype is torch.float32 else loss.to(torch.float32)
            kept.append(value)
            facts["loss_at"] = value.data_ptr()
        else:
            facts["loss"] = loss
        if self._gathered:
            self._find_whole(where)
        # Not over what the script writes; and parameters of several types change in refresh().
        refresh = None if self._is_own or self._casts else (self._back, self._front)
        self._link.push_from(where, version=self.version, kept=kept, refresh=refresh, **facts)
        if self._client.waits_for_others or self._wait:
            self._link.flush()

    def _find_whole(self, where: Sequence[int]) -> None:
        """Include tied weights in pulls: gathered tensors whose gradient is not one of rows."""
        for name in tuple(self._gathered):
            number = self._link.tensor_numbers[name]
            values, indices = where[4 * number : 4 * number + 2]
            if values and not indices:
                self._gathered.remove(name)
                self._whole.add(name)
                self._link.leave_out(self._gathered)

    # -- pull -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take the current weights if learners wait for one another, or this one for its gradient;
        else those that have arrived."""
        if self._wait:
            wait_for_own(self._client)
        if self._client.waits_for_others or self._wait:
            self._link.fill(self._front)
        else:
            self._link.refresh(self._back, self._front)
        casts.copy_to_parameters(self._casts)

    def assigned(self) -> None:
        self.follow()

    def own(self) -> None:
        """The parameters are a copy on the device, which the script may write to."""
        self._is_own = True

    def written(self) -> dict[str, torch.Tensor]:
        return self._places.given(self._client)

    def follow(self) -> None:
        for name, parameter in self._trained.parameters.items():
            if not casts.differs(parameter):
                parameter.data = self._tensors[name]
        self._places.note()
        self._is_own = False
        self._link.fill(self._front)
        casts.copy_to_parameters(self._casts)

    def _read_rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        """Call _gather(), which torch.compile does not trace."""
        if not torch.compiler.is_compiling():
            return self._gather(name, indices)
        # Not made before: this loads torch._dynamo, which takes seconds of a learner's start. Nor
        # kept: torch's tracer would take the first model's for the next one's.
        return torch.compiler.disable(self._gather)(name, indices)  # type: ignore[no-any-return, no-untyped-call]

    def _gather(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        """Read the job's current rows of a tensor. indices: int64 or int32, contiguous.

        From then on pulls leave the tensor out, unless it is found to be used as a whole as well.
        """
        if name not in self._gathered and name not in self._whole:
            self._gathered.add(name)
            self._link.leave_out(self._gathered)
        shape = (*indices.shape, *self._views[name].shape[1:])
        rows = torch.empty(shape, dtype=torch.float32, device=indices.device)
        narrow = indices.dtype is torch.int32
        self._link.gather(name, indices.data_ptr(), indices.numel(), rows.data_ptr(), narrow=narrow)
        return rows

    def close(self, *, keep: bool) -> None:
        self._undo.close()
        if not self._tensors:
            return
        self._link.flush()
        self._link.leave_out(())
        if not keep:
            wait_for_last(self._client)
            self._link.fill(self._front)
            casts.copy_to_parameters(self._casts)
        self._link.close()
        for parameter in self._trained.parameters.values():
            parameter.data = own_copy(parameter)
        for layer in self._trained.module.modules():
            if isinstance(layer, torch.nn.RNNBase) and not casts.all_differ(layer):
                layer.flatten_parameters()
        self._places.note()
        self._tensors.clear()


def _do_nothing() -> None:
    pass
