"""A learner of gadei-ps that pushes as fast as it can, for benchmarks."""

from __future__ import annotations

import time

import numpy as np

from gadei_ps.benchmarks.peers import answer, gradient, orders
from gadei_ps.learners.client import Client


def main() -> None:
    """Order {"job"}: attach to it. {"times", "copy"}: push `times` times; copy: pull by a copy."""
    client: Client | None = None
    for order in orders():
        if "job" in order:
            if client is not None:
                client.detach()
            client = Client(order["job"]) if order["job"] else None
            if client is not None:
                pushed = gradient(client.model.elements)
                out = np.zeros(client.model.elements, np.float32)
            answer({})
        else:
            assert client is not None
            begin = time.perf_counter()
            for _ in range(order["times"]):
                client.push(pushed)
                if order["copy"]:
                    client.pull(out)
            client.wait_applied()
            answer({"begin": begin, "end": time.perf_counter()})
    if client is not None:
        client.detach()


if __name__ == "__main__":
    main()
