"""What a job costs in memory: shared segments by part, and the server's private memory over time.

    python benchmarks/memory.py [--megabytes 25] [--gradients 2000]

The limit is the model: weights, optimizer slots, and slots x model for each learner. Writes
results/memory.json.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
from common import table, write_results

from gadei_ps import segment
from gadei_ps.config import from_mapping
from gadei_ps.control import Status
from gadei_ps.daemon import Daemon
from gadei_ps.learners.client import Client

SAMPLES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=25)
    parser.add_argument("--gradients", type=int, default=2000)
    options = parser.parse_args()
    values = options.megabytes * 250_000
    name = f"memory-{os.getpid()}"
    config = from_mapping({"name": name, "optimizer": {"kind": "adam"}, "slots": 2}, "memory")
    private = []
    tensors = {"w": np.zeros(values, np.float32)}
    with Daemon(config) as daemon, Client(name, tensors=tensors) as client:
        sizes = {found.part: found.size for found in segment.find(name)}
        gradient = {"w": np.full(values, 1e-3, np.float32)}
        for _ in range(SAMPLES):
            for _ in range(options.gradients // SAMPLES):
                client.push(gradient)
            client.wait_applied()
            private.append(daemon.request(Status())["server_private_bytes"])
    model = 4 * values
    limit = {"weights": model, "state": 2 * model, "ring.0": 2 * model}
    rows = [
        {"contender": part, "bytes": size, "limit_bytes": limit.get(part), "unit": "bytes"}
        for part, size in sizes.items()
    ]
    rows += [
        {
            "contender": "server, private",
            "gradients": (i + 1) * options.gradients // SAMPLES,
            "bytes": value,
            "unit": "bytes",
        }
        for i, value in enumerate(private)
    ]
    ratios = [
        {"of": part, "to": "model", "ratio": sizes[part] / model} for part in limit if part in sizes
    ]
    ratios.append({"of": "private memory, last", "to": "first", "ratio": private[-1] / private[0]})
    lines = [
        [str(row["contender"]), str(row.get("gradients", "")), f"{row['bytes'] / 1e6:.2f}"]
        for row in rows
    ]
    print(table(["part", "after gradients", "MB"], lines))
    print(write_results("memory", rows, ratios))


if __name__ == "__main__":
    main()
