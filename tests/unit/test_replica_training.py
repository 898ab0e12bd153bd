"""Effects of a replica on its job: exchange, weights that it keeps, and reports."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gadei_ps.errors import ModelMismatch
from gadei_ps.memory.layout import CONTROL, Role
from gadei_ps.memory.weights import FloatArray, Tensor, place
from gadei_ps.replicas import owning, training
from gadei_ps.replicas.owning import OwningTraining
from gadei_ps.replicas.training import JobTraining
from gadei_ps.storage.history_file import parsed
from gadei_ps.watchdog.history import History

MODEL = place(
    [Tensor("w", (3,)), Tensor("mask", (2, 2), Role.BUFFER), Tensor("variance", (5,), Role.BUFFER)]
)
OVERLAP = pytest.mark.parametrize("overlap", [True, False])


class Job:
    """Stand-in for a client. The optimizer has its state while it `is_warm`."""

    job, model, current_version = "job", MODEL, 0

    def __init__(self, **values: float) -> None:
        self.weights, self.is_warm, self.pauses = weights(**values), True, False
        control = np.zeros((), CONTROL)[()]
        self.place = SimpleNamespace(control=SimpleNamespace(view=lambda _: control))

    def check_job(self) -> None:
        pass

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        self.pauses = True
        yield
        self.pauses = False

    def pull(self, into: FloatArray, **_: object) -> FloatArray:
        into[:] = self.weights
        return into

    def add(self, values: dict[str, FloatArray]) -> None:
        for name, one in values.items():
            assert np.isfinite(one).all()
            self.views[name][:] += one

    def assign(self, values: dict[str, FloatArray], *, reset: bool) -> None:
        for name, one in values.items():
            assert np.isfinite(one).all()
            self.views[name][:] = one
        self.is_warm &= not reset

    @property
    def views(self) -> dict[str, FloatArray]:
        return MODEL.views(self.weights)


def weights(**values: float) -> FloatArray:
    """Return ones; in some tensors the first value is another one."""
    made = MODEL.flatten({one.name: np.ones(one.shape) for one in MODEL.tensors})
    for name, value in values.items():
        MODEL.views(made)[name].flat[0] = value
    return made


def of_group(**values: float) -> FloatArray:
    made = weights(**values)
    made[MODEL.parameters :] = 0
    return made


@pytest.fixture
def notes() -> list[str]:
    return []


def begun(
    job: Job, overlap: bool, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> JobTraining:
    monkeypatch.setattr(training, "_attached", lambda *_: job)
    return JobTraining("job", 0, overlap, 0.0, notes.append)


@OVERLAP
def test_the_optimizer_keeps_its_state_and_the_job_its_buffers(
    overlap: bool, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever these hold."""
    job = Job(w=3, mask=-np.inf, variance=np.nan)
    one = begun(job, overlap, notes, monkeypatch)
    for _ in range(2):
        copied = one.copy()
        assert copied.samples == 1 and not copied.weights[MODEL.parameters :].any()
        assert job.pauses == (not overlap)
        one.write(of_group(w=5))
        assert job.weights.tobytes() == weights(w=5, mask=-np.inf, variance=np.nan).tobytes()
        assert job.is_warm and not job.pauses
    assert not notes


