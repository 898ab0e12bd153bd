"""Progress of a training, from its job's status."""

from __future__ import annotations

from itertools import chain, count, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from gadei_ps.classifier import train
from gadei_ps.classifier.train import MAX_DEATHS, STALLED_S, _Run, handed_out
from gadei_ps.errors import JobFailed
from gadei_ps.machine.launch import Ended


@pytest.mark.parametrize(
    ("epoch", "next_batch", "epochs"),
    [
        (0, 0, 0.0),
        (0, 3, 0.25),
        (0, 12, 1.0),
        (1, 3, 1.25),  # also while the last batches of epoch 0 are not answered
        (2, 12, 3.0),
    ],
)
def test_handed_out(epoch: int, next_batch: int, epochs: float) -> None:
    for done in range(max(0, epoch - 1), epoch + 1):
        work = {"epoch": epoch, "next": next_batch, "batches": 12, "epochs_done": done}
        assert handed_out(work) == epochs


ALL = 99  # gradients


def made(
    monkeypatch: pytest.MonkeyPatch, looks: Any, ended: Any, start: Any = id
) -> tuple[Any, Any]:
    """Return a run of ALL gradients that looks every second, and its learners.

    looks: of each look, the number of joined learners and the gradients applied. ended: learners
    that have ended since the look before. start: called to start another one.
    """
    times = count(1)
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: next(times), sleep=id))
    run: Any = object.__new__(_Run)
    run.looked = 0

    def status(_: object) -> dict[str, Any]:
        run.looked += 1
        joined, version = next(looks)
        done = version == ALL
        work = {"epoch": 0, "next": 0, "batches": 1, "epochs_done": int(done)}
        work |= {"state": "done" if done else "open"}
        counts = {"gradients_refused": 0, "gradients_applied": version, "version": version}
        return {"learners": [{}] * joined, "model": None, "work": work, **counts}

    vars(run).update(
        daemon=SimpleNamespace(check=lambda: None, request=status),
        settings=SimpleNamespace(replace=True),
        display=SimpleNamespace(update=lambda *_: None, event=lambda _: None),
        signalled=lambda: None,
        status={},
        epochs=1,
        earlier=0,
        deaths=0,
        train_seconds=0.0,
        _deaths_since_gradient=0,
        _evaluate=lambda epoch: True,
    )
    return run, SimpleNamespace(ended=lambda: next(ended), hopeless=False, start=start)


def watched(monkeypatch: pytest.MonkeyPatch, looks: Any, ended: Any) -> int:
    """Watch a run until it fails; return how often it has looked."""
    run, learners = made(monkeypatch, looks, ended)
    with pytest.raises(JobFailed):
        run._watch(learners)
    return int(run.looked)


def test_a_stall_begins_when_learners_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that imports of learners may take minutes, as on a busy machine."""
    stall = int(STALLED_S) + 2
    looks = chain(repeat((0, 0), 1000), repeat((2, 0), 100), repeat((2, 7)))
    assert watched(monkeypatch, looks, repeat(())) == 1100 + stall
    looks = chain(repeat((2, 7), 100), repeat((0, 7), 1000), repeat((1, 7)))
    assert watched(monkeypatch, looks, repeat(())) == 1100 + stall


@pytest.mark.parametrize(("gradient_at", "deaths"), [(10**6, MAX_DEATHS), (9 * 5, 5 + MAX_DEATHS)])
def test_learners_that_die_without_a_gradient(
    monkeypatch: pytest.MonkeyPatch, gradient_at: int, deaths: int
) -> None:
    """They are not started again for ever, even if each lives for a while."""
    looks = chain(repeat((0, 0), gradient_at), repeat((0, 1)))
    ended = ([Ended(0, 1, 1)] if number % 9 == 0 else [] for number in count(1))
    assert watched(monkeypatch, looks, ended) == 9 * deaths


def test_learners_that_die_with_what_forked_them_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = [Ended(at, 1, -9, lost=True) for at in range(2 * MAX_DEATHS)]
    ended = chain([lost], repeat([Ended(0, 1, 1)]))
    assert watched(monkeypatch, repeat((2, 0)), ended) == 1 + MAX_DEATHS


def test_learners_that_have_done_all_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their end may be seen in the look that first shows that all is done."""
    looks = chain(repeat((2, 7), 10), repeat((1, ALL)))
    ended = chain(repeat([], 10), [[Ended(0, 1, 0)]], repeat([]))
    started: list[int] = []
    run, learners = made(monkeypatch, looks, ended, started.append)
    run._watch(learners)
    assert started == []


def test_a_run_that_is_done_at_the_first_look_has_taken_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Count from before that look: on a busy machine, a short training may be done by then."""
    run, learners = made(monkeypatch, repeat((2, ALL)), repeat([]))
    run._watch(learners)
    assert run.looked == 1
    assert run.train_seconds > 0
