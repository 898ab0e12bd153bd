"""Programs whose start is measured: each notes when its first gradient is in the weights.

    python -m gadei_ps.benchmarks.start_learner KIND FILE

KIND: `numpy` and `torch` are learners of a job, `hogwild` is a program of PyTorch alone, after its
examples/mnist_hogwild. The model has 1,000 values.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

VALUES = 1000
LR = 0.01


def _note(file: str) -> None:
    """Write down the time, in seconds of the clock that all processes share."""
    Path(file).write_text(repr(time.monotonic()))


def _numpy(file: str) -> None:
    import numpy as np

    from gadei_ps.learners.client import Client

    with Client(tensors={"w": np.zeros(VALUES)}, optimizer={"kind": "sgd", "lr": LR}) as client:
        client.push({"w": np.ones(VALUES, np.float32)})
        client.wait_applied()
        _note(file)


def _torch(file: str) -> None:
    import torch

    from gadei_ps.learners.torch import Optimizer

    model = torch.nn.Linear(VALUES - 1, 1)
    optimizer = Optimizer(model, kind="sgd", lr=LR, wait=True)
    model(torch.ones(VALUES - 1)).sum().backward()
    optimizer.step()
    _note(file)


def _hogwild(file: str) -> None:
    import torch

    model = torch.nn.Linear(VALUES - 1, 1)
    model.share_memory()
    process = torch.multiprocessing.get_context("spawn").Process(target=_train, args=(model, file))
    process.start()
    process.join()
    sys.exit(process.exitcode)


def _train(model: Any, file: str) -> None:
    """Hogwild's process: one step on the weights that it shares."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model(torch.ones(VALUES - 1)).sum().backward()
    optimizer.step()
    _note(file)


def main() -> None:
    {"numpy": _numpy, "torch": _torch, "hogwild": _hogwild}[sys.argv[1]](sys.argv[2])


if __name__ == "__main__":
    main()
