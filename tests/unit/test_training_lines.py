"""Lines on how training goes: what they say, when, and to whom."""

from __future__ import annotations

import itertools
import os
import pty
import sys
from typing import Any
from unittest import mock

import pytest
from support.terminal import until_end

from gadei_ps.commands import run
from gadei_ps.commands.run import RunOptions
from gadei_ps.job.control import Launch
from gadei_ps.machine.launch import Compute
from gadei_ps.show.progress import NO_LOSS, WIDTH, Training, above


def _report(version: int, samples: int, **more: Any) -> dict[str, Any]:
    learners = [
        {"loss": 0.5, "applied": 3, "refused": 0, "staleness_mean": 1.0},
        {"loss": None, "applied": 1, "refused": 0, "staleness_mean": 5.0},
    ]
    return {
        "watchdog_pid": 1,
        "version": version,
        "gradients_applied": version,
        "samples": samples,
        "learners": learners,
    } | more


def test_lines_come_now_and_then() -> None:
    training = Training()
    lines = [(now, training(_report(now + 1, 10 * now), float(now))) for now in range(2000)]
    times = [now for now, line in lines if line]
    assert times[:4] == [10, 20, 30, 40]
    apart = [b - a for a, b in itertools.pairwise(times)]
    assert apart == sorted(apart)
    assert apart[-1] == 60
    assert lines[10][1] == ["11 gradients, 10 samples/s, loss 0.5, staleness 2.0, 2 learners"]


def test_what_is_not_known() -> None:
    training = Training()
    assert not training(_report(0, 0), 0.0)
    assert not training(_report(1, 0), 1.0)
    assert not training(_report(2, 0, watchdog_pid=None, learners=[{"pid": 3}]), 50.0)
    assert training(_report(60, 0, learners=[]), 60.0) == [
        "60 gradients, 1.0 gradients/s, staleness 0.0, 0 learners"
    ]
    assert training(_report(60, 0), 75.0) == ["no gradient has been applied for 15 s"]


def test_an_assignment_is_not_a_gradient() -> None:
    training = Training()
    assert not any(training(_report(1, 0, gradients_applied=0), now) for now in (0.0, 20.0))


def test_no_loss_is_named_once() -> None:
    training = Training()
    silent = [{"loss": None, "applied": 3, "refused": 0, "staleness_mean": 1.0}]
    shown = [training(_report(1 + 9 * now, 0, learners=silent), float(now)) for now in range(100)]
    assert shown[10] == [
        "91 gradients, 9.0 gradients/s, staleness 1.0, 1 learner",
        "no loss reported: optimizer.report(loss=...)",
    ]
    assert sum(NO_LOSS in lines for lines in shown) == 1
    silent[0]["refused"] = 1  # its loss may be NaN
    assert not any(NO_LOSS in Training()(_report(9, 0, learners=silent), now) for now in (0, 50))


def test_lines_fit_the_terminal() -> None:
    """The last parts are left out first: the first ones are wanted most."""
    training = Training()
    training(_report(1, 0), 0.0)
    line = "98,765,432 gradients, 246,914 samples/s, loss 0.5, staleness 2.0, 2 learners"
    report = _report(98_765_432, 98_765_432)
    assert training(report, 400.0) == [line[: line.index(", 2 learners")]]
    assert len(line) > WIDTH


@pytest.mark.parametrize(
    ("options", "shows"),
    [(RunOptions(), True), (RunOptions(quiet=True), False), (RunOptions(stdout=2), False)],
)
def test_only_in_a_terminal(options: RunOptions, shows: bool) -> None:
    ours, theirs = pty.openpty()
    job = mock.Mock(before={"version": 0})
    try:
        with os.fdopen(theirs, "w") as terminal, mock.patch.object(sys, "stderr", terminal):
            made = run._Run(job, ["true"], options, Compute("host"), Launch())
            assert (made.progress is not None) == shows
    finally:
        os.close(ours)
    with open(os.devnull, "w") as file, mock.patch.object(sys, "stderr", file):
        assert run._Run(job, ["true"], options, Compute("host"), Launch()).progress is None


@pytest.mark.parametrize("learners", [1, 2])
def test_a_bar_of_the_only_learner_stays(learners: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the line as it is with several learners, whose output goes through the command."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "w") as terminal, mock.patch.object(sys, "stderr", terminal):
            made = run._Run(
                mock.Mock(before={}), ["true"], RunOptions(learners), Compute("host"), Launch()
            )
            made.output = None if learners == 1 else mock.Mock()
            made._print_beside_learners("so")
        output = until_end(ours)
    finally:
        os.close(ours)
    assert output == (above("gadei-ps: so") if learners == 1 else "gadei-ps: so\r\n")
    assert "\n" not in above("so")
