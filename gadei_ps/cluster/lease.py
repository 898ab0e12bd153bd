"""One `group run` at a time looks after a run: it has an actor of Ray, which ends with it."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gadei_ps.cluster.actor import NAMESPACE
from gadei_ps.errors import ClusterError

FREE_S = 3.0
"""For the actor of a command that was just killed to end."""
ANSWER_S = 5.0
POLL_S = 0.1


class Holder:
    """Says which command looks after a run."""

    def __init__(self, who: str) -> None:
        self._who = who

    def who(self) -> str:
        """The command, in words."""
        return self._who


def take(run: str) -> Any:
    """The actor that this process holds while it looks after the run; to be kept.

    Raises ClusterError if another process does.
    """
    context = ray.get_runtime_context()
    name, who = f"{run}:run", f"{ray.util.get_node_ip_address()}, process {os.getppid()}"
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "max_restarts": -1,
        # Where this process is: it ends there with its node.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
    }
    until = time.monotonic() + FREE_S
    while True:
        try:
            return ray.remote(Holder).options(**options).remote(who)
        except ValueError:  # the name is taken
            if time.monotonic() > until:
                raise ClusterError(
                    f"run {run} has its group run already, at {_holder(name)}: end that command "
                    "first, its machines go on"
                ) from None
        time.sleep(POLL_S)


def _holder(name: str) -> str:
    with contextlib.suppress(ValueError, RayError, GetTimeoutError):
        found = ray.get_actor(name, NAMESPACE)
        return str(ray.get(found.who.remote(), timeout=ANSWER_S))
    return "a place that does not answer"
