"""A member of a group of gadei-ps: aggregates a model with the others, again and again.

python -m gadei_ps.benchmarks.peers_exchange NUMBER
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import numpy as np
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gadei_ps.benchmarks.peers import answer, orders
from gadei_ps.replicas.transport import Transport

HOST = "127.0.0.1"
LIMIT_S = 30.0
"""Time limit (s): members that share two cores with starting contenders are silent for seconds."""


def main() -> None:
    """Carry out orders.

    {}: print the port of the store, of the first member. {"port", "members", "bytes",
    "generation"}: join the others. {"times"}: aggregate, and print the time that it took.
    """
    number = int(sys.argv[1])
    limit = timedelta(seconds=LIMIT_S)
    ours = TCPStore(HOST, 0, is_master=True, wait_for_workers=False) if number == 0 else None
    transport: Transport | None = None
    values = out = np.empty(0, np.float32)
    for order in orders():
        if "port" in order:
            store = TCPStore(HOST, order["port"], wait_for_workers=False, timeout=limit)
            ours_alone = PrefixStore(str(order["generation"]), store)
            transport = Transport(ours_alone, number, order["members"], HOST, LIMIT_S)
            values = np.full(order["bytes"] // 4, 1e-3 * number, np.float32)
            out = np.zeros_like(values)
            answer({})
        elif "times" in order:
            assert transport is not None
            weights = [1 / transport.members] * transport.members
            transport.aggregate(values, weights, out)  # all begin together after it
            sent, begin = transport.sent, time.perf_counter()
            for _ in range(order["times"]):
                transport.aggregate(values, weights, out)
            told = {"begin": begin, "end": time.perf_counter()}
            answer(told | {"sent_bytes": (transport.sent - sent) / order["times"]})
        else:
            answer({"port": 0 if ours is None else ours.port})


if __name__ == "__main__":
    main()
