"""Lines on how training goes: what they say, when, and to whom."""

from __future__ import annotations

import itertools
import os
import pty
import sys
from typing import Any
from unittest import mock

import pytest

from gadei_ps.commands import run
from gadei_ps.commands.run import RunOptions
from gadei_ps.machine.launch import Compute
from gadei_ps.show.progress import Training


def _report(version: int, samples: int, **more: Any) -> dict[str, Any]:
    learners = [
        {"loss": 0.5, "applied": 3, "staleness_mean": 1.0},
        {"loss": None, "applied": 1, "staleness_mean": 5.0},
    ]
    known = {"watchdog_pid": 1, "version": version, "samples": samples, "learners": learners}
    return known | more


def test_lines_come_now_and_then() -> None:
    training = Training()
    said = [(now, training(_report(now + 1, 10 * now), float(now))) for now in range(2000)]
    times = [now for now, line in said if line]
    assert times[:4] == [10, 20, 30, 40]
    apart = [b - a for a, b in itertools.pairwise(times)]
    assert apart == sorted(apart)
    assert apart[-1] == 60
    assert said[10][1] == "version 11, 10 samples/s, loss 0.5, staleness 2.0, 2 learners"


def test_what_is_not_known() -> None:
    training = Training()
    assert not training(_report(0, 0), 0.0)
    assert not training(_report(1, 0), 1.0)
    assert not training(_report(2, 0, watchdog_pid=None, learners=[{"pid": 3}]), 50.0)
    assert training(_report(3, 0, learners=[]), 60.0) == "version 3, staleness 0.0, 0 learners"
    assert training(_report(3, 0), 75.0) == "no gradient has been applied for 15 s"


@pytest.mark.parametrize(
    ("options", "shows"),
    [(RunOptions(), True), (RunOptions(quiet=True), False), (RunOptions(stdout=2), False)],
)
def test_only_in_a_terminal(options: RunOptions, shows: bool) -> None:
    ours, theirs = pty.openpty()
    job = mock.Mock(before={"version": 0})
    try:
        with os.fdopen(theirs, "w") as terminal, mock.patch.object(sys, "stderr", terminal):
            made = run._Run(job, ["true"], options, Compute("host"))
            assert (made.progress is not None) == shows
    finally:
        os.close(ours)
    with open(os.devnull, "w") as file, mock.patch.object(sys, "stderr", file):
        assert run._Run(job, ["true"], options, Compute("host")).progress is None
