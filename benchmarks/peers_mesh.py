"""A member of a group of gadei-ps: aggregates a model with the others, again and again.

python -m gadei_ps.benchmarks.peers_mesh NUMBER
"""

from __future__ import annotations

import sys
import time

import numpy as np

from gadei_ps.agents.handshake import Identity
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.mesh import Mesh
from gadei_ps.benchmarks.peers import answer, orders

IDENTITY = Identity("bench", b"only for figures")
SILENCE_S = 30.0


def main() -> None:
    """Order {}: where it listens. Order {"addresses", "bytes", "generation"}: joins the others.
    Order {"times"}: aggregates, and says what it took.
    """
    number = int(sys.argv[1])
    door = Listener(("127.0.0.1", 0), IDENTITY)
    # While contenders start, members that share two cores may be silent for seconds.
    mesh = Mesh(door, number, silence_s=SILENCE_S)
    values = out = np.empty(0, np.float32)
    done = 0
    for order in orders():
        if "addresses" in order:
            count = order["bytes"] // 4
            addresses = {i: (host, port) for i, (host, port) in enumerate(order["addresses"])}
            mesh.join(order["generation"], addresses, count, timeout_s=30)
            values = np.full(count, 1e-3 * number, np.float32)
            out = np.zeros(count, np.float32)
            answer({})
        elif "times" in order:
            mesh.aggregate(done, values, out)  # all begin together after it
            sent, calls = mesh.sent_bytes, mesh.calls
            begin = time.perf_counter()
            for _ in range(order["times"]):
                done += 1
                mesh.aggregate(done, values, out)
            end = time.perf_counter()
            done += 1
            answer(
                {
                    "begin": begin,
                    "end": end,
                    "sent_bytes": (mesh.sent_bytes - sent) / order["times"],
                    "calls": (mesh.calls - calls) / order["times"],
                }
            )
        else:
            answer({"address": door.address})
    mesh.close()
    door.close()


if __name__ == "__main__":
    main()
