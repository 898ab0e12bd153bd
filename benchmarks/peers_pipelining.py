"""A pipeline by torch.distributed.pipelining with gloo, one process for each stage.

python -m gadei_ps.benchmarks.peers_pipelining RANK STAGES FILE. The ranks find each other by FILE.

As its documentation has it: a mini-batch is cut into micro-batches, `schedule.step()` takes them
through all stages and back, and the optimizer steps when the pipeline has run empty.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from gadei_ps.benchmarks import virtual_layers as layers
from gadei_ps.benchmarks.peers import answer, orders
from gadei_ps.benchmarks.virtual_shape import Shape

SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class Rank:
    """One stage, with its optimizer."""

    def __init__(self, rank: int, shape: Shape, schedule: str, micro_batches: int) -> None:
        tower = layers.tower(shape, rank)
        stage = PipelineStage(tower, rank, shape.stages, torch.device("cpu"))
        self._schedule = SCHEDULES[schedule](
            stage, n_microbatches=micro_batches, loss_fn=functional.mse_loss
        )
        self._optimizer = torch.optim.SGD(tower.parameters(), layers.LR)
        inputs, targets = layers.sample(shape, micro_batches)
        self._inputs = (inputs,) if rank == 0 else ()
        self._targets = {"target": targets} if rank == shape.stages - 1 else {}

    def step(self) -> None:
        """Train on one mini-batch."""
        self._optimizer.zero_grad()
        self._schedule.step(*self._inputs, **self._targets, return_outputs=False)
        self._optimizer.step()


def main() -> None:
    """Order {"schedule", "micro_batches", "shape", "times"}: trains on `times` mini-batches."""
    rank, stages = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=stages
    )
    for order in orders():
        shape = Shape(**order["shape"])
        side = Rank(rank, shape, order["schedule"], order["micro_batches"])
        side.step()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(order["times"]):
            side.step()
        answer({"begin": begin, "end": time.perf_counter()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
