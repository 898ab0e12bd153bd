"""A member of a hivemind group: the mean of all models by its DecentralizedAverager.

python -m gadei_ps.benchmarks.peers_hivemind NUMBER MEMBERS

Members look for one another before each aggregation; that takes seconds and is not counted. The
first order of an aggregation lets them meet, the second one lets them begin.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import hivemind
import torch
from hivemind.averaging.control import AveragingStage

from gadei_ps.benchmarks.peers import answer, orders

PATIENCE_S = 60


def main() -> None:
    """Order {}: its addresses. {"peers", "bytes"}: begins a group. {"meet"}, then {"go"}: one
    aggregation.
    """
    number, members = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dht: Any = None
    averager: Any = None
    control: Any = None
    for order in orders():
        if "peers" in order:
            if averager is not None:
                averager.shutdown()
            if dht is None:
                dht = hivemind.DHT(initial_peers=order["peers"], start=True)
            averager = hivemind.DecentralizedAverager(
                [torch.full((order["bytes"] // 4,), 1e-3 * number)],
                dht,
                start=True,
                prefix=f"bench{order['bytes']}",
                target_group_size=members,
                min_group_size=members,
                min_matchmaking_time=2.0,
                request_timeout=1.0,
            )
            answer({})
        elif "meet" in order:
            control = averager.step(wait=False, require_trigger=True, timeout=PATIENCE_S)
            until = time.monotonic() + PATIENCE_S
            while control.stage is not AveragingStage.AWAITING_TRIGGER:
                if time.monotonic() > until:
                    raise TimeoutError("hivemind's members do not find one another")
                time.sleep(0.001)
            answer({})
        elif "go" in order:
            begin = time.perf_counter()
            control.allow_allreduce()
            if not control.result(PATIENCE_S):
                raise RuntimeError("hivemind's aggregation has failed")
            answer({"begin": begin, "end": time.perf_counter()})
        else:
            dht = hivemind.DHT(start=True)
            answer({"peers": [str(one) for one in dht.get_visible_maddrs()]})
    if averager is not None:
        averager.shutdown()
    if dht is not None:
        dht.shutdown()


if __name__ == "__main__":
    main()
