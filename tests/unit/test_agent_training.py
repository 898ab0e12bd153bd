"""What an agent does to its job: what it exchanges, what it keeps, and what it says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gadei_ps.agents import owning, training
from gadei_ps.agents.owning import OwningTraining, StandingOwner
from gadei_ps.agents.training import JobTraining, StandingTraining
from gadei_ps.groups.membership import Member
from gadei_ps.groups.shares import Shares
from gadei_ps.memory.layout import CONTROL, Role
from gadei_ps.memory.weights import FloatArray, Tensor, place

MODEL = place(
    [Tensor("w", (3,)), Tensor("mask", (2, 2), Role.BUFFER), Tensor("variance", (5,), Role.BUFFER)]
)
KINDS = pytest.mark.parametrize("kind", [JobTraining, StandingTraining])


class Job:
    """In the place of a client. The optimizer has its state while it `is_warm`."""

    job, model, current_version = "job", MODEL, 0
    place = SimpleNamespace(
        control=SimpleNamespace(view=lambda of: np.zeros((), CONTROL)[()] if of is CONTROL else 0)
    )

    def __init__(self, **values: float) -> None:
        self.weights, self.is_warm = weights(**values), True

    def check_job(self) -> None:
        pass

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        yield

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
    """Ones; of some tensors the first value is another one."""
    made = MODEL.flatten({one.name: np.ones(one.shape) for one in MODEL.tensors})
    for name, value in values.items():
        MODEL.views(made)[name].flat[0] = value
    return made


def begun(
    kind: Callable[..., JobTraining], job: Job, monkeypatch: pytest.MonkeyPatch
) -> tuple[JobTraining, list[str], list[int]]:
    """The training, what it notes, and its checksums."""
    monkeypatch.setattr(training, "_attached", lambda *_: job)
    notes: list[str] = []
    sums: list[int] = []
    made = kind("job", 0, 0, lambda _, checksum: sums.append(checksum), notes.append)
    return made, notes, sums


@KINDS
def test_the_optimizer_keeps_its_state_and_the_job_its_buffers(
    kind: type[JobTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever these hold."""
    job = Job(w=3, mask=-np.inf, variance=np.nan)
    one, notes, _ = begun(kind, job, monkeypatch)
    copied, group = weights(), weights(w=5, variance=7)
    for rounds in (1, 2):
        assert one.copy(rounds - 1, copied) == 1
        assert not copied[MODEL.parameters :].any()
        one.write(rounds, group, ())
        assert job.weights.tobytes() == weights(w=5, mask=-np.inf, variance=np.nan).tobytes()
        assert job.is_warm
    assert not notes


@KINDS
@pytest.mark.parametrize("copies", [True, False])
def test_a_machine_that_has_diverged_gets_all_of_the_group(
    kind: type[JobTraining], copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that joins, and so has not copied before; and one more than once."""
    job = Job(mask=-np.inf)
    one, notes, _ = begun(kind, job, monkeypatch)
    copied, group = weights(), weights(w=5)
    group[MODEL.parameters :] = 0
    if copies:
        assert one.copy(0, copied) == 1
        one.write(1, group, ())
        assert job.is_warm
    for rounds in (2, 3):
        job.views["w"][1] = np.inf
        job.is_warm = True
        notes.clear()
        if copies:
            assert one.copy(rounds, copied) == 0
        one.write(rounds, group, ())
        assert "the weights of this machine ('w') hold" in notes[-1]
        assert ("they do not count" in notes[-1]) == copies
        assert not job.is_warm
        assert job.views["w"][1] == 1 and job.views["mask"].flat[0] == -np.inf
        copies = True


@KINDS
def test_machines_with_other_buffers_tell_the_same_checksum(
    kind: type[JobTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, found = weights(w=5), set()
    group[MODEL.parameters :] = 0
    for mask in (-np.inf, 1):
        job = Job(mask=mask)
        one, notes, sums = begun(kind, job, monkeypatch)
        one.copy(0, weights())
        for rounds in (1, 2):
            one.write(rounds, group, ())
        assert not notes and job.views["mask"].flat[0] == mask
        found.update(sums)
    assert len(found) == 1


class Batches:
    """In the place of what a client owns: none."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def take_back(self) -> None:
        pass

    def copy(self, into: FloatArray) -> SimpleNamespace:
        return SimpleNamespace(unanswered=(), samples=0, version=len(self._job.pull(into)))


@pytest.mark.parametrize("kind", [OwningTraining, StandingOwner])
def test_a_machine_that_owns_batches_says_once_in_a_round_that_it_has_diverged(
    kind: type[OwningTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it copies again before it takes the weights of its group."""
    monkeypatch.setattr(owning, "AssignedBatches", Batches)
    monkeypatch.setattr(owning.owned, "is_on", lambda _: True)
    me, job = Member("0", 0), Job()

    def made(*facts: Any) -> OwningTraining:
        return kind(*facts, me, Shares(0, 1))

    one, notes, _ = begun(made, job, monkeypatch)
    one._control["batches"] = 4
    copied, group = weights(), weights(w=5)
    for rounds in (1, 2):
        job.views["w"][1] = np.nan
        assert one.copy(rounds - 1, copied) == 0
        one.write(rounds, group, ())
        assert len(notes) == rounds and f"do not count in round {rounds}" in notes[-1]
        assert job.weights.tobytes() == group.tobytes()
    job.views["w"][1] = np.nan
    one.write(3, group, ())  # that of a round without a copy
    assert len(notes) == 3 and "do not count" not in notes[-1]
