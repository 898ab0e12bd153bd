"""Weights of a learner on devices of its own, and gradients of a wave that add up there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from gadei_ps.memory.weights import FloatArray


class DeviceParameters:
    """Parameters on devices with a memory of their own; arrays of the host that they follow."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
        """Follow parameters. pairs: of each its array on the host, and itself."""
        self._pairs = pairs

    @property
    def ids(self) -> set[int]:
        return {id(parameter) for _, parameter in self._pairs}

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
    """The sums of several mini-batches' gradients.

    gradients: where they are wanted on the host, by name. elsewhere: ids of parameters whose sums
    stay on their device until bring().
    """

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
        """Move sums from devices to where they are wanted."""
        for wanted, total in self._far:
            wanted += total.to(wanted.device)
            total.zero_()
