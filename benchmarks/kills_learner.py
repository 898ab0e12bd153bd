"""A learner of `gadei-ps bench kills`: answers mini-batches until all epochs are done.

python -m gadei_ps.benchmarks.kills_learner JOB ROWS MINI_BATCH EPOCHS THREADS
"""

from __future__ import annotations

import sys

import torch

import gadei_ps.learners.torch
from gadei_ps.benchmarks.kills_data import LR, Network, Rows, rows
from gadei_ps.errors import JobStopped


def main() -> None:
    """Train, and add one to the count of each mini-batch, in its gradient."""
    job = sys.argv[1]
    count, size, epochs, threads = map(int, sys.argv[2:])
    torch.set_num_threads(threads)
    data = rows(count, seed=1)
    model = Network(count // size)
    optimizer = gadei_ps.learners.torch.Optimizer(model, job=job, kind="sgd", lr=LR)
    for batch in optimizer.batches(samples=count, batch_size=size, epochs=epochs):
        chosen = torch.from_numpy(batch.indices)
        loss = model.loss(Rows(data.inputs[chosen], data.labels[chosen]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        model.applied.grad = torch.zeros(count // size)
        model.applied.grad[batch.index] = -1 / LR
        optimizer.report(loss=loss)
        optimizer.step()


if __name__ == "__main__":
    try:
        main()
    except JobStopped:
        sys.exit("the job was stopped")
