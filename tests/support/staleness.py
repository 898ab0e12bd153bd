"""Gradients of others that a mini-batch lacks, in real processes.

Each learner adds 1 to a value of its own in every mini-batch. So the weights themselves say how
many mini-batches of each learner are in them.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from gadei_ps.memory import layout
from gadei_ps.server.driver import Driver
from gadei_ps.sync.ssp import SSP
from gadei_ps.sync.wsp import WSP
from support.jobs import daemon, live_weights
from support.processes import Stopped, fork
from support.waiting import eventually

MANY = 2**17  # mini-batches that are noted of each learner
MODELS = [WSP(D, s_local) for D in (0, 1, 4) for s_local in (0, 3)]
COUNTS = "0.count", "1.count"
"""The job's tensors, one value for each learner."""

GoOn = Callable[[Connection, str, int, mmap.mmap], None]


def notes(noted: mmap.mmap) -> np.ndarray:
    return np.frombuffer(noted, np.int64).reshape(3, MANY)


def most_missed(job: str, model: WSP, ahead: int, go_on: GoOn) -> int:
    """The most mini-batches before it that one lacks, of those for which the model promises.

    Of three learners one is stopped and continued. ahead: waves after its last one that the others
    begin meanwhile. go_on: what each learner runs, with its number and where it takes notes.
    """
    tensors = [{"name": name, "shape": [3]} for name in COUNTS]
    noted = mmap.mmap(-1, 3 * MANY * 8)
    seen = notes(noted)
    with (
        daemon(job, sync=str(model), optimizer={"kind": "add"}, tensors=tensors),
        fork(1, go_on, job, 0, noted) as (first,),
        fork(1, go_on, job, 1, noted) as (second,),
        fork(1, go_on, job, 2, noted) as (slow,),
    ):
        team = first, second, slow
        assert [one.receive() for one in team] == ["joined"] * 3
        for one in team:
            one.send("go")
        eventually(lambda: seen[2, 0] > 3 * model.wave)
        with Stopped(slow.pid):
            # What it had begun to push is in the weights before the others pause.
            farthest = eventually(lambda: _where_they_wait(model, ahead, seen, job))
        eventually(lambda: seen[0, 0] > farthest + 2 * model.wave)
        with contextlib.ExitStack() as still:  # before any of them leaves, or is full
            for one in team:
                still.enter_context(Stopped(one.pid))
            at_the_end = seen.copy()
    missed = []
    for mine in at_the_end:
        p = np.arange((model.D + 1) * model.wave + model.s_local + 1, mine[0] + 1)
        missed.append(int((p - 1 - mine[p]).max()))
    return max(missed)


def _where_they_wait(model: WSP, ahead: int, seen: np.ndarray, job: str) -> int:
    """The last mini-batch that the others may begin while the slow one stands; 0: not there yet."""
    pushed = int(live_weights(job)[2])
    farthest = pushed + ahead * model.wave + model.s_local
    return farthest if seen[0, 0] == seen[1, 0] == farthest else 0


def grants(waves: int, where: str) -> Callable[[str], None]:
    """Let a server grant so many waves more than it should, in each fork of support.quick."""

    def change(program: str) -> None:
        if program != "gadei_ps.server.manager":
            return
        if where == "model":
            WSP._grant = lambda *of: SSP._grant(*of) + waves  # type: ignore[method-assign]
            return
        publish = Driver.publish_grant

        def published(driver: Driver, row: int, grant: int) -> None:
            publish(driver, row, grant + waves if 0 < grant < layout.UNBOUNDED else grant)

        Driver.publish_grant = published  # type: ignore[method-assign,assignment]

    return change
