"""Adoption from another pid namespace, at the instant when a server was just starting there.

Whatever becomes of that server, and wherever the next watchdog starts, two servers never both have
the job. Namespaces are numbers here; tests/end_to_end/test_namespaces.py has real ones.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
import support
from support import Child, eventually
from support.memory import create_model

from gadei_ps import sync
from gadei_ps.machine import process
from gadei_ps.memory import holds, layout
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.watchdog import job_memory
from gadei_ps.watchdog.job_memory import JobMemory

HERE = process.namespace()
THERE = 1
LINE = 0


@pytest.fixture
def memory(job_name: str) -> Iterator[JobMemory]:
    """A job with a model, whose watchdog is dead."""
    made = JobMemory(support.config(job_name))
    made.create_control(sync.parse("asp"))
    try:
        model = place([Tensor("w", (4,))])
        create_model(made, model, np.zeros(model.elements, np.float32))
        control = made.control.view(layout.CONTROL)
        control["model_ready"] = 1
        control["watchdog_pid"] = 0
        made.release()
        yield made
    finally:
        made.remove()


def serve(pipe: Connection, job: str, namespace: int, *, reign: bool) -> None:
    """A server up to its lock, which it takes on request. reign: it then takes the leases, once no
    watchdog knows of it any more."""
    from gadei_ps.memory.lifecycle import Leases
    from gadei_ps.server.manager import Asked, Server

    server = Server(Asked(job, LINE, 10.0, []))
    server._namespace = namespace
    pipe.send(server._start)
    pipe.recv()
    pipe.send(server._take_hold())
    if reign:
        eventually(lambda: not int(server._line["pid"]))  # stored after `lease_pid`
        server.leases = Leases.HEIR
        server._try_leases()
        pipe.send(server.active)
    signal.pause()


def adopt(pipe: Connection, job: str, namespace: int, *, pauses: bool) -> None:
    """A watchdog's adoption. pauses: after its look at locks, until a request."""
    process.namespace = lambda: namespace  # of this child alone
    look = job_memory.check_dead_elsewhere

    def pausing(*what: object) -> None:
        look(*what)  # type: ignore[arg-type]
        pipe.send("no server has a lock")
        pipe.recv()

    if pauses:
        job_memory.check_dead_elsewhere = pausing  # type: ignore[assignment]
    try:
        pipe.send(JobMemory(support.config(job)).adopt())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    signal.pause()


class Job:
    """Its processes, in both namespaces."""

    def __init__(self, memory: JobMemory) -> None:
        self.memory = memory
        self.name = memory.config.name
        self.control = memory.control.view(layout.CONTROL)
        self.children: list[Child] = []

    def start(self, *what: object, **how: object) -> Child:
        def run(pipe: Connection) -> None:
            what[0](pipe, self.name, *what[1:], **how)  # type: ignore[operator]

        self.children.append(Child(run))
        return self.children[-1]

    def server(self, namespace: int, *, reign: bool = False) -> Child:
        """Started and written down by a watchdog of that namespace; it has no lock yet."""
        child = self.start(serve, namespace, reign=reign)
        line = self.control["server"][LINE]
        line["start"], line["pid"] = child.receive(), child.pid
        self.control["header"]["owner_namespace"] = namespace
        return child

    def adopted(self, namespace: int) -> bool | str:
        """Return how a watchdog ends that starts in that namespace, and is then killed."""
        child = self.start(adopt, namespace, pauses=False)
        try:
            answer: bool | str = child.receive()
            return answer
        finally:
            child.kill()

    def adopted_while(self, server: Child) -> Child:
        """A watchdog here that has seen no lock, just before the server takes it."""
        child = self.start(adopt, HERE, pauses=True)
        child.receive()
        server.send()
        assert server.receive(), "it was named, and has the lock"
        child.send()
        return child


@pytest.fixture
def job(memory: JobMemory) -> Iterator[Job]:
    made = Job(memory)
    yield made
    for child in made.children:
        child.kill()


@pytest.mark.parametrize("namespace", [HERE, THERE, 2])
def test_a_stopped_server_keeps_its_job(
    job: Job, namespace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protect it from the next watchdog in its own, the adopting or a third namespace."""
    monkeypatch.setattr(job_memory, "ELSEWHERE_END_S", 0.1)
    server = job.server(THERE)
    first = job.adopted_while(server)
    with support.Stopped(server.pid):
        assert "running elsewhere" in first.receive()
        first.kill()
        for _ in range(2):
            assert "running elsewhere" in str(job.adopted(namespace))
    server.kill()
    assert job.adopted(namespace) is True
    assert int(job.control["header"]["owner_namespace"]) == namespace


@pytest.mark.parametrize("namespace", [HERE, THERE])
def test_a_watchdog_dies_while_it_waits(job: Job, namespace: int) -> None:
    server = job.server(THERE)
    first = job.adopted_while(server)
    eventually(lambda: not int(job.control["server"][LINE]["pid"]))
    first.kill()
    assert "running elsewhere" in str(job.adopted(namespace))
    server.kill()
    assert job.adopted(namespace) is True


def test_a_server_that_has_served_meanwhile_is_forgotten(job: Job) -> None:
    """Forget it: its pid is another process' here, which the watchdog would kill as a server."""
    server = job.server(THERE, reign=True)
    first = job.adopted_while(server)
    assert server.receive(), "it is active"
    assert int(job.control["lease_pid"]) == server.pid
    server.kill()
    assert first.receive() is True
    assert int(job.control["lease_pid"]) == 0
    assert not job.control["server"]["pid"].any()


def test_watchdogs_of_one_namespace_go_on_with_their_servers(job: Job) -> None:
    """Check it after an adoption from elsewhere, too."""
    job.control["header"]["owner_namespace"] = THERE
    assert job.adopted(HERE) is True
    server = job.server(HERE)
    server.send()
    assert server.receive(), "it has its lock"
    starts = int(job.control["watchdog_starts"])
    for number in (1, 2, 3):
        assert job.adopted(HERE) is True
        assert int(job.control["watchdog_starts"]) == starts + number
        assert int(job.control["server"][LINE]["pid"]) == server.pid


def test_a_server_that_still_ends_here_holds_nobody_up(job: Job) -> None:
    """Release its lock last, when its line already reports its death."""
    hold = holds.take(job.name, holds.SERVERS[LINE])
    assert hold is not None
    line = job.control["server"][LINE]
    line["start"], line["pid"] = process.start_ticks(os.getpid()) + 1, os.getpid()
    assert job.adopted(HERE) is True
    hold.release()
