"""Learners that do one thing at a time, on request."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from gadei_ps.errors import JobStopped
from gadei_ps.learners.client import Client
from support.processes import Child

VALUES = 3000
TENSORS = [{"name": "w", "shape": [VALUES]}]
MODELS = (
    "asp",
    "ssp:s=2",
    "bsp",
    "elastic-bsp:R=4",
    "cutoff:c=2",
    "cutoff:by=order",
    "wsp:D=1,s_local=0",
)


def push_until_told(pipe: Connection, job: str) -> None:
    """Push ones until a request, or the end of the job; send how many."""
    with Client(job) as client:
        client.wait_turn()
        pipe.send("granted")
        with contextlib.suppress(JobStopped):
            while not pipe.poll():
                client.push({"w": np.ones(VALUES, np.float32)})
        client.wait_applied()
        pipe.send(client.published)


def push_when_told(pipe: Connection, job: str) -> None:
    """Push each number that it is sent, abandon a push at "abandon"; else send `wanted`."""
    with Client(job) as client:
        client.wait_turn()
        pipe.send("granted")
        while (what := pipe.recv()) is not None:
            if what == "wanted":
                pipe.send(client.wanted)
                continue
            if what == "abandon":
                client.abandon()
            else:
                client.push({"w": np.full(VALUES, what, np.float32)})
            client.wait_turn()
            pipe.send("granted")


def tell(child: Child, what: Any) -> Any:
    child.send(what)
    return child.receive()


def all_granted(team: list[Child]) -> None:
    for child in team:
        assert child.receive() == "granted"
