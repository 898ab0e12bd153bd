"""The models of the benchmark of virtual workers: a tower of layers for each stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

LR = 1e-6  # so small that the weights hardly change


class _Waits(torch.autograd.Function):
    """Waits in the forward pass and in the backward pass, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward_s: float, backward_s: float) -> Any:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Waits(nn.Module):
    """Takes a given time for each pass, without a processor."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self._times = forward_s, backward_s

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = _Waits.apply(values, *self._times)  # type: ignore[no-untyped-call]
        return changed


@dataclass(frozen=True)
class Shape:
    """A model, and its mini-batches. Each stage has so many layers, Linear and ReLU of one width.

    waits: for each stage, seconds that it waits in a forward and in a backward pass besides.
    """

    stages: int
    width: int = 16
    layers: int = 1
    samples: int = 8
    waits: Sequence[Sequence[float]] = ()

    def tower(self, stage: int) -> nn.Sequential:
        """One stage. Its weights are the same in every process."""
        torch.manual_seed(stage)
        made: list[nn.Module] = []
        for _ in range(self.layers):
            made += [nn.Linear(self.width, self.width), nn.ReLU()]
        if self.waits:
            made.append(Waits(*self.waits[stage]))
        return nn.Sequential(*made)

    def towers(self) -> list[nn.Module]:
        """All stages."""
        return [self.tower(stage) for stage in range(self.stages)]

    def sample(self, mini_batches: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of so many mini-batches together, for a mean squared error."""
        source = torch.Generator().manual_seed(1)
        size = mini_batches * self.samples, self.width
        return torch.randn(size, generator=source), torch.randn(size, generator=source)

    def told(self) -> dict[str, Any]:
        """As keywords, for another process."""
        return asdict(self)

    def __str__(self) -> str:
        return f"width {self.width}, {self.layers} layers, mini-batch {self.samples}"
