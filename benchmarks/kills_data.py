"""The task of `gadei-ps bench kills`: rows, labels and the network, equal in every process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FEATURES, WIDTH, CLASSES = 64, 512, 10
HELD_OUT = 1000  # rows
LR = 1 / 256  # a power of two, so that counts in the weights are exact


@dataclass(frozen=True)
class Rows:
    """Inputs and labels."""

    inputs: torch.Tensor
    labels: torch.Tensor


def rows(count: int, seed: int) -> Rows:
    """Return rows with the labels of a fixed random network."""
    of_task = torch.Generator().manual_seed(0)
    hidden = torch.randn(FEATURES, 32, generator=of_task) / FEATURES**0.5
    out = torch.randn(32, CLASSES, generator=of_task)
    inputs = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return Rows(inputs, ((2 * inputs @ hidden).tanh() @ out).argmax(dim=1))


class Network(torch.nn.Module):
    """Three layers, and one more parameter that counts how often each mini-batch was applied."""

    def __init__(self, mini_batches: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, CLASSES),
        )
        self.applied = torch.nn.Parameter(torch.zeros(mini_batches))

    def loss(self, rows: Rows) -> torch.Tensor:
        """Return the mean loss of these rows."""
        return torch.nn.functional.cross_entropy(self.layers(rows.inputs), rows.labels)
