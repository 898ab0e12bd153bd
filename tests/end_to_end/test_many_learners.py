"""Two hundred learners of one job, which is more than one system call watches."""

from __future__ import annotations

import os
import signal

import pytest
from support import PATIENCE_S, daemon, status

from gadei_ps.benchmarks.gang import Gang

LEARNERS = 200


@pytest.mark.timeout(600)
def test_two_hundred_learners(job_name: str, compiled: None) -> None:
    """All have their turn, whether the others push or are silent, and each gradient counts once."""
    tensors = [{"name": "w", "shape": [1000]}]
    with (
        daemon(job_name, tensors=tensors),
        Gang([["-m", "gadei_ps.benchmarks.learners_team", "gadei-ps"]]) as gang,
    ):
        gang.ask({"learners": LEARNERS, "job": job_name}, timeout_s=PATIENCE_S)
        made = 0
        for active, dies in ((2, False), (LEARNERS, False), (1, False), (LEARNERS, True)):
            if dies:
                os.kill(status(job_name)["server_pid"], signal.SIGKILL)
            report = gang.ask({"active": active, "seconds": 0.01})[0]
            assert report["least"] > 0
            made += report["made"]
            assert sum(one["applied"] for one in status(job_name)["learners"]) == made