@OVERLAP
def test_what_learners_push_after_the_copy_stays_if_they_are_not_paused(
    overlap: bool, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check it without overlap, too, if the group cannot be reached for a while."""
    job = Job(w=3)
    one = begun(job, overlap, notes, monkeypatch)
    one.copy()
    one.resume()
    assert not job.pauses
    job.views["w"][0] += 2
    one.write(of_group(w=10))
    assert job.views["w"][0] == 12
    one.copy()
    one.drop()
    assert not job.pauses


@OVERLAP
@pytest.mark.parametrize("copies", [True, False])
def test_a_replica_that_has_diverged_gets_all_of_the_group(
    overlap: bool, copies: bool, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that joins, and so has not copied before; and one more than once."""
    job = Job(mask=-np.inf)
    one = begun(job, overlap, notes, monkeypatch)
    for _ in range(2):
        job.views["w"][1] = np.inf
        job.is_warm = True
        notes.clear()
        if copies:
            assert one.copy().samples == 0
        one.write(of_group(w=5))
        assert len(notes) == 1 and "the weights of this replica ('w') hold" in notes[0]
        assert not job.is_warm
        assert job.views["w"][1] == 1 and job.views["mask"].flat[0] == -np.inf


class Batches:
    """Stand-in for a client's externally assigned batches."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.given: list[Any] = []
        self.back = 0
        self.ended = 0

    def take_back(self) -> None:
        self.back += 1

    def copy(self, into: FloatArray) -> SimpleNamespace:
        return SimpleNamespace(unanswered=(), samples=0, version=len(self._job.pull(into)))

    def give(self, spans: list[Any]) -> list[Any]:
        self.given += spans[:1]
        return spans[1:]

    def finish(self, passes: int) -> None:
        self.ended = passes


@OVERLAP
def test_a_replica_that_owns_batches(
    overlap: bool, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports what is not in a copy; a copy that does not count gives all batches back."""
    monkeypatch.setattr(owning, "AssignedBatches", Batches)
    monkeypatch.setattr(owning.owned, "is_on", lambda _: True)
    job = Job()
    monkeypatch.setattr(training, "_attached", lambda *_: job)
    one = OwningTraining("job", 0, overlap, 0.0, notes.append, lambda: False)
    one._control["batches"] = 4
    one.rejoin()
    batches: Any = one._owned
    one.own([owning.Span(0, 0, 2), owning.Span(1, 0, 2)], 0)
    assert batches.given == [(0, 0, 2)]
    report = one.copy().report
    assert report is not None and report.counts
    assert report.unanswered == (owning.Span(1, 0, 2),)
    one.write(of_group(w=5))
    one.own([owning.Span(1, 0, 2), owning.Span(1, 2, 4)], 1)
    assert batches.given == [(0, 0, 2), (1, 0, 2)] and batches.ended == 1
    backs = batches.back
    job.views["w"][1] = np.nan
    copied = one.copy()
    assert copied.samples == 0 and copied.report is not None and not copied.report.counts
    one.write(of_group(w=5))
    assert len(notes) == 1 and "do not count" in notes[0]
    assert batches.back == backs + 1 and job.weights[0] == 5


def test_a_job_that_no_learner_joins_is_noted_once(
    notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def client(job: str, *, name: str) -> Any:
        tries.append(job)
        if len(tries) < 4:
            raise ModelMismatch("the job has no model yet")
        return Job()

    monkeypatch.setattr(training, "ReplicaClient", client)
    monkeypatch.setattr(training, "SILENT_S", 0.06)
    monkeypatch.setattr(training, "ask", lambda *_: {"replicas": []})
    JobTraining("job", 1, True, 60.0, notes.append)
    assert len(notes) == 1 and notes[0].startswith("no learner has joined job 'job' yet")


def test_a_replica_is_no_command_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """It attaches like a learner, by a name that the watchdog knows."""
    names = [b"learner"]

    def client(job: str, *, name: str) -> Any:
        names.append(name.encode())
        return Job()

    monkeypatch.setattr(training, "ReplicaClient", client)
    monkeypatch.setattr(training, "ask", lambda *_: {"replicas": []})
    JobTraining("job", 1, True, 1.0, lambda _: None)
    control = np.zeros((), CONTROL)[()]
    for row, name in enumerate(names):
        control["roster"][row]["name"], control["roster"][row]["pid"] = name, row + 1
    memory: Any = SimpleNamespace(words=control, rings=[0, 1])
    with selectors.DefaultSelector() as selector:
        history = History(memory, selector, None)
        history._note_learners()
    assert [one["pid"] for one in parsed(b"".join(history._waiting))] == [1]
