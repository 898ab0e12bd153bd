"""The rounds of a replica, with a coordinator in this process and a job that does not train."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import eventually

from gadei_ps.errors import ControlError, ExchangeFailed
from gadei_ps.groups.coordinator import Group
from gadei_ps.replicas import config, rounds, sockets
from gadei_ps.replicas.rounds import Rounds
from gadei_ps.replicas.training import Copied

VALUES = 64
BEAT_S = 0.01


class Training:
    """Stands for replicas.training.JobTraining."""

    has_model: dict[str, threading.Event]
    trains: Callable[[], bool]

    def __init__(self, job: str, *_: Any) -> None:
        self.has_model[job].wait()
        self.values = VALUES

    copied: Copied | None = None

    def check(self) -> None: ...
    def write(self, weights: Any) -> None:
        self.drop()

    def rejoin(self) -> None:
        self.drop()

    def begin(self) -> None: ...
    def drop(self) -> None:
        self.copied = None

    def close(self) -> None: ...

    def is_trained(self) -> bool:
        return type(self).trains()

    def look_s(self) -> float:
        return 0.05

    def copy(self) -> Copied:
        self.copied = Copied(np.zeros(VALUES, np.float32), 1)
        return self.copied


class Counted(threading.Event):
    """Whether a replica is over; counts the beats that have begun."""

    beats = 0

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "_beat":
            self.beats += 1
        return super().wait(timeout)


class Run:
    """A group of replicas 0 and 1, and its coordinator."""

    def __init__(self) -> None:
        self.group = Group(None, True, (), ["0", "1"], time.monotonic() + 600)
        self.is_lost = False
        self.refused = 0
        """Requests of the threads that make rounds while the coordinator was lost."""
        self.failed: list[str] = []
        self.noted: list[str] = []
        self._lock = threading.Lock()
        self.replicas: list[Rounds] = []

    def request(self, path: Path, what: str, timeout_s: float, **how: Any) -> Any:
        if self.is_lost:
            self.refused += threading.current_thread().name == "_work"
            raise ControlError("the coordinator is gone")
        with self._lock:
            report = how["report"]
            self.group.report(report, time.monotonic())
            while self.group.step(time.monotonic(), {}):
                pass
            answer = {"reply": self.group.reply(report), "changes": self.group.state.version}
        return answer | {"began": 1, "host": "127.0.0.1"}

    def start(self, number: int) -> Rounds:
        values = {"name": "r", "every": 10, "rule": "mix:0.5", "groups": [{"machines": 2}]}
        values["silence_s"] = 6 * BEAT_S
        settings = config.from_mapping(values, "run")
        made = Rounds(settings, number, 0, str(number), self.noted.append)
        made._is_over = Counted()
        made.start(self.failed.append)
        self.replicas.append(made)
        return made

    def await_beats(self) -> None:
        """Wait until each replica has had a beat, which has ended."""
        for one in self.replicas:
            over = one._is_over
            assert isinstance(over, Counted)
            enough = over.beats + 2
            eventually(lambda over=over, enough=enough: over.beats >= enough)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run()
    monkeypatch.setattr(sockets, "request", made.request)
    monkeypatch.setattr(rounds, "JobTraining", Training)
    monkeypatch.setattr(
        Training, "has_model", {str(one): threading.Event() for one in range(2)}, raising=False
    )
    monkeypatch.setattr(Training, "trains", staticmethod(lambda: False), raising=False)
    yield made
    for event in Training.has_model.values():
        event.set()
    before = {one.name for one in threading.enumerate()}
    for one in made.replicas:
        one.end()
    eventually(
        lambda: not {"_work", "_beat", "_carry"} & {one.name for one in threading.enumerate()},
        what=lambda: before,
    )


def test_a_replica_reports_once_its_job_has_a_model(run: Run) -> None:
    """Else the group would begin without the settings that all members must share."""
    for number in range(2):
        run.start(number)
    run.await_beats()
    assert not run.group.state.members
    for event in Training.has_model.values():
        event.set()
    eventually(lambda: len(run.group.state.members) == 2)
    assert run.group.state.facts["values"] == VALUES
    assert not run.failed


def test_a_replica_reports_once_it_could_begin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait until its learners have answered their batches."""
    is_idle = threading.Event()
    monkeypatch.setattr(Training, "begin", lambda _: is_idle.wait() and None)
    run.group = Group(None, True, (), ["0"], time.monotonic() + 600)
    Training.has_model["0"].set()
    one = run.start(0)
    run.await_beats()
    assert not run.group.state.members
    is_idle.set()
    eventually(lambda: one.facts.state == "member")
    is_idle.clear()
    assert one._link.reply is not None
    one._link.reply = replace(one._link.reply, rejoin=True)
    one._link.changes += 1
    before = run.group.state.members
    eventually(lambda: run.noted)
    run.await_beats()
    assert run.group.state.members == before
    is_idle.set()
    eventually(lambda: run.group.state.members not in ((), before))


def test_an_unexpected_error_ends_the_replica(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its group would wait for it, which reports that it lives."""

    def fails() -> bool:
        raise RuntimeError("out of order")

    monkeypatch.setattr(Training, "trains", staticmethod(fails))
    run.group = Group(None, True, (), ["0"], time.monotonic() + 600)
    Training.has_model["0"].set()
    run.start(0)
    eventually(lambda: run.failed == ["out of order"])


def test_a_replica_joins_again_once(run: Run) -> None:
    """The coordinator is gone right after its request."""
    run.group = Group(None, True, (), ["0"], time.monotonic() + 600)
    Training.has_model["0"].set()
    one = run.start(0)
    eventually(lambda: one.facts.state == "member")
    run.is_lost = True
    assert one._link.reply is not None
    one._link.reply = replace(one._link.reply, rejoin=True)
    one._link.changes += 1
    eventually(lambda: run.noted)
    enough = run.refused + 3
    eventually(lambda: run.refused >= enough)
    assert len(run.noted) == 1


def test_the_first_member_of_each_generation_has_a_store(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be made is made in the next generation."""
    transport = pytest.importorskip("gadei_ps.replicas.transport")
    errors = [ExchangeFailed("too many open files")]
    stores: dict[int, tuple[str, int]] = {}

    def store_at(host: str, port: int, _: float) -> Any:
        if errors:
            raise errors.pop()
        return SimpleNamespace(host=host, port=port or 5)

    class Transport:
        def __init__(self, store: Any, place: int, *_: Any) -> None:
            stores[place] = store.host, store.port

        def send_state(self, *_: Any) -> None: ...
        def receive_state(self, _: int) -> Any:
            return b'{"rounds": 0, "arrays": [], "counts": {}}', [np.zeros(VALUES, np.float32)]

    monkeypatch.setattr(transport, "store_at", store_at)
    monkeypatch.setattr(transport, "Transport", Transport)
    for event in Training.has_model.values():
        event.set()
    for number in range(2):
        run.start(number)
    eventually(lambda: all(one.facts.state == "member" for one in run.replicas))
    assert not errors and run.group.state.generation > 1
    assert stores == {0: ("127.0.0.1", 5), 1: ("127.0.0.1", 5)}
