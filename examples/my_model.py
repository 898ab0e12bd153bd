"""A model in layers, trained by a virtual worker: a pipeline of stages, one on each device.

gadei-ps partition my_model:layers --sample my_model:sample --devices host:1,host:1 --out plan.json
gadei-ps run demo --sync wsp:D=1,s_local=3 -- python my_model.py
"""

import itertools
import os

import torch
from torch import nn

BATCH = 64


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    sizes = [256, 1024, 1024, 512, 256]
    hidden = [
        one
        for before, after in itertools.pairwise(sizes)
        for one in (nn.Linear(before, after), nn.ReLU())
    ]
    return [*hidden, nn.Linear(sizes[-1], 2)]


# Each learner of a job has mini-batches of its own.
random = torch.Generator().manual_seed(int(os.environ.get("GADEI_PS_LEARNER", "0")))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 256, generator=random)
    return inputs, (inputs[:, :128].sum(dim=1) > inputs[:, 128:].sum(dim=1)).long()


def sample() -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    """A mini-batch as VirtualWorker.train takes it, for the planner."""
    return *batch(), nn.CrossEntropyLoss()


def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.001)


if __name__ == "__main__":
    from gadei_ps.learners.virtual import VirtualWorker

    criterion = nn.CrossEntropyLoss()
    with VirtualWorker(layers(), plan="plan.json", optimizer=make) as worker:
        for step in range(400):
            loss = worker.train(*batch(), criterion)
            if loss is not None and step % 100 == 99:
                print(f"mini-batch {step + 1}: loss {loss:.3f}", flush=True)
