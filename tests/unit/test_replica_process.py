"""The process of a replica: its log, and what it reports of learners that have failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE_S

from gadei_ps.replicas import replica

LOG = """
gadei-ps: job 'a-0' is served here
reading the data
12:00:00 [info     ] a learner has attached
read 12 rows
gadei-ps: learner 0 (pid 7) ended with exit code 0; none is left
gadei-ps: no learner joined job 'a-0': does the script make a gadei_ps Optimizer?
replica: the last line of the replica
"""


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        (True, "read 12 rows"),
        (
            False,
            "no learner joined job 'a-0': does the script make a gadei_ps Optimizer?",
        ),
    ],
)
def test_why_learners_have_failed(theirs: bool, line: str, tmp_path: Path) -> None:
    """A script that has ended well and never attached does not explain that in its last line."""
    (tmp_path / "log").write_text(LOG)
    assert replica._last_line(str(tmp_path / "log"), theirs=theirs) == line
    assert replica._last_line(str(tmp_path / "none"), theirs=theirs) == ""


PRINTS = """
import io, sys
from gadei_ps.replicas.replica import _Log, _log
sys.stdout = sys.stderr = io.TextIOWrapper(_Log(), write_through=True)
for number in range(10_000):
    print("a line", number, flush=True)
    _log("another one")
"""


def test_a_full_disk_costs_a_replica_its_log_alone() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS], stderr=full, timeout=PATIENCE_S, check=False
        )
    assert done.returncode == 0
