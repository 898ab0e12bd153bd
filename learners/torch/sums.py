"""Gradients of a wave, added up on the devices that compute them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from gadei_ps.memory.weights import FloatArray


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
        """Adds the gradients that the parameters have now."""
        for parameter, total in self._sums:
            if parameter.grad is not None:
                total += parameter.grad

    def bring(self) -> None:
        """Moves sums from devices to where they are wanted."""
        for wanted, total in self._far:
            wanted += total.to(wanted.device)
            total.zero_()
