"""Learner of `bench watching`: a small network, mini-batches of one sample, until the job ends."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from gadei_ps.errors import JobStopped
from gadei_ps.learners.torch import Optimizer

INPUTS, HIDDEN, CLASSES, ROWS = 784, 64, 10, 1000


def learn() -> None:
    """Train on random rows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    rows, classes = torch.randn(ROWS, INPUTS), torch.randint(CLASSES, (ROWS,))
    optimizer = Optimizer(model)
    number = 0
    while True:
        at = slice(number % ROWS, number % ROWS + 1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows[at]), classes[at])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.report(loss=loss.detach(), samples=1)
        optimizer.step()
        number += 1


if __name__ == "__main__":
    with contextlib.suppress(JobStopped):
        learn()
