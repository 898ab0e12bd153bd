"""A member of a gloo group: the mean of all models by torch.distributed's all-reduce.

python -m gadei_ps.benchmarks.peers_all_reduce RANK MEMBERS FILE. The ranks find each other by FILE.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from gadei_ps.benchmarks.peers import answer, orders


def main() -> None:
    """Order {"bytes", "times"}: aggregates a model of this size, in place, `times` times."""
    rank, members = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=members
    )
    model = torch.empty(0)
    for order in orders():
        if model.numel() != order["bytes"] // 4:
            model = torch.full((order["bytes"] // 4,), 1e-3 * rank)
        for number in range(order["times"] + 1):
            if number == 1:
                dist.barrier()
                begin = time.perf_counter()
            dist.all_reduce(model)
            model /= members
        answer({"begin": begin, "end": time.perf_counter()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
