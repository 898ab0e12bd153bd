"""A process of a peer whose death is measured: steps without a pause, each noted in a file.

    python -m gadei_ps.benchmarks.failover_member ddp FILE VALUES           (started by torchrun)
    python -m gadei_ps.benchmarks.failover_member torchft FILE VALUES MEMBER LIGHTHOUSE
    python -m gadei_ps.benchmarks.failover_member lighthouse FILE           (its address)

VALUES: of the model, float32. A step is a gradient of all of them, its mean over the processes by
gloo, and an update by SGD.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gadei_ps.benchmarks.failover_peers import LINE

LR = 1e-6


class Model(torch.nn.Module):
    """One parameter, whose gradient is a constant."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(values))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.w * factor).sum()


def _train(
    file: str,
    member: int,
    model: Any,
    optimizer: Any,
    reduce: Callable[[], object],
    counted: Callable[[], int],
) -> None:
    """Step for ever. reduce: after each gradient. counted: steps that count."""
    line = np.memmap(file, LINE, mode="r+")[member]
    line["steps"] = 0
    line["began"] = 0.0
    line["pid"] = os.getpid()
    before = 0
    factor = torch.tensor(1e-3)
    while True:
        began = time.monotonic()
        optimizer.zero_grad()
        model(factor).backward()
        reduce()
        optimizer.step()
        steps = counted()
        if steps > before:
            line["ended"], line["began"] = time.monotonic(), began
            line["steps"] += 1
        before = steps


def _ddp(file: str, values: int) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    model = torch.nn.parallel.DistributedDataParallel(Model(values))
    made = itertools.count(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    _train(file, torch.distributed.get_rank(), model, optimizer, lambda: None, lambda: next(made))


def _torchft(file: str, values: int, member: int, lighthouse: str) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    module = Model(values)
    sgd = torch.optim.SGD(module.parameters(), lr=LR)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"member_{member}",
        hostname="localhost",
    )

    def reduce() -> None:
        # Its DistributedDataParallel fails an assertion (0.2.0) when a peer's connection closes.
        assert module.w.grad is not None
        manager.allreduce(module.w.grad).wait()

    optimizer = OptimizerWrapper(manager, sgd)
    _train(file, member, module, optimizer, reduce, manager.current_step)


def _lighthouse(file: str) -> None:
    """Write its address into the file, and run until it is killed."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1)
    there = Path(f"{file}.new")
    there.write_text(server.address())
    there.rename(file)
    signal.pause()


def main() -> None:
    kind, file, *rest = sys.argv[1:]
    if kind == "lighthouse":
        _lighthouse(file)
        return
    values = int(rest[0])
    if kind == "ddp":
        _ddp(file, values)
    else:
        _torchft(file, values, int(rest[1]), rest[2])


if __name__ == "__main__":
    main()
