"""Activations that a model's layers pass on and hold, and where it must not be cut; of one forward
pass.

The pass runs on the CPU, where the layers are. Memory is counted by storages, so that a tensor that
several layers keep counts once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch.model import Trained
from gadei_ps.learners.virtual.partition import Activation, Chain, Piece
from gadei_ps.learners.virtual.stages import LossFunction, check_loss


def analyze(
    trained: Trained,
    inputs: torch.Tensor,
    targets: Any,
    loss_function: LossFunction,
    state: Mapping[str, int],
) -> Chain:
    """Return the pieces of a model that is an nn.Sequential, and the memory that they take.

    There is no cut between layers that share a parameter, before a layer that works in place, and
    behind one that does not return a tensor. state: bytes of the optimizer for each parameter.
    Raises UsageError for what a layer or the loss function raises, and for inputs and losses of
    another type.
    """
    if not isinstance(inputs, torch.Tensor) or not inputs.dim() or not len(inputs):
        raise UsageError("the sample's inputs: give a tensor with the samples along its first axis")
    layers = list(cast(torch.nn.Sequential, trained.module))  # one that comes twice, twice
    run = _Pass(trained, layers)
    outputs = run.forward(inputs)
    run.loss(outputs, targets, loss_function)
    uncut = run.uncut | _sharing(layers)
    firsts = [0, *(at for at in range(1, len(layers)) if at not in uncut)]
    names = {id(one): name for name, one in trained.parameters.items()}
    pieces = []
    for first, end in itertools.pairwise([*firsts, len(layers)]):
        module = torch.nn.ModuleList(layers[first:end])
        own = {id(one): one for one in module.parameters()}
        weights = [one for one in own.values() if one.requires_grad]
        others = [one for one in own.values() if not one.requires_grad]
        pieces.append(
            Piece(
                first,
                end,
                weights=sum(one.nbytes for one in weights),
                fixed=sum(one.nbytes for one in (*others, *module.buffers())),
                state=sum(state.get(names[id(one)], 0) for one in weights),
                entering=_bytes(run.entering[first]),
                returns=first > 0 and run.entering[first].requires_grad,
            )
        )
    return Chain(tuple(pieces), run.held(firsts), _bytes(outputs))


class _Pass:
    """One forward pass, with a look at all storages."""

    def __init__(self, trained: Trained, layers: Sequence[torch.nn.Module]) -> None:
        self._layers = layers
        module = trained.module
        self._lasting = {_storage(one) for one in (*module.parameters(), *module.buffers())}
        self._sizes: dict[int, int] = {}
        self._alive: list[Any] = []  # the address of a storage that is gone may be another's
        self._saved: list[set[int]] = [set() for _ in layers]
        self.entering: list[Any] = []
        """Input of each layer."""
        self.uncut: set[int] = set()
        """Layers that stay with the one before."""

    def forward(self, inputs: torch.Tensor) -> Any:
        """Return what the last layer returns."""
        given: Any = inputs.detach().clone()  # a part of a larger tensor would count as a whole
        versions: list[int | None] = []
        for number, layer in enumerate(self._layers):
            self.entering.append(given)
            is_tensor = isinstance(given, torch.Tensor)
            versions.append(given._version if is_tensor else None)
            if not is_tensor:
                self.uncut.add(number)
            try:
                with self._saving(number):
                    given = layer(given)
            except Exception as error:
                before = self.entering[-1]
                kind = (
                    f"tensor of shape {tuple(before.shape)}" if is_tensor else type(before).__name__
                )
                raise UsageError(
                    f"{label(layer, number, number + 1)}, given a {kind}: {problem(error)}"
                ) from None
            for at, (one, was) in enumerate(zip(self.entering, versions, strict=True)):
                if was is not None and one._version != was:  # changed in place
                    self.uncut.add(at)
                    versions[at] = one._version
        return given

    def loss(self, outputs: Any, targets: Any, loss_function: LossFunction) -> None:
        """Compute the loss; what the loss function saves is the last layer's."""
        if isinstance(targets, torch.Tensor):
            targets = targets.detach().clone()
        try:
            with self._saving(len(self._layers) - 1):
                loss = loss_function(outputs, targets)
        except Exception as error:
            raise UsageError(f"the sample's loss function: {problem(error)}") from None
        check_loss("the sample's loss function", loss)

    def _saving(self, layer: int) -> torch.autograd.graph.saved_tensors_hooks:
        def keep(tensor: torch.Tensor) -> None:
            at = self._seen(tensor)
            if at not in self._lasting:
                self._saved[layer].add(at)

        return torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept)

    def _seen(self, tensor: torch.Tensor) -> int:
        at = _storage(tensor)
        self._sizes[at] = tensor.untyped_storage().nbytes()
        self._alive.append(tensor.untyped_storage())
        return at

    def held(self, firsts: Sequence[int]) -> tuple[Activation, ...]:
        """Return all storages. firsts: the first layer of each piece."""
        pieces: dict[int, set[int]] = {}
        borders: dict[int, set[int]] = {}
        for piece, (first, end) in enumerate(itertools.pairwise([*firsts, len(self._layers)])):
            for saved in self._saved[first:end]:
                for at in saved:
                    pieces.setdefault(at, set()).add(piece)
            at = self._seen(self.entering[first])
            if at not in self._lasting:
                borders.setdefault(at, set()).add(piece)
        return tuple(
            Activation(size, frozenset(pieces.get(at, ())), frozenset(borders.get(at, ())))
            for at, size in self._sizes.items()
            if size and (at in pieces or at in borders)
        )


def _sharing(layers: Sequence[torch.nn.Module]) -> set[int]:
    """Return layers from which on a parameter is used that an earlier layer uses too."""
    users: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        for one in layer.parameters():
            users.setdefault(id(one), []).append(number)
    return {at for those in users.values() for at in range(those[0] + 1, those[-1] + 1)}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def label(module: torch.nn.Module, first: int, end: int) -> str:
    """Return `layer 3 (Linear)` or `layers 3 to 5`."""
    if end - first > 1:
        return f"layers {first} to {end - 1}"
    inner = module[0] if isinstance(module, torch.nn.Sequential) and len(module) == 1 else module
    return f"layer {first} ({type(inner).__name__})"


def problem(error: BaseException) -> str:
    """Return what is wrong, in one line."""
    line = " ".join(str(error).split("\n")[0].split())
    return line if isinstance(error, UsageError) or line else type(error).__name__
