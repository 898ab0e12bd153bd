"""Values that scripts report by name: they are in the history, and never slow a learner."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Stopped, daemon, eventually, status

from gadei_ps.commands import history
from gadei_ps.errors import UsageError
from gadei_ps.job.control import MOST_REPORTED
from gadei_ps.learners import reports
from gadei_ps.learners.client import Client
from gadei_ps.learners.reports import TAKEN, Reports
from gadei_ps.monitoring.following import Follower, scalars

TENSORS = [{"name": "w", "shape": [8]}]


def push(client: Client) -> None:
    client.push({"w": np.ones(8, np.float32)}, loss=2.0, samples=3)
    client.wait_applied()


def reported(job: str) -> list[dict[str, Any]]:
    return [one["reported"] for one in history.read(job)["lines"] if "reported" in one]


def test_they_are_in_the_history(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "SEND_S", 1e9)  # all at the end
    with daemon(job_name, tensors=TENSORS, history=True) as job:
        with Client(job_name) as client:
            push(client)
            for value in (0.5, np.float32(0.75), math.nan, 1.0):
                client.report(accuracy=value)
            client.report(**{"f1/macro": 3})
            # leaving sends them
        eventually(lambda: Path(status(job_name)["history"]).exists() and reported(job_name))
        follower = Follower(Path(status(job_name)["history"]))
        found: dict[str, float] = {}
        for line in follower.read():
            found |= scalars(line)
        assert found == {"accuracy": 0.75, "f1/macro": 3.0}
        assert follower.read() == []
        job.check()
    assert reported(job_name) == [{"accuracy": 0.75, "f1/macro": 3.0}]


def test_a_stopped_watchdog_is_not_waited_for(job_name: str) -> None:
    """Send with the next message what it does not take at once, so that nothing is lost."""
    with daemon(job_name, tensors=TENSORS, history=True), Client(job_name) as client:
        push(client)
        with Stopped(status(job_name)["watchdog_pid"]):
            begin = time.process_time()
            for number in range(2000):
                client.report(number=number)
                if number % 100 == 0:
                    client._reports.send()
            assert time.process_time() - begin < 2.0
        client._reports.send()
        eventually(lambda: Path(status(job_name)["history"]).exists() and reported(job_name))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"a b": 1}, "a name is 1 to 40"),
        ({"": 1}, "a name is 1 to 40"),
        ({"x" * 41: 1}, "a name is 1 to 40"),
        ({TAKEN[0]: 1}, "except loss"),
        ({"accuracy": "high"}, "give one number"),
        ({"accuracy": np.ones(3)}, r"ndarray of shape \[3\]"),
        ({f"n{number}": 1 for number in range(MOST_REPORTED + 1)}, "at most 16"),
    ],
)
def test_what_cannot_be_reported(values: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=why):
        Reports(tmp_path / "no.sock").add(values)


def test_without_a_job_they_wait(tmp_path: Path) -> None:
    made = Reports(tmp_path / "no.sock")
    made.add({"accuracy": 0.5})
    made.send()
    assert made._sums["accuracy"] == [0.5, 1]
