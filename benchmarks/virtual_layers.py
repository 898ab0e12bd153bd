"""The models of the benchmark of virtual workers: a tower of layers for each stage."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from gadei_ps.benchmarks.virtual_shape import Shape

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


def tower(shape: Shape, stage: int) -> nn.Sequential:
    """One stage. Its weights are the same in every process."""
    torch.manual_seed(stage)
    made: list[nn.Module] = []
    for _ in range(shape.layers):
        made += [nn.Linear(shape.width, shape.width), nn.ReLU()]
    if shape.waits:
        made.append(Waits(*shape.waits[stage]))
    return nn.Sequential(*made)


def towers(shape: Shape) -> list[nn.Module]:
    """All stages."""
    return [tower(shape, stage) for stage in range(shape.stages)]


def sample(shape: Shape, mini_batches: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of so many mini-batches together, for a mean squared error."""
    source = torch.Generator().manual_seed(1)
    size = mini_batches * shape.samples, shape.width
    return torch.randn(size, generator=source), torch.randn(size, generator=source)
