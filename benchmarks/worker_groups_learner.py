"""A learner of `bench worker_groups`: python -m gadei_ps.benchmarks.worker_groups_learner TASK ...

Two more arguments: seconds, and a seed. It waits so long in each iteration, as if the gradient took
longer: the machines share the cores of one host.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import numpy as np
import torch

from gadei_ps.benchmarks import worker_groups_tasks as tasks
from gadei_ps.errors import JobStopped
from gadei_ps.learners.torch import Optimizer


def learn(name: str, wait_s: float, seed: int) -> None:
    """Learn until the job ends."""
    torch.set_num_threads(1)
    found = tasks.Examples(name)
    model = tasks.model(name, found, seed)
    optimizer = Optimizer(model)
    who = [seed, int(os.environ.get("GADEI_PS_MACHINE", 0)), optimizer.client.generation]
    random = np.random.default_rng(who)
    torch.manual_seed(int(random.integers(2**31)))  # of dropout
    batch = tasks.TASKS[name].batch
    model.train()
    while True:
        optimizer.zero_grad()
        loss = found.loss(model, random)
        loss.backward()  # type: ignore[no-untyped-call]
        time.sleep(wait_s)
        optimizer.report(loss=loss.detach(), samples=batch)
        optimizer.step()


def main() -> None:
    with contextlib.suppress(JobStopped):
        learn(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
